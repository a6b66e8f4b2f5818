"""A pytest plugin: `pytest --ptx 90` executes the PTX of every Triton kernel that tests launch, on tensors on the CPU.

Put `pytest_plugins = ["ptx.plugin"]` into the `conftest.py` of the root, or pass `-p ptx.plugin`.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

ARCHITECTURES = (80, 90, 100)
EXECUTED = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ptx",
        type=int,
        choices=ARCHITECTURES,
        metavar="ARCH",
        help="kernels run neither interpreted nor on a GPU: the PTX that Triton generates for sm_ARCH is executed",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Make the executor Triton's driver before any test module is imported, which may ask Triton for its device."""
    if not (arch := config.getoption("ptx")):
        return
    os.environ["TRITON_INTERPRET"] = "0"
    os.environ.setdefault("TRITON_CACHE_DIR", str(config.rootpath / ".ptx_cache"))
    from .driver import executed
    from .watching import WATCHERS, Fresh

    fresh, opened = Fresh(), ExitStack()
    gpu = opened.enter_context(executed(arch, watchers=(*WATCHERS, fresh.watcher)))
    config.stash[EXECUTED] = gpu, fresh
    config.add_cleanup(opened.close)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how much was executed."""
    gpu, _ = config.stash.get(EXECUTED, (None, None))
    if gpu is not None:
        kernels = len({each.program for each in gpu.launches})
        terminalreporter.write_line(
            f"sm_{gpu.arch} executed {len(gpu.launches)} launches of {kernels} compiled kernels"
        )


@pytest.fixture(scope="session")
def executed_gpu(request: pytest.FixtureRequest) -> Any:
    """The GPU whose PTX is executed: its `launches` and `watchers`; None without `--ptx`."""
    return request.config.stash.get(EXECUTED, (None, None))[0]


@pytest.fixture(autouse=True)
def unwritten_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--ptx`, a kernel that reads memory from `torch.empty` to which nothing was written raises."""
    _, fresh = request.config.stash.get(EXECUTED, (None, None))
    if fresh is not None:
        import torch

        for home, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            monkeypatch.setattr(home, name, _poisoning(getattr(home, name), fresh))


def _poisoning(make: Callable[..., Any], fresh: Any) -> Callable[..., Any]:
    """Return a function, which binds as a method does, that takes the memory it makes for unwritten."""
    import torch

    def made(*args: Any, **kwargs: Any) -> Any:
        tensor = make(*args, **kwargs)
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.dtype != torch.bool:
            fresh.poison(tensor)
        return tensor

    return made

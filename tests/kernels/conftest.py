"""Kernels run where their tensors are; memory that was never written holds NaN."""

import json
import os
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ptx.plugin import EXECUTED

torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--ptx`, leave out the tests of what C computes: they launch no kernel."""
    if config.getoption("ptx"):
        params = [getattr(getattr(each, "callspec", None), "params", {}) for each in items]
        for_cpus = [each for each, of in zip(items, params, strict=True) if of.get("kernels_of") == "in_c"]
        config.hook.pytest_deselected(items=for_cpus)
        items[:] = [each for each in items if each not in for_cpus]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how many variants were executed, and append it as a line of JSON to the file that EXECUTED_COUNTS names."""
    gpu, _ = config.stash.get(EXECUTED, (None, None))
    if gpu is not None:
        from variants import key_of_launch

        variants = len({key_of_launch(each) for each in gpu.launches})
        terminalreporter.write_line(f"They are {variants} variants")
        if "exchanges" in sys.modules:
            counts = sys.modules["exchanges"].COUNTS
            terminalreporter.write_line(
                f"In {counts['orders']} orders of {counts['exchanges']} exchanges, programs had {counts['turns']} turns"
            )
        if path := os.environ.get("EXECUTED_COUNTS"):
            files = [Path(argument).stem for argument in config.args]
            tests = len(terminalreporter.stats.get("passed", []))
            counts = {"arch": gpu.arch, "files": files, "tests": tests, "launches": len(gpu.launches)}
            with open(path, "a") as file:
                file.write(json.dumps(counts | {"variants": variants}) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Append the orders that a passing test has tried, as a line of JSON, to the file that EXECUTED_ORDERS names."""
    counts, begun = getattr(sys.modules.get("exchanges"), "COUNTS", {}), time.process_time()
    before = dict(counts)
    result = yield
    tried = {name: counts[name] - before.get(name, 0) for name in counts}
    if (path := os.environ.get("EXECUTED_ORDERS")) and tried.get("orders"):
        row = {"arch": item.config.getoption("ptx"), "test": f"{item.path.stem}::{item.name}", **tried}
        with open(path, "a") as file:
            file.write(json.dumps(row | {"seconds": round(time.process_time() - begun, 1)}) + "\n")
    return result


@pytest.fixture
def only_executed(request: pytest.FixtureRequest) -> None:
    """Skip the test where nothing is executed as PTX."""
    if not request.config.getoption("ptx"):
        pytest.skip("runs with --ptx")


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def dynamo_started() -> None:
    """torch.compile has traced something: what torch.empty is, it looks up once and remembers."""
    torch.compile(lambda: torch.empty(1) * 0, backend="eager")()


@pytest.fixture(scope="module", autouse=True)
def interpreted_in_half_the_time() -> Iterator[None]:
    """Triton's interpreter replaces the language once a file of tests: a launch takes less than half."""
    if not os.environ.get("TRITON_INTERPRET"):
        yield
        return
    from triton import language
    from triton.language import core
    from triton.runtime import interpreter

    patch, scopes = interpreter._patch_lang, []

    def patch_once(fn: Any) -> Any:
        """Patch what is not patched yet: the language, or its core, which its own functions call."""
        seen = set(map(id, fn.__globals__.values()))
        if any(id(each) in seen and core.is_builtin(each.load) for each in (language, core)):
            scopes.append(patch(fn))
        return interpreter._LangPatchScope()  # of a launch, which restores nothing

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter, "_patch_lang", patch_once)
        yield
    while scopes:
        scopes.pop().restore()


@pytest.fixture(autouse=True)
def unwritten_memory(dynamo_started: None, unwritten_memory: None) -> None:
    """The plugin's, once torch.compile has looked."""


@pytest.fixture(autouse=True)
def poisoned(dynamo_started: None, executed_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is not written holds NaN; with `--ptx` the executor finds what reads it."""
    if executed_gpu is None:
        for home, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            monkeypatch.setattr(home, name, _poisoning(getattr(home, name)))


def _poisoning(make):
    def poisoned_empty(*args, **kwargs):
        made = make(*args, **kwargs)
        return made if made.dtype == torch.bool else made.fill_(float("nan") if made.is_floating_point() else 0x6B)

    return poisoned_empty

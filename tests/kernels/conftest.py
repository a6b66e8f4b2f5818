"""Kernels run where their tensors are; memory that was never written holds NaN."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def dynamo_started() -> None:
    """torch.compile has traced something: what torch.empty is, it looks up once and remembers."""
    torch.compile(lambda: torch.empty(1) * 0, backend="eager")()


@pytest.fixture(autouse=True)
def poisoned(dynamo_started: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for home, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(home, name, _poisoning(getattr(home, name)))


def _poisoning(make):
    def poisoned_empty(*args, **kwargs):
        made = make(*args, **kwargs)
        return made.fill_(float("nan") if made.is_floating_point() else 0xAB) if made.dtype != torch.bool else made

    return poisoned_empty

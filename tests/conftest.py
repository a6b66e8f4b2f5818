"""Fixtures and settings of all tests."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import without_hypothesis
from pool import close_all, ranks

from baguakit.testing import checking

HERE = Path(__file__).parent
if find_spec("hypothesis") is None:
    without_hypothesis.install()
DECIDED_BY_GPU = ("test_cuda.py", "kernels", "test_compressors.py", "primitives", "optim")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Kernels run compiled where there is a GPU, and elsewhere interpreted, or with `--ptx` as PTX that is executed.

    Triton reads the environment when it is imported, by whichever test or other conftest.py comes first.
    """
    if not config.getoption("ptx") and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU, whose time is short, what it decides comes first."""
    if torch.cuda.is_available():
        items.sort(key=lambda item: item.path.relative_to(HERE).parts[0] not in DECIDED_BY_GPU)


def pytest_runtest_setup() -> None:
    """Seed torch, so that what a test draws does not depend on the tests before it."""
    torch.default_generator.manual_seed(0)  # that of CPUs: torch.manual_seed takes 0.4 ms


@pytest.fixture(scope="session", autouse=True)
def pools():
    """End the live ranks with the session."""
    checking.on_ranks = ranks  # on which warnings are errors
    yield
    close_all()

"""What all tests share."""

import os
from pathlib import Path

import pytest
import torch
from pool import close_all

# Triton reads this when it is imported, by whichever test comes first: kernels run compiled where there is a GPU, and
# elsewhere interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

HERE = Path(__file__).parent
DECIDED_BY_GPU = ("test_cuda.py", "kernels", "test_compressors.py", "primitives", "optim")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU, whose time is short, what it decides comes first."""
    if torch.cuda.is_available():
        items.sort(key=lambda item: item.path.relative_to(HERE).parts[0] not in DECIDED_BY_GPU)


@pytest.fixture(scope="session", autouse=True)
def pools():
    """End the live ranks with the session."""
    yield
    close_all()

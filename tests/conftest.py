"""What all tests share."""

import os

import pytest
import torch
from pool import close_all

# Triton reads this when it is imported, by whichever test comes first: kernels run compiled where there is a GPU, and
# elsewhere interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def pools():
    """End the live ranks with the session."""
    yield
    close_all()

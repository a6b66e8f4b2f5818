"""What all tests share."""

import pytest
from pool import close_all


@pytest.fixture(scope="session", autouse=True)
def pools():
    """End the live ranks with the session."""
    yield
    close_all()

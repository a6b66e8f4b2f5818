"""Ranks cannot import what lies here: they are sent it whole."""

from importlib import import_module

import pytest
from pool import Pool, pickle


def pytest_configure():
    """Import them when it is decided how kernels run: algorithms are made in one of them, which imports Triton."""
    for name in ("saying", "schedules", "timelines", "uneven"):
        module = import_module(name)
        if hasattr(pickle, "register_pickle_by_value"):
            pickle.register_pickle_by_value(module)


@pytest.fixture(scope="module")
def own_pools():
    """Ranks whose groups may be broken, by their number."""
    made = {}

    def pool(size):
        return made.setdefault(size, Pool(size))

    yield pool
    for each in made.values():
        each.close()

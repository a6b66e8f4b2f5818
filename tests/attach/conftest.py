"""Ranks cannot import what lies here: they are sent it whole."""

import pytest
import saying
import timelines
import uneven
from pool import Pool, pickle

for module in (saying, timelines, uneven):
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

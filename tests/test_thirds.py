"""`--third`: the slow tests in three parts, of which continuous integration runs another every day."""

import itertools
from types import SimpleNamespace

import pytest


class Item:
    """A test and its markers."""

    def __init__(self, nodeid, markers):
        self.nodeid, self.get_closest_marker = nodeid, markers.get


@pytest.fixture
def chosen(request):
    """Returns which of some tests `--third` leaves, of those that are slow and those that are not, by their names."""
    plugin = request.config.pluginmanager.get_plugin(str(request.config.rootpath / "conftest.py"))

    def chosen(third, slow, fast=(), release=()):
        items = [Item(name, {"slow": name not in fast, "release": name in release}) for name in [*fast, *slow]]
        hook = SimpleNamespace(pytest_deselected=lambda items: None)
        config = SimpleNamespace(getoption={"third": third}.get, hook=hook)
        plugin.pytest_collection_modifyitems(config, items)
        return [item.nodeid for item in items]

    chosen.named = plugin.third_of_today_or
    return chosen


SLOW = [f"tests/test_some.py::test_it[{i}]" for i in range(600)]


def test_three_thirds_are_all_slow_tests_and_none_twice(chosen):
    thirds = [chosen(third, SLOW) for third in (1, 2, 3)]
    assert sorted(itertools.chain(*thirds)) == sorted(SLOW)
    assert all(150 < len(third) < 250 for third in thirds)


def test_a_new_test_moves_no_other(chosen):
    for third in (1, 2, 3):
        few = chosen(third, SLOW[::2])
        assert [name for name in chosen(third, SLOW) if name in SLOW[::2]] == few


def test_tests_that_are_not_slow_stay(chosen):
    assert chosen(2, SLOW, fast=["a", "b"])[:2] == ["a", "b"]
    assert chosen(None, ["b"], fast=["a"]) == ["a", "b"]


def test_tests_of_a_release_are_in_no_third(chosen):
    assert [chosen(third, SLOW, release=SLOW) for third in (1, 2, 3)] == [[], [], []]
    assert chosen(None, ["a", "b"], release=["a"]) == ["a", "b"]


def test_a_third_is_named_by_its_number_or_by_the_day(chosen):
    assert [chosen.named(text) for text in "123"] == [1, 2, 3] and chosen.named("today") in (1, 2, 3)
    with pytest.raises(ValueError):
        chosen.named("4")

"""`--third`: the slow tests in three parts, of which continuous integration runs another every day."""

import itertools
from types import SimpleNamespace

import pytest


class Item:
    """A test and its markers."""

    def __init__(self, name, markers):
        self.name, self.get_closest_marker = name, markers.get


@pytest.fixture
def chosen(request):
    """Returns which of some items `--third` leaves."""
    plugin = request.config.pluginmanager.get_plugin(str(request.config.rootpath / "conftest.py"))

    def chosen(third, slow, release=()):
        items = [Item(i, {"slow": x, "release": i in release}) for i, x in enumerate(slow)]
        hook = SimpleNamespace(pytest_deselected=lambda items: None)
        config = SimpleNamespace(getoption={"third": third}.get, hook=hook)
        plugin.pytest_collection_modifyitems(config, items)
        return [item.name for item in items]

    chosen.named = plugin.third_of_today_or
    return chosen


def test_three_thirds_are_all_slow_tests_and_none_twice(chosen):
    thirds = [chosen(third, [True] * 11) for third in (1, 2, 3)]
    assert sorted(itertools.chain(*thirds)) == list(range(11))
    assert [len(third) for third in thirds] == [4, 4, 3]


def test_tests_that_are_not_slow_stay(chosen):
    assert chosen(2, [True, False, True, True, False]) == [1, 2, 4]
    assert chosen(None, [True, False]) == [0, 1]


def test_tests_of_a_release_are_in_no_third(chosen):
    assert [chosen(third, [True] * 5, release={0, 3}) for third in (1, 2, 3)] == [[1], [2], [4]]
    assert chosen(None, [True] * 2, release={0}) == [0, 1]


def test_a_third_is_named_by_its_number_or_by_the_day(chosen):
    assert [chosen.named(text) for text in "123"] == [1, 2, 3] and chosen.named("today") in (1, 2, 3)
    with pytest.raises(ValueError):
        chosen.named("4")

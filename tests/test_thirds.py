"""`--third`: the slow tests in three parts, of which continuous integration runs another every day."""

from types import SimpleNamespace

SLOW = [f"tests/test_some.py::test_it[{i}]" for i in range(600)]
FAST, RELEASE = "tests/test_fast.py::test_it", "tests/test_release.py::test_it"


def test_three_thirds_are_all_slow_tests_once_and_depend_on_names_alone(request):
    plugin = request.config.pluginmanager.get_plugin(str(request.config.rootpath / "conftest.py"))

    def chosen(third, names):
        markers = {name: {"slow": name != FAST, "release": name == RELEASE}.get for name in names}
        items = [type("Item", (), {"nodeid": name, "get_closest_marker": markers[name]})() for name in names]
        hook = SimpleNamespace(pytest_deselected=lambda items: None)
        config = SimpleNamespace(getoption={"third": third}.get, hook=hook)
        plugin.pytest_collection_modifyitems(config, items)
        return [item.nodeid for item in items]

    every = [FAST, *SLOW, RELEASE]
    thirds = [chosen(third, every) for third in (1, 2, 3)]
    assert chosen(None, every) == every and all(third[0] == FAST for third in thirds)
    assert sorted(name for third in thirds for name in third[1:]) == sorted(SLOW)
    assert [chosen(third, SLOW[::2]) for third in (1, 2, 3)] == [
        [name for name in third if name in SLOW[::2]] for third in thirds
    ]
    assert plugin.third_of_today_or("today") in (1, 2, 3)

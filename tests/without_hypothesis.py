"""The names of hypothesis that tests import, for machines without it: tests that draw values are skipped there."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest


class Strategy:
    """Any strategy: what is made or combined of it is one, too."""

    def __call__(self, *_, **__):
        return self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __or__(self, other):
        return self


class settings:
    """A decorator that changes nothing."""

    def __init__(self, *_, **__):
        pass

    def __call__(self, test):
        return test

    @staticmethod
    def register_profile(*_, **__):
        pass

    load_profile = register_profile


def given(*_, **__):
    """Return a decorator that skips a test, before it asks for its arguments."""
    return pytest.mark.skip(reason="needs hypothesis")


def install():
    """Let `import hypothesis` find these names."""
    parts = {
        "hypothesis": {"given": given, "settings": settings, "strategies": Strategy()},
        "hypothesis.extra": {"numpy": Strategy()},
    }
    for name, contents in parts.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(contents)
        sys.modules[name] = module

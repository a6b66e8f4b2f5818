"""Which cases of a test `make test` runs: the others are marked slow, and run in `make test-all` and in the thirds."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow(value: Any) -> Any:
    """Return a value, or a tuple of the values of several arguments, as a parameter of a test that is marked slow."""
    return pytest.param(*value if isinstance(value, tuple) else (value,), marks=pytest.mark.slow)


def slow_unless(kept: Container[Any], values: Iterable[Any]) -> list[Any]:
    """Return values as parameters of a test: those that are not among `kept` are marked slow."""
    return [each if each in kept else slow(each) for each in values]


def slow_after(number: int, values: Iterable[Any]) -> list[Any]:
    """Return values as parameters of a test: those after the first `number` are marked slow."""
    values = list(values)
    return [*values[:number], *map(slow, values[number:])]


def slow_and_compiled(targets: Iterable[str], one: str = "cuda:90") -> list[Any]:
    """Return targets of compilation as parameters: all are marked slow, and one is also `compiled`.

    The first test of a target waits until all is compiled: minutes, where nothing is cached and other tests run.
    """
    marks = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.compiled]
    return [pytest.param(each, marks=marks if each == one else marks[:2]) for each in targets]

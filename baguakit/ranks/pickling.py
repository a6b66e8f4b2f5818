"""Pickles of functions: by cloudpickle, which takes closures, or by pickle where it is not installed."""

import importlib
import importlib.util
import io
import pickle
from collections import ChainMap
from functools import cache
from types import CodeType
from typing import Any


def takes_closures() -> bool:
    """Return True if cloudpickle is installed."""
    return importlib.util.find_spec("cloudpickle") is not None


def dumps(value: Any) -> bytes:
    """Return a value, pickled."""
    if not takes_closures():
        return pickle.dumps(value)
    file = io.BytesIO()
    _pickler()(file).dump(value)
    return file.getvalue()


@cache
def _pickler() -> Any:
    """Return cloudpickle's class, but code keeps the name of its file, by which tracebacks find its source.

    cloudpickle 3.1.3 writes "<dynamic-code>" in its place.
    """
    kind: Any = importlib.import_module("cloudpickle").Pickler

    def reduced(code: CodeType) -> tuple[Any, ...]:
        make, parts, *more = kind.dispatch_table[CodeType](code)
        named = (code.co_filename if isinstance(part, str) and part == "<dynamic-code>" else part for part in parts)
        return (make, tuple(named), *more)

    return type("Pickler", (kind,), {"dispatch_table": ChainMap({CodeType: reduced}, kind.dispatch_table)})

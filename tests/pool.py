"""Live ranks, kept from test to test: `baguakit.Ranks`, on which warnings are errors."""

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import late_device
import pytest
import torch

from baguakit.ranks import Ranks

try:
    import cloudpickle as pickle  # takes closures
except ImportError:
    import pickle  # takes what the ranks can import: functions at the top of test files

LIMIT = 600.0  # seconds that a call may take: more than a compilation on a busy machine


class Pool(Ranks):
    """`size` ranks that wait for functions to run; with `cuda` they share a GPU."""

    def __init__(self, size: int, cuda: bool = False) -> None:
        super().__init__(size, cuda=cuda, timeout=60)

    def run(
        self, function: Callable[..., Any], *args: Any, limit: float = LIMIT, lost: Sequence[int] = ()
    ) -> list[Any]:
        """Return the values of `function(*args)` by rank; None for the ranks that are expected to be `lost`."""
        by_value(function, *args)
        try:
            return super().run(strictly, function, *args, limit=limit, lost=lost)
        except TypeError as error:
            if "install cloudpickle" in str(error):
                pytest.skip("needs cloudpickle")
            raise


def strictly(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function, and take warnings for errors; what it draws does not depend on the tests before it."""
    torch.default_generator.manual_seed(int(os.environ["RANK"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Guards may run slower", RuntimeWarning)  # torch's, of Python 3.13.0
        warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated", DeprecationWarning)  # of inductor
        return function(*args)


@contextlib.contextmanager
def never_waiting() -> Iterator[None]:
    """Within this block an operation that waits for the GPU is an error."""
    with warnings.catch_warnings():
        # torch warns once in each process that the mode does not yet see every wait.
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


_pools: dict[tuple[int, bool, bool], Pool] = {}


def ranks(
    size: int, function: Callable[..., Any], *args: Any, limit: float = LIMIT, cuda: bool = False, late: bool = False
) -> list[Any]:
    """Run `function(*args)` on `size` live ranks and return what it returns, by rank.

    With `late`, these are ranks of their own, which have the device of `late_device`.
    """
    if (size, cuda, late) not in _pools:
        _pools[size, cuda, late] = Pool(size, cuda)
    if late:
        function, args = late_device.with_device, (function, *args)
    return _pools[size, cuda, late].run(function, *args, limit=limit)


def by_value(*functions: Any) -> None:
    """Have functions of test modules sent whole: the ranks cannot import those."""
    for function in functions:
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        if module is not None and module.__name__.startswith("test_") and hasattr(pickle, "register_pickle_by_value"):
            pickle.register_pickle_by_value(module)


def close_all() -> None:
    while _pools:
        _pools.popitem()[1].close()

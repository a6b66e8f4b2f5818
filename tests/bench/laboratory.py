"""Helpers of the tests of the network laboratory: a mark for tests that need root, and a wait with a limit."""

import time
from pathlib import Path

import pytest

from bench.netlab import obstacle

ROOT = Path(__file__).parents[2]
OBSTACLE = obstacle()
needs_root = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))


def within(seconds, truth):
    """Return whether a condition becomes true in time."""
    until = time.monotonic() + seconds
    while not truth() and time.monotonic() < until:
        time.sleep(0.02)
    return truth()

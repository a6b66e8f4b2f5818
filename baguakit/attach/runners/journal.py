"""States as they were before flights that may be lost with a rank."""

from collections import deque
from typing import Any

from torch import Tensor

from ...stages import State


class Journal:
    """Copies of the state of each bucket, made on the lane before each flight, until the step in which it lands ends.

    A step that is lost is lost whole: what its flights have changed goes back to these copies.
    """

    def __init__(self, buckets: int) -> None:
        self._before: list[deque[State]] = [deque() for _ in range(buckets)]
        self._landed = [0] * buckets

    def before(self, i: int, state: State) -> None:
        """Copy the state of bucket `i`, which a flight is about to change."""
        self._before[i].append(copied(state))

    def landed(self, i: int) -> None:
        """Count a flight of bucket `i` that has landed."""
        self._landed[i] += 1

    def step_ended(self) -> None:
        """Keep what the flights have brought that have landed."""
        for before, landed in zip(self._before, self._landed, strict=True):
            for _ in range(min(landed, len(before))):
                before.popleft()
        self._landed = [0] * len(self._landed)

    def state(self, i: int, now: State) -> State:
        """Return the state of bucket `i` before the flights that are lost; `now` is what it is after them."""
        return self._before[i][0] if self._before[i] else now


def copied(state: Any) -> Any:
    """Return a copy of a nested dict of tensors."""
    if isinstance(state, dict):
        return {name: copied(value) for name, value in state.items()}
    return state.clone() if isinstance(state, Tensor) else state

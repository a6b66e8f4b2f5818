"""The clock of training: its step, and the times of the latest steps on this rank, recorded by hooks.

A time costs a reading of the clock, or on CUDA an event in the stream of training; nothing is waited for. With one rank
nothing is recorded.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial

import torch

from ..lanes import Moment, between, moment, passed
from .runner import RECORDED


class Turn(IntEnum):
    """The next collective of a rank: a backward, the start of a step, or the end of a step."""

    BACKWARD, BEGIN, END = 1, 2, 3


@dataclass
class Clock:
    """The step of an attachment, and the modes that its user has entered."""

    step: int = 0  # optimizer steps made since the attachment was made
    synchronising: bool = True  # false inside `no_sync()`, where gradients are only accumulated
    tell: Callable[[int], None] | None = None  # in `join()`: announces the next collective to ranks out of batches
    joined: str = ""  # the call of `join()` under way

    def announce(self, what: Turn) -> None:
        """Announce the next collective, before it is done: outside `join()` no rank waits for that."""
        if self.tell is not None:
            self.tell(what)

    def outside(self, what: str) -> None:
        """Raise a RuntimeError inside `join()`, where a rank that has run out of batches would not make this call."""
        if self.joined:
            raise RuntimeError(
                f"all ranks make {what} together, and inside att.join() one that has run out of batches would not; "
                "call it before or after"
            )


STEP, BACKWARD = "step", "backward"


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step: from the end of the one before it, or from when the hooks were set, to its own."""

    step: int
    begin: Moment
    end: Moment
    parts: tuple[tuple[str, Moment, Moment], ...]  # each with its name
    accumulated: bool = False  # gradients were accumulated under `no_sync` first


@dataclass(eq=False)
class Logbook:
    """The latest steps.

    Attributes:
        now: returns the moment; None where nothing is recorded.
        parts: of the step under way, each with its name, begin and end.
        accumulated: gradients were accumulated under `no_sync` in it.
    """

    device: torch.device  # of the recorded moments
    on: bool  # False records nothing
    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=RECORDED))

    def __post_init__(self) -> None:
        clock = time.perf_counter if self.device.type == "cpu" else partial(moment, self.device)
        self.now: Callable[[], Moment] = clock if self.on else lambda: None
        self.clear()

    def clear(self) -> None:
        """Forget all steps, and begin one now."""
        self.steps.clear()
        self.parts: list[tuple[str, Moment, Moment]] = []
        self.accumulated, self._since = False, self.now()

    def step_ended(self, step: int) -> None:
        """End the step, and begin the next."""
        if self.on:
            now = self.now()
            self.steps.append(StepRecord(step, self._since, now, tuple(self.parts), self.accumulated))
            self._since = now
        self.parts, self.accumulated = [], False

    def seconds_per_step(self) -> float | None:
        """Return the mean over the steps that have passed on the device; None before one has. Waits for nothing."""
        over = [record for record in self.steps if passed(record.end)]
        return between(over[0].begin, over[-1].end) / len(over) if over else None

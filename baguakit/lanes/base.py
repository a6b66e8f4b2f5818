"""The interface of lanes of both kinds."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .moments import Moment, between


@dataclass(frozen=True)
class Passage:
    """When a flight was launched, when its work began and ended on the lane, and from when to when it was waited for.

    A wait that begins after the end has taken no time, and may read as ending before it began.
    """

    launched: Moment
    begun: Moment
    arrived: Moment
    waits: tuple[tuple[Moment, Moment], ...]


class Flight:
    """Work on a lane: `done()` asks, `result()` waits for it."""

    def done(self) -> bool:
        """Whether the work has been finished; never waits."""
        raise NotImplementedError

    def result(self) -> Any:
        """Return what the work returned, or raise what it raised. On CUDA the stream waits, and the host does not."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """End the flight with `error`, unless it is done."""

    def forget(self) -> None:
        """Let go of the result: who keeps the flight for its times need not keep its memory."""

    def over(self) -> bool:
        """Whether all moments of the passage so far have passed, so that nothing is waited for in reading them."""
        return self.done()

    def passage(self) -> Passage:
        """When all this happened; of a flight that is done."""
        raise NotImplementedError

    def seconds(self) -> tuple[float, float]:
        """How long the work took on its lane, and how long training stood still for it; waits unless it is over."""
        p = self.passage()
        return between(p.begun, p.arrived), sum(max(0.0, between(*wait)) for wait in p.waits)


class Lane:
    """Runs work in order, beside the training loop."""

    def run(self, work: Callable[[], Any], name: str = "") -> Flight:
        """Put `work` on the lane; a profiler knows it by its `name`."""
        raise NotImplementedError

    def follow(self, streams: Iterable[Any]) -> None:
        """Let work launched from now on see all that these streams have been given, besides the current one."""

    def uses(self, value: Any) -> None:
        """Let the memory of the tensors in `value`, made elsewhere, stay theirs until work launched now has used it."""

    def close(self, wait: bool = True) -> None:
        """Take no more work, and let what is under way end; without `wait`, also when it is stuck."""

"""The part of an attachment for ranks that come and go: see `bk.elastic`."""

import contextlib
from collections.abc import Callable
from typing import Any

from .engine import Engine


class Recoverable:
    """An attachment to a group of `bk.elastic.join`."""

    _engine: Engine

    @property
    def ranks(self) -> int:
        """Return the number of ranks, which changes in a group of `bk.elastic.join`."""
        return self._engine.comm.size

    def recoverable(self) -> contextlib.AbstractContextManager[None]:
        """Lose no more than the step in the body if a rank is lost; a group of `bk.elastic.join` changes at its end.

            while att.step < 10_000:
                with att.recoverable():
                    optimizer.zero_grad()
                    loss(model(*next(batches))).backward()
                    optimizer.step()

        If a rank has died, hangs or has left, the body ends early, and so it does on all ranks: the step is lost. Those
        that are left make a new group and go on from the end of the step before. Ranks that wait to join, or that
        leave, are let in and out at the end of a body. The body holds one optimizer step. What it changes besides the
        model, the optimizers and this attachment, such as a learning-rate scheduler, is not taken back: derive it from
        `step`.

        Raises:
            ValueError: the group does not change.
            Left: this rank has left, by `leave()` or SIGTERM; a `SystemExit`.
        """
        return self._membership("recoverable()").recoverable()  # type: ignore[no-any-return]

    def leave(self) -> None:
        """Leave the group when the body of `recoverable()` has ended, which then raises `bk.elastic.Left`. Local."""
        self._membership("leave()").leave()

    def on_regroup(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(change)` whenever the group has changed, before the next step. All ranks register alike.

        Args:
            callback: is given a `bk.elastic.Change`, on all ranks at the same time, so that it may be collective. On a
                rank that has joined a running training it is called at once, and so together with the others.
        """
        self._membership("on_regroup()").on_regroup(callback)

    def _membership(self, call: str) -> Any:
        if (membership := self._engine.comm.membership) is None:
            raise ValueError(f"{call} needs a group whose ranks come and go: comm=bk.elastic.join(…)")
        return membership

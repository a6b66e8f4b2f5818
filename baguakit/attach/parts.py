"""The parts of an attachment for gradients, for ranks that come and go, and for tuners."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .engine import Engine


class Gradients:
    """An attachment with rules on gradients."""

    _engine: Engine

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients in the backward passes of the body, as with `DistributedDataParallel.no_sync`.

        The first backward outside averages what has been accumulated. Local.
        """
        clock = self._engine.clock
        before, clock.synchronising = clock.synchronising, False
        try:
            yield
        finally:
            clock.synchronising = before

    def average_(self) -> None:
        """Average the gradients that are now in `.grad` and that no backward has brought there, in place. Collective.

            for p, g in zip(params, torch.autograd.grad(loss, params)):     # or torch.func.grad, or per-sample ones
                p.grad = g
            att.average_()
            optimizer.step()

        The rules on gradients do the same with them as after a backward, and clipping follows. Gradients that have
        landed since the last step stay as they are. Without an attached optimizer all are averaged, and it is a step.

        Raises:
            ValueError: there is no rule on gradients.
            RuntimeError: this is detached.
        """
        self._engine.average_gradients()


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
        return self._engine.comm.membership.recoverable()

    def leave(self) -> None:
        """Leave the group when the body of `recoverable()` has ended, which then raises `bk.elastic.Left`. Local."""
        self._engine.comm.membership.leave()

    def on_regroup(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(change)` whenever the group has changed, before the next step. All ranks register alike.

        Args:
            callback: is given a `bk.elastic.Change`, on all ranks at the same time, so that it may be collective. On a
                rank that has joined a running training it is called at once, and so together with the others.
        """
        self._engine.comm.membership.on_regroup(callback)


class Tunable:
    """The settings of an attachment that a tuner changes, and what it needs to know for that."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def setting(self) -> tuple[int, int]:
        """Return the present size of buckets in bytes and number of flows; `recut` changes them."""
        return self._engine.setup.bucket_bytes, self._engine.flows

    @property
    def tuned(self) -> dict[str, int] | None:
        """Return the `bucket_bytes` and `flows` that tuning found, if it has ended: part of the attachment's state."""
        return self._engine.tuned

    @tuned.setter
    def tuned(self, found: dict[str, int] | None) -> None:
        self._engine.tuned = found

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self._engine.runtime.comm.size

    @property
    def device(self) -> torch.device:
        """Return the device of the parameters."""
        return self._engine.setup.device

    @property
    def names(self) -> dict[Tensor, str]:
        """Return the names of the trainable parameters."""
        return self._engine.setup.names

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each step from now on. Until `unlisten`, `join()` raises."""
        self._engine.listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Call `listener` no more."""
        if listener in self._engine.listeners:
            self._engine.listeners.remove(listener)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks. Collective."""
        gathered: list[Any] = self._engine.together("tuning", lambda comm: comm.gather_objects(value))
        return gathered

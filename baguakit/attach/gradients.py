"""The part of an attachment for gradients that are accumulated, or that no backward brings."""

import contextlib
from collections.abc import Iterator

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

"""The CUDA streams on which autograd accumulates gradients: those of their forward passes, which may be several.

Autograd lets the stream that called backward wait for all of them, but only when backward has ended. A bucket flies
earlier, and its gradients may be freed later.
"""

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor

from ..lanes import Lane, current_stream


class LeafStreams:
    """Where the gradients that have not landed yet were accumulated. Empty on the CPU."""

    def __init__(self) -> None:
        self.params: dict[Any, set[Tensor]] = {}  # by stream

    def note(self, p: Tensor) -> None:
        """A gradient of `p` has been accumulated, on the current stream."""
        if (stream := current_stream(p.device)) is not None:
            self.params.setdefault(stream, set()).add(p)

    def of(self, params: Iterable[Tensor]) -> list[Any]:
        """Return the streams that have accumulated gradients of these parameters."""
        wanted = list(params)
        return [stream for stream, made in self.params.items() if not made.isdisjoint(wanted)]

    def landed(self, lanes: Collection[Lane]) -> None:
        """Let gradients keep their memory until the lanes have read it: the current stream has waited for them.

        Only a stream that has waited, too, may get that memory again as soon as the host lets go of a gradient.
        """
        for stream, params in self.params.items():
            for lane in lanes if stream != current_stream(stream.device) else ():
                lane.uses([p.grad for p in params])
        self.params.clear()

"""The CUDA streams on which autograd accumulates gradients: those of their forward passes, which may be several.

Autograd makes the stream that called backward wait for all of them, but only at the end of backward. A bucket is
launched earlier, and its gradients may be freed later.
"""

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor

from ...lanes import Lane, current_stream


class LeafStreams:
    """The streams that have accumulated the gradients that have not landed yet. Empty on the CPU."""

    def __init__(self) -> None:
        self.params: dict[Any, set[Tensor]] = {}  # by stream

    def note(self, p: Tensor) -> None:
        """Note that the current stream has accumulated a gradient of `p`."""
        if (stream := current_stream(p.device)) is not None:
            self.params.setdefault(stream, set()).add(p)

    def of(self, params: Iterable[Tensor]) -> list[Any]:
        """Return the streams that have accumulated gradients of these parameters."""
        wanted = list(params)
        return [stream for stream, made in self.params.items() if not made.isdisjoint(wanted)]

    def follow(self, params: Iterable[Tensor]) -> None:
        """Let the current stream wait for the gradients of these parameters, and keep their memory until it has."""
        wanted = set(params)
        for stream, made in self.params.items():
            here = current_stream(stream.device)
            for p in made & wanted if stream != here else ():
                here.wait_stream(stream)
                if p.grad is not None:
                    p.grad.record_stream(here)

    def landed(self, lanes: Collection[Lane]) -> None:
        """Keep the memory of the gradients until the lanes have read it, and forget the gradients.

        The current stream has waited for the lanes. Other streams have not, and could otherwise reuse that memory as
        soon as the host frees a gradient.
        """
        for stream, params in self.params.items():
            for lane in lanes if stream != current_stream(stream.device) else ():
                lane.uses([p.grad for p in params])
        self.params.clear()

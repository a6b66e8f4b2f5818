"""Kernels of several ranks that talk to each other through memory, with the memory model checked.

    together    launches of all ranks, at once
    orders      in which order programs run: drawn, or every one
    running     programs run in turns; waits that never end
    turns       one program
    watch       the observer of all launches
    places      whose memory it is
    words       signals: what was released, and who has acquired it
    clocks      what each thread knows of every other
    shadow      races, byte by byte
    traffic     bytes that go between ranks

Sections that are named are those of the manual "Parallel Thread Execution ISA", chapter 8.
"""

from .orders import Order, drawn, every
from .running import Together
from .together import together

__all__ = ["Order", "Together", "drawn", "every", "together"]

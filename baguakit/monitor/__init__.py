"""The monitor: it names the rank at fault when a flight does not arrive."""

from .judging import differing, first_line, store_gone, store_silent
from .monitor import Monitor, PeerError, end_with_process
from .records import Collective

__all__ = [
    "Collective", "Monitor", "PeerError", "differing", "end_with_process", "first_line", "store_gone",
    "store_silent",
]  # fmt: skip

"""The monitor: it names the rank at fault when a flight does not arrive."""

from .collective import Collective
from .errors import PeerError
from .monitor import Monitor

__all__ = ["Collective", "Monitor", "PeerError"]

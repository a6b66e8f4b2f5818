"""Rules on a model and its optimizer, as hooks. Only this package handles autograd and the user's optimizer."""

from ..monitor import PeerError
from ..report import Report, Timeline
from .attachment import Attachment, attach
from .engine import Engine

__all__ = ["Attachment", "Engine", "PeerError", "Report", "Timeline", "attach"]

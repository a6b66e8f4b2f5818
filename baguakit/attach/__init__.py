"""Rules on a model and its optimizer, as hooks: the only room that knows autograd and the user's optimizer."""

from ..monitor import PeerError
from ..report import Report, Timeline
from .attachment import Attachment, attach
from .engine import Engine

__all__ = ["Attachment", "Engine", "PeerError", "Report", "Timeline", "attach"]

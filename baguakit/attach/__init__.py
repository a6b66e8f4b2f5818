"""`attach` runs rules on a model and its optimizer, by hooks on the parameters and on the optimizer."""

from ..monitor import PeerError
from ..report import Report, Timeline
from .attachment import Attachment, attach
from .engine import Engine

__all__ = ["Attachment", "Engine", "PeerError", "Report", "Timeline", "attach"]

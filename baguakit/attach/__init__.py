"""Rules on a model and its optimizer, as hooks: the only room that knows autograd and the user's optimizer."""

from .attachment import Attachment, attach
from .monitor import PeerError
from .seeing.report import Report
from .seeing.timeline import Timeline

__all__ = ["Attachment", "PeerError", "Report", "Timeline", "attach"]

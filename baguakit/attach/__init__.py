"""Rules on a model and its optimizer, as hooks: the only room that knows autograd and the user's optimizer."""

from .attachment import Attachment, attach

__all__ = ["Attachment", "attach"]

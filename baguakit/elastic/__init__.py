"""Elastic groups: training continues when ranks are lost, and new ranks can join.

Training runs in *rounds*, each with a fixed set of ranks, on which all ranks agree through a key-value store. A round
ends at once when a connection breaks. When a process waits to join or a rank leaves, the round ends after a step that
all ranks agree on. Then the next round begins, from the last complete step.
"""

from ..expressions import show_public
from .membership import Change, join
from .rounds import Left

__all__ = ["Change", "Left", "join"]

show_public(__name__)

"""Ranks that come and go: training continues when some are lost, and lets new ones in.

The rendezvous of torch.distributed.elastic, used within the training process, decides who is in a *round* and numbers
the ranks. A round ends when a connection breaks, or after a step on which all agree if a rank waits to join or leaves.
Then all meet again, and go on from their last whole steps.
"""

from .changes import Change, Left
from .group import join

__all__ = ["Change", "Left", "join"]

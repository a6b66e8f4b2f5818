"""Ranks that come and go: training continues when ranks are lost, and new ranks can join.

All ranks meet in a key-value store, and agree there on the members of the next *round*. A round ends when a connection
breaks. It also ends when a process waits to join or a rank leaves, after a step that all ranks agree on. Then all ranks
meet again, and continue from their last complete steps.
"""

import sys

from ..expressions import show_public
from .membership import Change, join
from .rounds import Left

__all__ = ["Change", "Left", "join"]

show_public(sys.modules[__name__])

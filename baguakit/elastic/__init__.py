"""Ranks that come and go: training continues when some are lost, and lets new ones in.

All ranks meet in a store, and agree there on who is in the next *round*. A round ends when a connection breaks, or
after a step on which all agree if a process waits to join or a rank leaves. Then all meet again, and go on from their
last whole steps.
"""

import sys

from ..expressions import show_public
from .membership import Change, join
from .rounds import Left

__all__ = ["Change", "Left", "join"]

show_public(sys.modules[__name__])

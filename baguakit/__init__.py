"""baguakit: communication primitives for data-parallel PyTorch training on slow networks.

An algorithm is an expression: it states the exchange, the peers, the compression and the time in the training step.

    bytegrad = during_backward(CompressedMean(MinMaxUInt8()))
"""

import importlib
import sys
from typing import TYPE_CHECKING

from . import algorithms, compressors, interop, optim, primitives, stages, topology
from .attach import Attachment, PeerError, Report, Timeline, attach
from .buckets import Bucket
from .comm import Comm
from .expressions import show_public
from .interop import Handle
from .rules import Algorithm, Rule, after_step, between_steps, during_backward, free_running, hierarchical
from .schedules import BySpeed, Fragment

__all__ = [
    "Algorithm", "Attachment", "Bucket", "BySpeed", "Comm", "Fragment", "Handle", "PeerError", "RankError", "Ranks",
    "Report", "Rule", "Timeline", "Window", "after_step", "algorithms", "attach", "backend", "between_steps",
    "compressors", "data", "during_backward", "elastic", "free_running", "hierarchical", "interop", "net", "optim",
    "pictures", "primitives", "ranks", "stages", "sync", "testing", "topology", "tune",
]  # fmt: skip
__version__ = "0.3.0.dev0"

if TYPE_CHECKING:
    from . import backend, data, elastic, net, pictures, ranks, sync, testing, tune
    from .ranks import RankError, Ranks
    from .windows import Window
else:  # a type checker would take any name for one of these

    def __getattr__(name: str) -> object:
        """Import what training does not need at its first use, so that other programs do not wait for it."""
        if name in ("RankError", "Ranks", "Window"):
            return getattr(importlib.import_module(".windows" if name == "Window" else ".ranks", __name__), name)
        if name in __all__:
            return importlib.import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])


show_public(__name__)

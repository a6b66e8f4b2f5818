"""baguakit: communication primitives for data-parallel PyTorch training on slow networks.

An algorithm is an expression: it states the exchange, the peers, the compression and the time in the training step.

    bytegrad = during_backward(CompressedMean(MinMaxUInt8()))
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from . import algorithms, compressors, data, interop, net, optim, pictures, primitives, ranks, stages, topology, tune
from .attach import Attachment, PeerError, Report, Timeline, attach
from .buckets import Bucket
from .comm import Comm
from .expressions import show_public
from .interop import Handle
from .ranks import RankError, Ranks
from .rules import Fragment, Rule, after_step, between_steps, during_backward, free_running, hierarchical

__all__ = [
    "Attachment", "Bucket", "Comm", "Fragment", "Handle", "PeerError", "RankError", "Ranks", "Report", "Rule",
    "Timeline", "after_step", "algorithms", "attach", "backend", "between_steps", "compressors", "data",
    "during_backward", "elastic", "free_running", "hierarchical", "interop", "net", "optim", "pictures",
    "primitives", "ranks", "stages", "topology", "tune",
]  # fmt: skip
__version__ = "0.2.0"

if TYPE_CHECKING:
    from . import backend, elastic


def __getattr__(name: str) -> ModuleType:
    """Import `bk.backend` or `bk.elastic` at its first use, so that other programs do not wait for the import."""
    if name not in ("backend", "elastic"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    return importlib.import_module(f".{name}", __name__)


show_public(sys.modules[__name__])

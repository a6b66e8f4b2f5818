"""baguakit: communication primitives for data-parallel PyTorch training on slow networks.

An algorithm says what is exchanged, with whom, how it looks on the wire, and when in the training step:

    bytegrad = during_backward(CompressedMean(MinMaxUInt8()))
"""

from . import algorithms, compressors, data, interop, net, optim, pictures, primitives, ranks, stages, topology, tune
from .attach import attach
from .buckets import Bucket
from .comm import Comm
from .ranks import Ranks
from .rules import Fragment, after_step, between_steps, during_backward, free_running, hierarchical

__all__ = [
    "Bucket",
    "Comm",
    "Fragment",
    "Ranks",
    "after_step",
    "algorithms",
    "attach",
    "between_steps",
    "compressors",
    "data",
    "during_backward",
    "free_running",
    "hierarchical",
    "interop",
    "net",
    "optim",
    "pictures",
    "primitives",
    "ranks",
    "stages",
    "topology",
    "tune",
]
__version__ = "0.1.0"

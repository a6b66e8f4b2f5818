"""Costs: the measurements of a network, and the model of what an exchange takes on it.

Each stage declares its cost in these terms, in its method `cost`; `tune` predicts training steps from them.
"""

from .model import FP32, Cost, Load, Place, degree, exchange, overlapped, piped, rounds_of
from .network import Codec, Line, Link, Network, all_gather, all_reduce, neighbors, ring

__all__ = [
    "FP32",
    "Codec",
    "Cost",
    "Line",
    "Link",
    "Load",
    "Network",
    "Place",
    "all_gather",
    "all_reduce",
    "degree",
    "exchange",
    "neighbors",
    "overlapped",
    "piped",
    "ring",
    "rounds_of",
]

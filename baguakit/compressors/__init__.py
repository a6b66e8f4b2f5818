"""Compressors: how a tensor looks on the wire.

A compressor turns rows of values into rows of bytes: a row for each rank that a tensor is cut up for, or came from.
"""

from .base import Compressor
from .casts import BFloat16, Float16
from .minmax_uint8 import MinMaxUInt8
from .topk import TopK

__all__ = ["BFloat16", "Compressor", "Float16", "MinMaxUInt8", "TopK"]

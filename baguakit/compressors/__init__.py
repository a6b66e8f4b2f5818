"""Compressors: the formats of tensors on the wire.

A compressor turns rows of values into rows of bytes. A row goes to one rank, or comes from one rank.
"""

from .base import Compressor
from .base import check_dense as check_dense
from .base import check_dtype as check_dtype
from .formats import BFloat16, Float8, Float16, MinMaxUInt8, Sign, TopK, UInt2, UInt4, Uniform

__all__ = ["BFloat16", "Compressor", "Float8", "Float16", "MinMaxUInt8", "Sign", "TopK", "UInt2", "UInt4", "Uniform"]

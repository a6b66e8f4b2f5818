"""Optimizers that step over a few flat tensors instead of thousands of small ones."""

from .fusion import fuse, unfuse
from .report import Report, report

__all__ = ["Report", "fuse", "report", "unfuse"]

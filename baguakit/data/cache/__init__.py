"""Cached datasets."""

from .codec import Codec, Pickle, Plain
from .counters import CacheReport
from .dataset import CachedDataset

__all__ = ["CacheReport", "CachedDataset", "Codec", "Pickle", "Plain"]

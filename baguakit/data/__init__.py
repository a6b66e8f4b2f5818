"""Load-balanced sampling and cached datasets."""

from .cache import CachedDataset, CacheReport, Codec, Pickle, Plain
from .samplers import LoadBalancedBatchSampler, LoadBalancedSampler
from .stores import LMDBStore, MemoryStore, RedisStore, Store, StoreError, StoreStats

__all__ = [
    "CacheReport",
    "CachedDataset",
    "Codec",
    "LMDBStore",
    "LoadBalancedBatchSampler",
    "LoadBalancedSampler",
    "MemoryStore",
    "Pickle",
    "Plain",
    "RedisStore",
    "Store",
    "StoreError",
    "StoreStats",
]

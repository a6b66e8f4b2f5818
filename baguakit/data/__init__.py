"""Load-balanced sampling and cached datasets."""

from ..expressions import show_public
from .cached import CachedDataset, CacheReport
from .codec import Pickle, Plain
from .lmdb_store import LMDBStore
from .load_balanced import LoadBalancedBatchSampler, LoadBalancedSampler
from .redis_store import RedisStore
from .stores import MemoryStore, Store, StoreError

__all__ = [
    "CacheReport", "CachedDataset", "LMDBStore", "LoadBalancedBatchSampler", "LoadBalancedSampler",
    "MemoryStore", "Pickle", "Plain", "RedisStore", "Store", "StoreError",
]  # fmt: skip

show_public(__name__)

"""Stores of cached samples: in memory, in an LMDB file of the node, or in Redis servers."""

from .base import Store, StoreError, StoreStats
from .lmdb_store import LMDBStore
from .memory import MemoryStore
from .redis_store import RedisStore

__all__ = ["LMDBStore", "MemoryStore", "RedisStore", "Store", "StoreError", "StoreStats"]

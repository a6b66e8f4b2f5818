"""Where cached samples live: in memory, in a file of the node, or in Redis servers."""

from .base import Store, StoreError, StoreStats
from .embedded import LMDBStore
from .memory import MemoryStore
from .servers import RedisStore

__all__ = ["LMDBStore", "MemoryStore", "RedisStore", "Store", "StoreError", "StoreStats"]

"""Stages in the hooks of other trainers: `DistributedDataParallel`, FSDP2 and Lightning.

Only `interop.lightning.BaguaStrategy` needs Lightning, and imports it when the strategy is first used.
"""

from . import lightning
from .data_parallel import ddp
from .handle import Handle
from .sharded import fsdp

__all__ = ["Handle", "ddp", "fsdp", "lightning"]

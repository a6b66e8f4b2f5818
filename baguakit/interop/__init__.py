"""Stages in the hooks of other trainers: `DistributedDataParallel`, FSDP2 and Lightning.

Only `interop.lightning.BaguaStrategy` needs Lightning, which is imported at the first use of this strategy.
"""

from . import lightning
from .data_parallel import ddp
from .handle import Handle
from .sharded import fsdp

__all__ = ["Handle", "ddp", "fsdp", "lightning"]

"""Stages in the hooks of other trainers: `DistributedDataParallel`, FSDP2, Lightning and transformers.

Lightning and transformers are imported at the first use of `interop.lightning.BaguaStrategy` and of
`interop.transformers.BaguaCallback`, which alone need them.
"""

from . import lightning, transformers
from .data_parallel import ddp
from .handle import Handle
from .sharded import fsdp

__all__ = ["Handle", "ddp", "fsdp", "lightning", "transformers"]

"""The same stages in the hooks of others: `DistributedDataParallel`, FSDP2 and Lightning.

`interop.lightning` is imported when it is first asked for: Lightning need not be there for the others.
"""

import importlib
from types import ModuleType

from .data_parallel import ddp
from .handle import Handle
from .sharded import fsdp

__all__ = ["Handle", "ddp", "fsdp"]


def __getattr__(name: str) -> ModuleType:
    if name == "lightning":
        return importlib.import_module(".lightning", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

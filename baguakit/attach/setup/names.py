"""The names of parameters, without the components that wrappers of modules add.

`torch.compile` calls a module `_orig_mod`, DDP `module`, FSDP `_fsdp_wrapped_module`, and activation checkpointing
`_checkpoint_wrapped_module`. A state is saved under names without them, and so loads with other wrappers or without.
"""

from collections import Counter
from collections.abc import Collection

from torch import Tensor, nn

WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def named(model: nn.Module) -> dict[Tensor, str]:
    """Return the parameters of a model and their plain names."""
    params: dict[str, Tensor] = dict(model.named_parameters())
    plain = plain_names(params)
    return {p: plain[name] for name, p in params.items()}


def plain_names(names: Collection[str]) -> dict[str, str]:
    """Return for each of these names the one without wrappers, or itself where two would be the same."""
    plain = {name: _plain(name) for name in names}
    count = Counter(plain.values())
    return {name: short if count[short] == 1 else name for name, short in plain.items()}


def _plain(name: str) -> str:
    *modules, own = name.split(".")
    return ".".join([*(each for each in modules if each not in WRAPPERS), own])

"""Random number generators, left as they were found."""

import contextlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass
class Chance:
    """Whether anything random has been drawn; known when the context has been left."""

    was_taken: bool = False


@contextlib.contextmanager
def undisturbed(devices: Iterable[torch.device]) -> Iterator[Chance]:
    """Put back the global generators of torch (on the CPU and `devices`), numpy and Python after the body."""
    chance, modules = Chance(), [(torch.get_device_module(d), d) for d in devices if d.type not in ("cpu", "meta")]

    def states() -> list[Any]:
        on_devices = [module.get_rng_state(d) for module, d in modules]
        return [torch.get_rng_state(), random.getstate(), np.random.get_state(), *on_devices]

    before = states()
    try:
        yield chance
    finally:
        chance.was_taken = not _equal(states(), before)
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
        for (module, d), state in zip(modules, before[3:], strict=True):
            module.set_rng_state(state, d)


def _equal(a: Any, b: Any) -> bool:
    """Equality of states, which are made of tensors, arrays and tuples."""
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(np.array_equal(a, b))

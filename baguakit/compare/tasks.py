"""The task of a comparison: the model, the data and the loss, from a function that "MODULE:FUNCTION" names."""

import functools
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from . import language
from .names import named

OPTIMIZERS = ("adamw", "momentum", "muon", "sgd")
GPT = "baguakit.compare.language:gpt"


class Training(NamedTuple):
    """The training of one rank, which a task's function returns; a tuple of the three does as well.

    Attributes:
        model: equal on all ranks.
        loss: `loss(model, step)` calls `model` on this rank's batch of a step, 1 or more, and returns the loss.
        validate: `validate(model)` returns a number to minimise, or {name: number} with that number first.
    """

    model: nn.Module
    loss: Callable[[nn.Module, int], Tensor]
    validate: Callable[[nn.Module], float | Mapping[str, float]]


@dataclass(frozen=True)
class Task:
    """A task. The learning rate rises for `warmup` steps and then stays, so that losses at all steps compare.

    Attributes:
        place: "module:function". The function of (seed, rank, number of ranks) returns a `Training`.
        every: steps between validations.
    """

    place: str = GPT
    warmup: int = 50
    every: int = 50

    def begin(self, seed: int, rank: int, ranks: int) -> Training:
        """Call the function; raise a TypeError that names it if it does not return a training."""
        found = named(self.place)(seed, rank, ranks)
        if not isinstance(found, tuple) or len(found) != 3 or not isinstance(found[0], nn.Module):
            raise TypeError(f"{self.place} returns a tuple (model, loss, validate), not {type(found).__name__}")
        return Training(*found)

    def facts(self) -> dict[str, Any]:
        """Return what a result depends on, for JSON."""
        data = {"text": language.text(language.CONTEXT)[2]} if self.place == GPT else {"source": source_of(self.place)}
        return asdict(self) | data


@functools.cache
def source_of(place: str) -> str:
    """Return the digest of the file of the module in "module:name"; "" if `place` names none."""
    file = getattr(sys.modules.get(place.partition(":")[0]), "__file__", None) if ":" in place else None
    return f"{zlib.crc32(Path(file).read_bytes()):08x}" if file else ""


def optimizers_of(model: nn.Module, name: str, lr: float) -> list[Optimizer]:
    """Return the optimizers of a name in `OPTIMIZERS`; "muon" steps weights of linear layers, and AdamW the rest."""
    if name in ("sgd", "momentum"):
        return [SGD(model.parameters(), lr, momentum=0.9 if name == "momentum" else 0.0)]
    matrices = [each.weight for each in model.modules() if isinstance(each, nn.Linear) and name == "muon"]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    first: list[Optimizer] = [AdamW(others, lr, betas=(0.9, 0.95))]
    return [*first, Muon(matrices, lr, adjust_lr_fn="match_rms_adamw")] if matrices else first

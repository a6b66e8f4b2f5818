"""A toy problem, and the courses that it is trained by: interrupted, overflowing, failing, with uneven batches."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attach import attach
from ..comm import Comm
from ..keeping import tensors_of
from ..rules import Algorithm


def net(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Sequential:
    """Return a small network, the same on every rank."""
    torch.manual_seed(0)
    first, second, last = (nn.Linear(a, b, bias, dtype=torch.float32) for a, b in ((6, 10), (10, 7), (7, 1)))
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last).to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32, rows: int = 8) -> tuple[Tensor, Tensor]:
    """Return the data of a rank at a step: each rank has its own."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(rows, 6, generator=draw, dtype=torch.float64)
    return x.to(dtype), (x[:, :3].sum(1, keepdim=True) + rank).to(dtype)


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """Return the loss of a model for the batch of a rank at a step."""
    x, y = batch(rank, step, next(model.parameters()).dtype)
    out: Tensor = model(x)  # several outputs are compared with the same number
    return (out - y).square().mean()


def sgd(params: Any, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def fail(g: Tensor) -> None:
    """Raise an error: a hook of a tensor, for a backward that fails."""
    raise MemoryError("out of memory")


# Facts about an algorithm, read from its rules.


def averages_gradients(algorithm: Algorithm) -> bool:
    """Return whether all ranks step with the same gradient, so that their weights stay the same."""
    return all(rule.what == "grad" and rule.stage.same_on_all_ranks for rule in algorithm.rules)


def repeats(algorithm: Algorithm) -> bool:
    """Return whether two runs are the same: no rule is free-running, with which ranks make steps of their own."""
    return all(rule.window != "free_running" for rule in algorithm.rules)


def on_weights(algorithm: Algorithm) -> bool:
    """Return whether ranks wait for each other's weights, so that all must skip a step together."""
    return any(rule.what == "data" and rule.window != "free_running" for rule in algorithm.rules)


def delayed(algorithm: Algorithm) -> bool:
    """Return whether gradients land in a later step than their own."""
    return any(rule.what == "grad" and rule.delay for rule in algorithm.rules)


def exact(algorithm: Algorithm) -> bool:
    """Return whether nothing is lost on the wire: no stage is lossy, and none has a compressor."""
    whole = [stage for rule in algorithm.rules for stage in rule.stage.whole()]
    return not any(stage.lossy or hasattr(stage, "compressor") for stage in whole)


def joins(algorithm: Algorithm) -> bool:
    """Return whether a rank without batches can take part, by `att.join()`."""
    alike = (rule.what == "data" or rule.stage.same_on_all_ranks for rule in algorithm.rules)
    return repeats(algorithm) and all(alike)


def scaler(algorithm: Algorithm, **options: Any) -> torch.amp.GradScaler:
    """Return the gradient scaler that a script takes with an algorithm."""
    if not on_weights(algorithm):
        return torch.amp.GradScaler("cpu", **options)
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return ShardedGradScaler(device="cpu", **options)


@dataclass(frozen=True)
class Course:
    """A way to train."""

    steps: int = 8  # the number of batches
    stops: tuple[int, ...] = ()  # the steps before which all is saved, and taken up by a new model and attachment
    bucket_bytes: tuple[int, ...] = (200,)  # of the attachments, in turn
    without: tuple[int, ...] = ()  # batches that no rank sees
    overflows: tuple[int, ...] = ()  # batches with which rank 1 has an infinite loss
    fails: tuple[int, ...] = ()  # batches with which rank 1 has an error in its backward
    scale: float | None = None  # of the loss, with a gradient scaler
    passed: bool = True  # the attachment is given the scaler
    batches: tuple[int, ...] | None = None  # the number of batches of each rank, inside `att.join()`
    zeros: bool | None = None  # instead of joining, a rank that has run out has zero gradients (True) or none (False)

    def run(self, algorithm: Algorithm) -> dict[str, Tensor]:
        """Train on this rank; return the weights, and all that optimizer and attachment remember."""
        saved: dict[str, Any] = {}
        for i, stop in enumerate((*self.stops, self.steps)):
            saved = self._part(algorithm, saved, self.bucket_bytes[i % len(self.bucket_bytes)], stop)
        return saved["tensors"]  # type: ignore[no-any-return]

    def _part(self, algorithm: Algorithm, saved: dict[str, Any], bucket_bytes: int, stop: int) -> dict[str, Any]:
        """Go on from what is saved until a step; return all that the next part takes up."""
        model, scaling = net(), None if self.scale is None else scaler(algorithm, init_scale=self.scale)
        optimizer = sgd(model.parameters())
        passed = scaling if self.passed else None
        with attach(model, optimizer, algorithm, scaler=passed, bucket_bytes=bucket_bytes) as att:
            if saved:
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                att.load_state_dict(saved["att"])
            joined = self.batches is not None and self.zeros is None
            with att.join() if joined else contextlib.nullcontext():
                for step in range(saved.get("step", 0), stop):
                    self._step(model, optimizer, scaling, step)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "att": att.state_dict()}
            made = att.step
        tensors = {f"{name}{at}": x.detach().clone() for name in state for at, x in tensors_of(_shown(state[name]))}
        return state | {"step": stop, "tensors": tensors | {"the number of steps": torch.tensor(made)}}

    def _step(self, model: nn.Sequential, optimizer: torch.optim.Optimizer, scaling: Any, step: int) -> None:
        rank = Comm().rank
        gone = self.batches is not None and step >= self.batches[rank]
        if step in self.without or (gone and self.zeros is None):
            return
        optimizer.zero_grad()
        value = self._loss(model, rank, step) * (0 if gone else 1)
        try:
            if not gone or self.zeros:
                (value if scaling is None else scaling.scale(value)).backward()
        except MemoryError:
            return
        if scaling is None:
            optimizer.step()
        else:
            scaling.step(optimizer)
            scaling.update(None if self.passed else self.scale)  # a stage that sees scaled gradients remembers them

    def _loss(self, model: nn.Sequential, rank: int, step: int) -> Tensor:
        if step in self.fails and rank == 1:
            x, y = batch(rank, step)
            hidden: Tensor = model[:3](x)
            hidden.register_hook(fail)
            return torch.nn.functional.mse_loss(model[3:](hidden), y)
        value = loss(model, rank, step)
        if step in self.overflows and rank == 1:
            where = model[4].bias if step else model[0].weight  # one value of one bucket
            value = value + where.view(-1)[0] * float("inf")  # type: ignore[operator]
        return value


def _shown(state: Mapping[Any, Any]) -> Any:
    """Return the part of a state in which two equal runs are equal: an attachment's has the number of its run."""
    return state.get("rules", state.get("state", state)) if isinstance(state, Mapping) else state

"""The state that passes from one round to the next: each rank keeps its own state, or receives the state of a peer.

Let rank r have the state x_r after steps_r complete steps. The *survivors* are the ranks that have trained before.

    steps  ←  max_r steps_r    over the survivors; the round begins after so many steps
    x_r    ←  x_peer           if rank r has joined; or if the rules keep weights equal on all ranks, and rank r has
                               fewer steps, or other weights, than the lowest rank with the most steps

A peer is a rank that keeps its state. `Stage.elementwise` declares what happens to the state of a stage. If it declares
"mean", the k ranks that keep their state multiply it by n / k, other ranks by 0, and then all n ranks average it.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..attach import Engine
from ..buckets import local
from ..comm import Comm
from ..flights import load_runners
from ..monitor import PeerError
from ..primitives import mean_
from ..runtime.agreement import digest_of

# The state of an attachment after its last complete step, kept between two rounds: the result of `Engine.state_dict`.
Kept = dict[str, Any]


@dataclass(eq=False)
class Carrying:
    """The state with which one attachment enters a round."""

    engine: Engine
    kept: Kept | None  # None on a rank that has joined
    survivors: Sequence[int]  # the ranks that come from the latest round
    holders: Sequence[int] = ()  # the ranks that keep their own state

    def fill(self) -> None:
        """Set weights, buffers and optimizer state to the values with which the round begins. Collective."""
        if self.survivors:
            self.engine.together("what all ranks have kept", self._fill)
        else:
            self.engine.take_from_rank_0()

    def _fill(self, comm: Comm) -> None:
        engine, kept, mine = self.engine, self.kept, None
        if kept is not None:
            mine = (kept["step"], [rule["round"] for rule in kept["rules"].values()])
        digests = {name: digest_of(x) for name, x in named(engine).items()}
        told = comm.gather_objects((mine, digests), plain=True)
        known = {rank: each for rank, (each, _) in enumerate(told) if each is not None}
        if not known:  # the ranks that had a state were lost while they handed it over
            raise PeerError("no rank that is left has trained")
        step = max(each[0] for each in known.values())
        one = min(rank for rank, each in known.items() if each[0] == step)
        acting = [rule for rule in engine.setup.rules if rule.acts(max(0, step - 1))]
        same = all(rule.what == "grad" and rule.stage.same_on_all_ranks for rule in acting)  # weights on all ranks
        weights = [[each[name] for name, _ in engine.setup.model.named_parameters()] for _, each in told]
        self.holders = [r for r, each in known.items() if not same or (each[0], weights[r]) == (step, weights[one])]
        # A rank that does not keep its state receives another rank's state, and loads this state once it is complete.
        needy = [rank for rank in range(comm.size) if rank not in self.holders]
        source = {rank: self.holders[i % len(self.holders)] for i, rank in enumerate(needy)}
        theirs = [told[rank][1] for rank, peer in source.items() if peer == comm.rank]
        wanted = [name for name, its in digests.items() if any(each[name] != its for each in theirs)]
        state = packed(engine, kept, wanted) if theirs else torch.empty(0, dtype=torch.uint8)
        device = torch.device("cpu") if comm._by_host(engine.setup.device) else engine.setup.device
        sizes, incoming = comm.gather_objects(state.numel(), plain=True), {}
        if (peer := source.get(comm.rank)) is not None:
            incoming[peer] = torch.empty(sizes[peer], dtype=torch.uint8, device=device)
        outgoing = {rank: state.to(device) for rank, peer in source.items() if peer == comm.rank}
        for came in comm.exchange_each(outgoing, incoming, device).values():
            kept = unpacked(engine, came.cpu())
        assert kept is not None
        kept["step"], self.kept = step, kept
        for rule, *rounds in zip(kept["rules"].values(), *(known[r][1] for r in self.holders), strict=True):
            rule["round"] = max(rounds)

    def load(self) -> None:
        """Load the states of the rules, and launch the first flights. Collective."""
        engine, kept = self.engine, self.kept
        if kept is None:
            engine.begin()
            return
        load_runners(engine.runners, engine.setup.names, kept["rules"], same_ranks=False, made=True)

        def average(comm: Comm) -> None:
            held = comm.rank in self.holders
            for runner in engine.runners:
                for x in runner.to_average:
                    x.mul_(comm.size / len(self.holders)) if held else x.zero_()
                mean_(runner.to_average, comm)
                runner.to_average = []

        engine.together("the means of what all ranks remember", average)
        free = [each for each in engine.runners if each.rule.window == "free_running" and each.rule.stage.anchored]
        for runner in free if engine.runtime.comm.rank not in self.holders else ():
            for bucket, state in zip(runner.buckets, runner.states, strict=True):  # its peer's progress is not its own
                bucket.flat.copy_(state["anchor"])
                bucket.store("data")
        engine.resume(kept["step"])


def named(engine: Engine) -> dict[str, Tensor]:
    model = engine.setup.model
    return dict((*model.named_parameters(), *model.named_buffers()))


def packed(engine: Engine, kept: Kept | None, names: Sequence[str]) -> Tensor:
    """Return these weights and buffers, optimizers, scaler and `kept` of this rank as a tensor (n,) of bytes."""
    setup, content = engine.setup, io.BytesIO()
    model = {name: local(x) for name, x in named(engine).items() if name in names}
    scaler = None if setup.scaler is None else setup.scaler.state_dict()
    optimizers = [each.state_dict() for each in setup.optimizers]
    everything = {"model": model, "optimizers": optimizers, "scaler": scaler, "kept": kept}
    torch.save(tree_map_only(Tensor, Tensor.cpu, everything), content)
    return torch.frombuffer(bytearray(content.getvalue()), dtype=torch.uint8)


@torch.no_grad()
def unpacked(engine: Engine, state: Tensor) -> Kept:
    """Load the bytes `state` of another rank, and return the `Kept` in them. They hold tensors and plain values."""
    setup, found = engine.setup, torch.load(io.BytesIO(state.numpy().tobytes()), map_location="cpu", weights_only=True)
    tensors = named(engine)
    for name, x in found["model"].items():
        local(tensors[name]).copy_(x)
    for optimizer, its in zip(setup.optimizers, found["optimizers"], strict=True):
        optimizer.load_state_dict(its)
    if setup.scaler is not None:
        setup.scaler.load_state_dict(found["scaler"])
    return dict(found["kept"])


def keep(engine: Engine, error: BaseException | None) -> Kept:
    """Stop an attachment at the end of its round, and return its state after the last complete step.

    If `error` is None, all ranks call this after the same step. Otherwise the unfinished step is lost.
    """
    if error is None:
        for runner in engine.runners:
            if runner.rule.what == "data" and runner.rule.window != "free_running" and runner.air:
                runner.land_all()
        engine.together("the end of the round", lambda comm: None, meet=True)
    else:
        engine.runtime.abandon(error)
        for runner in engine.runners:
            runner.air.clear()
        for p in engine.setup.names:
            p.grad = None
    kept = engine.state_dict(error is None, same_ranks=False)
    if error is None:
        engine.runtime.abandon(None)
    return kept

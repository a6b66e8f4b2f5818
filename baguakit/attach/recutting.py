"""Other buckets on the way, of another size, over other flows or of other parameters: what is remembered is kept."""

import uuid
from collections.abc import Iterable
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

from ..comm import Comm
from ..primitives import mean_
from .agreement import agree, broadcast_tensors
from .checkpoint import load_routes
from .gradients import GradientRoute
from .plan import parts_of
from .routes import Route, Track
from .start import own_comm

if TYPE_CHECKING:
    from .engine import Engine


def recut(engine: "Engine", bucket_bytes: int, flows: int) -> None:
    """Between two steps, go on in buckets of another size and over other flows. Collective, unless nothing changes."""
    flows = flows if engine.comm.size > 1 else flows_of(engine)
    if (bucket_bytes, flows) == (engine.plan.bucket_bytes, flows_of(engine)):
        return
    if flows > 1 and engine.plan.device.type == "cuda":
        raise ValueError(f"flows={flows} divide what travels over gloo, and these parameters travel by NCCL; use 1")
    make = partial(engine.make, bucket_bytes=bucket_bytes)
    plan = agree(
        engine.monitor, lambda: engine.make_plan(make), f"new buckets over {flows} flows"
    )  # nothing has changed if this raises
    state, touched = engine.state_dict(), engine.backward.touched
    for route in engine.routes:
        route.drop()
    if flows != flows_of(engine):
        reflow(engine, flows)
    engine.make, engine.plan = make, plan
    engine.cut()
    engine.backward.touched = touched
    load_routes(engine.routes, engine.plan.names, state["rules"], same_ranks=True)
    engine.steps.loaded = engine.clock.step


def flows_of(engine: "Engine") -> int:
    """Over how many connections messages are divided."""
    return engine.tracks[0].comm.flows


def reflow(engine: "Engine", flows: int) -> None:
    """Make the groups of every track anew, with so many flows, and close those that were there. Collective."""
    plan, before = engine.plan, engine.tracks
    name = engine.together("other flows", lambda comm: comm.gather_objects(uuid.uuid4().hex)[0])

    def made(number: int) -> Comm:
        name_of_it = f"{engine.name}/{name}/{number}"
        return own_comm(
            engine.comm, name_of_it, plan.timeout, plan.device, engine.monitor, parts_of(plan, number), flows
        )

    engine.tracks = [Track(track.number, track.lane, made(track.number)) for track in before]
    for track in before:
        track.comm.close()


def keep_up(engine: "Engine") -> None:
    """Notice parameters that have been unfrozen, frozen, added or removed since the buckets were cut."""
    trainable = (p for p in engine.plan.model.parameters() if p.requires_grad)
    if any(p is not q for p, q in zip_longest(trainable, engine.plan.names)):
        take_others(engine)


def take_others(engine: "Engine") -> None:
    """The set of trainable parameters has changed, on all ranks: cut the buckets anew, and carry over the state.

    New parameters begin as on rank 0, and the gradients that they already have are averaged exactly.
    """
    engine.clock.outside("a change of the trainable parameters")
    plan = agree(engine.monitor, engine.make_plan, "other parameters")
    known, state = set(engine.plan.names), engine.state_dict()
    for route in engine.routes:
        route.drop()
    engine.plan = plan
    engine.remove_hooks()
    engine.hook()
    engine.load_state_dict(state)
    new = [p for p in plan.names if p not in known]
    acting = [r for r in engine.routes if isinstance(r, GradientRoute) and r.rule.acts(engine.clock.step)]
    claimed = {p for route in acting for p in route.params()}

    def catch_up(comm: Comm) -> None:
        if plan.broadcast and comm.size > 1:
            broadcast_tensors(new, comm, plan.device)
        mean_([p.grad for p in new if p in claimed and p.grad is not None], comm)

    engine.together("new parameters", catch_up)


def check_kinds(engine: "Engine", routes: Iterable[Route]) -> None:
    """Raise a RuntimeError if a parameter of these rules has been converted since the buckets were cut."""
    for bucket in (bucket for route in routes for bucket in route.buckets):
        for p, view in zip(bucket.params, bucket.views, strict=True):
            if p.dtype is not view.dtype or p.device != view.device:
                raise RuntimeError(
                    f"parameter {engine.plan.names[p]} is {p.dtype} on {p.device} and was {view.dtype} on "
                    f"{view.device} when it was attached; detach, convert the model, and attach again"
                )

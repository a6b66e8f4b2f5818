"""Other buckets and other flows on the way: what is remembered is carried over, and no hook is touched."""

import uuid
from functools import partial
from typing import TYPE_CHECKING

from ..comm import Comm
from .agreement import agree
from .checkpoint import load_routes
from .routes import Track

if TYPE_CHECKING:
    from .engine import Engine


def recut(engine: "Engine", bucket_bytes: int, flows: int) -> None:
    """Between two steps, go on in buckets of another size and over other flows. Collective, unless nothing changes."""
    flows = flows if engine.comm.size > 1 else flows_of(engine)
    if (bucket_bytes, flows) == (engine.plan.bucket_bytes, flows_of(engine)):
        return
    if flows > 1 and engine.plan.device.type == "cuda":
        raise ValueError(f"flows={flows} divide what travels over gloo, and these parameters travel by NCCL; use 1")
    state, touched = engine.state_dict(), engine.backward.touched
    for route in engine.routes:
        route.drop()
    if flows != flows_of(engine):
        reflow(engine, flows)
    engine.make = partial(engine.make, bucket_bytes=bucket_bytes)
    engine.plan, _ = engine.together("new buckets", lambda comm: agree(comm, engine.make_plan))
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

    def made(comm: Comm) -> Comm:
        name = comm.gather_objects(uuid.uuid4().hex)[0]
        return engine.comm.own(f"{engine.name}/{name}", plan.timeout, plan.device, flows)

    engine.tracks = [Track(track.number, track.lane, engine.together("other flows", made)) for track in before]
    for track in before:
        track.comm.close()

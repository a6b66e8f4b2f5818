"""One experiment: a group that trains while its ranks are killed and replaced, and what that has cost."""

import itertools
import math
import random
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bench.netlab import Lab

from .cells import ALGORITHMS, HANG, KILLS, TIMEOUT
from .crew import Crew, Trainee
from .task import loss_of

START = 120.0  # seconds in which all must have made a step
RECOVER = 120.0  # seconds in which the others must go on


def measure(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Train as a cell says; return what was found."""
    # Ranks that are lost are replaced at once: the rest of a group never waits for them.
    options = {**cell, "least": 1, "keep_alive": 1.0, "timeout": TIMEOUT if cell["event"] == HANG else None}
    with Lab(cell["hosts"] + 1, cell["rate"]) as lab, Crew(lab, options) as crew:
        together = cell["hosts"]
        crew.hear_until(
            lambda: all(each.steps and each.steps[-1][2] == together for each in crew.present()), START, "all train"
        )
        began = time.time()
        events = disturb(crew, cell, began)
        ended = time.time()
        weights = asked(crew)
        return summary(cell, crew.all, events, began, ended) | {"loss": loss_of(weights)}


def asked(crew: Crew) -> torch.Tensor:
    """Return the mean of all ranks' weights."""
    for each in crew.present():
        each.end.send("weights")
    crew.hear_until(lambda: all(each.weights is not None for each in crew.present()), RECOVER, "all send weights")
    return torch.stack([torch.from_numpy(each.weights) for each in crew.present()]).mean(0)


def disturb(crew: Crew, cell: Mapping[str, Any], began: float) -> list[dict[str, float]]:
    """Kill and replace ranks for the seconds of a cell; return when, and how soon all went on."""
    draws, events = random.Random(cell["event"] + cell["algorithm"]), list[dict[str, float]]()
    for count in itertools.count(1):
        at = began + count * (KILLS.get(cell["event"]) or (cell["seconds"] / 2 if cell["event"] == HANG else 1e9))
        last = at > began + cell["seconds"] - 10  # the last event shows its end
        until = began + cell["seconds"] if last else at
        while time.time() < until:
            crew.hear(until - time.time())
        if last:
            return events
        one = draws.choice(crew.present())
        events.append(hang(crew, one) if cell["event"] == HANG else replace(crew, one))
        say(cell, events[-1])
    return events


def replace(crew: Crew, one: Trainee) -> dict[str, float]:
    """Kill one, start another in its place, and return how soon all went on."""
    others = [each for each in crew.present() if each is not one]
    crew.kill(one)
    assert one.ended is not None
    at, new = one.ended, crew.start(one.host)
    crew.hear_until(
        lambda: new.steps and all(each.steps[-1][0] > changed(each, at) for each in others), RECOVER, "all go on"
    )
    return {"at": at, "survivors": after(others, at) - at, "newcomer": new.steps[0][0] - new.began}


def hang(crew: Crew, one: Trainee) -> dict[str, float]:
    """Let one stand still until the others have gone on without it, and then go on; return how soon they did."""
    others, at = [each for each in crew.present() if each is not one], time.time()
    one.signal(signal.SIGSTOP)

    def alone() -> bool:
        return all(each.steps[-1][2] == len(others) for each in others)

    try:
        crew.hear_until(alone, TIMEOUT + RECOVER, "the others go on")
        survivors = max(min(t for t, _, ranks in each.steps if t > at and ranks == len(others)) for each in others)
    finally:
        one.signal(signal.SIGCONT)
    back = time.time()
    crew.hear_until(lambda: one.steps[-1][0] > back and one.steps[-1][2] > len(others), RECOVER, "it has joined again")
    return {"at": at, "survivors": survivors - at, "newcomer": one.steps[-1][0] - back}


def after(some: Sequence[Trainee], at: float) -> float:
    """Return when the last of some had made a step in the group that came after a moment."""
    return max(min(t for t, _, _ in each.steps if t > changed(each, at)) for each in some)


def changed(one: Trainee, at: float) -> float:
    """Return when the group of one had changed after a moment; infinity if it has not."""
    return min((t for t, _, _ in one.changes if t > at), default=math.inf)


def summary(
    cell: Mapping[str, Any], all_: Sequence[Trainee], events: Sequence[Mapping[str, float]], began: float, ended: float
) -> dict[str, Any]:
    """Return what was measured between two moments."""
    steps = [[t for t, _, _ in each.steps if began <= t <= ended] for each in all_]
    presence = sum(max(0.0, (each.ended or ended) - max(each.began, began)) for each in all_)
    sizes: dict[int, int] = {}
    for t, _, ranks in itertools.chain.from_iterable(each.steps for each in all_):
        sizes[int(t - began)] = ranks
    seconds = range(round(ended - began))
    counts = [0] * len(seconds)
    for t in itertools.chain.from_iterable(steps):
        counts[min(int(t - began), len(counts) - 1)] += 1
    found: dict[str, Any] = {
        "steps": sum(map(len, steps)),
        "rank_seconds": presence,
        "steps_of_a_rank": max((each.steps[-1][1] for each in all_ if each.steps), default=0),
        "different": len(different(cell, all_)),
        "kills": len(events),
        "steps_by_second": counts,
        "ranks_by_second": [sizes.get(second) for second in seconds],
        "events": [{**event, "at": event["at"] - began} for event in events],
    }
    for what in ("survivors", "newcomer"):
        if times := [event[what] for event in events]:
            found |= {f"{what}_median": statistics.median(times), f"{what}_worst": max(times)}
    return found


def different(cell: Mapping[str, Any], all_: Sequence[Trainee]) -> list[int]:
    """Return the steps of changes after which replicas were not equal, bit for bit."""
    if not next(each.equal for each in ALGORITHMS if each.algorithm == cell["algorithm"]):
        return []
    digests: dict[int, set[str]] = {}
    for _, step, digest in itertools.chain.from_iterable(each.changes for each in all_):
        digests.setdefault(step, set()).add(digest)
    return [step for step, those in digests.items() if len(those) > 1]


def say(cell: Mapping[str, Any], event: Mapping[str, float]) -> None:
    """Write a line about an event."""
    times = f"survivors after {event['survivors']:.2f} s, newcomer after {event['newcomer']:.2f} s"
    print(f"{cell['algorithm']}, {cell['event']}: {times}", file=sys.stderr, flush=True)

"""Four hosts of unequal speed, of which one is killed every 60 seconds: `python -m bench.elastic.unequal`. Needs root.

The hosts compute at speeds 1, 1, 1/2 and 1/4: a step is slept until it has taken as long as its host's speed says. A
killed process is replaced at once by another one on its host.

goodput    steps that counted in the shared weights / steps that the hosts could make alone while they were present

A step of a killed host that it had not contributed to a round does not count, nor does one that waits at the end.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench.frontier.speeds import CONTENDERS, RATE, SPEEDS, STEP
from bench.netlab import Lab
from bench.network.table import RESULTS, Table

from .crew import Crew, Trainee
from .experiment import START, disturb

PATH = RESULTS / "elastic-unequal.jsonl"
EVENT, SECONDS = "a kill every 60 s", 190
NAMES = ("DDP", "DyLU", "decoupled, quorum 3", "async")


def cell(name: str) -> dict[str, Any]:
    """Return what is measured of a contender."""
    hosts = {"hosts": len(SPEEDS), "rate": RATE, "slept": [STEP / speed for speed in SPEEDS]}
    return {"algorithm": CONTENDERS[name], "event": EVENT, "seconds": SECONDS, **hosts}


def measure(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Train, kill and replace; return the steps that counted, those that the hosts could make, and the events."""
    options = {**wanted, "least": 1, "keep_alive": 1.0, "timeout": None}
    with Lab(wanted["hosts"] + 1, wanted["rate"]) as lab, Crew(lab, options) as crew:
        crew.hear_until(
            lambda: all(each.steps and each.steps[-1][2] == wanted["hosts"] for each in crew.all), START, "all train"
        )
        began = time.time()
        before = {id(each): len(each.steps) - each.waiting for each in crew.all}
        events = disturb(crew, wanted, began)
        ended = time.time()
        steps, could = counted(crew.all, before, began, ended, wanted["slept"])
        return {"steps": steps, "could": could, "events": [{**event, "at": event["at"] - began} for event in events]}


def counted(
    every: Sequence[Trainee], before: Mapping[int, int], began: float, ended: float, slept: Sequence[float]
) -> tuple[int, float]:
    """Return the steps that counted between two moments, and those that the hosts could make while they were present.

    `before` has the steps that had counted at first, by the id of a trainee.
    """
    steps = sum(len(each.steps) - each.waiting - before.get(id(each), 0) for each in every)
    return steps, sum(((each.ended or ended) - max(began, each.began)) / slept[each.host] for each in every)


def main() -> None:
    """Measure what has no result yet, and print goodputs."""
    table = Table(PATH)
    for name in NAMES:
        wanted = cell(name)
        if wanted not in table:
            table.add(wanted, measure(wanted))
        found = table[wanted]
        print(f"{name:<24}{found['steps'] / found['could']:>8.3f}, {len(found['events'])} kills", flush=True)


if __name__ == "__main__":
    main()

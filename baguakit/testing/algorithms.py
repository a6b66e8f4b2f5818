"""Checks of algorithms: two or three ranks train a toy problem, and two runs that should be equal are compared."""

import gc
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from ..attach import attach
from ..comm import Comm
from ..rules import Algorithm
from .checking import Checks, differences, expression
from .training import Course, averages_gradients, delayed, exact, joins, loss, net, repeats, sgd

ALGORITHMS = Checks()
ALGORITHMS.add("its repr is an expression that evaluates to an equal algorithm")(expression)
STOPS = (3, 5)
AT = (0, 5)  # overflows: in the first step, and with flights of several steps under way
SECONDS_TO_END = 5.0  # threads and sockets end a moment after they are told to
UNEVEN = (5, 2, 0)  # batches of each rank


def lands(algorithm: Algorithm) -> bool:
    """Return whether two runs are the same, and gradients land in their own step."""
    return repeats(algorithm) and not delayed(algorithm)


@ALGORITHMS.add("after five steps all weights are finite, and equal on all ranks if their gradients are", ranks=2)
def training(algorithm: Algorithm) -> Iterator[str]:
    found = Course(5).run(algorithm)
    for name, x in found.items():
        of_all = Comm().all_gather(x.view(1, -1))
        if not x.isfinite().all():
            yield f"{name} is not finite"
        if averages_gradients(algorithm) and name.startswith("model") and not (of_all == of_all[0]).all():
            yield f"{name} differs from that of rank 0 by up to {float((x.view(-1) - of_all[0]).abs().max()):.3g}"
    if (made := int(found["the number of steps"])) != 5:
        yield f"it has made {made} steps"


@ALGORITHMS.add("a run that is saved and taken up twice equals one that goes on, bit for bit", 3, repeats)
def resume(algorithm: Algorithm) -> Iterator[str]:
    whole = Course(9, bucket_bytes=(1 << 20,))
    yield from differences(Course(9, STOPS, (1 << 20,)).run(algorithm), whole.run(algorithm))


@ALGORITHMS.add(
    "where nothing is lost on the wire, other buckets change no weight", 2, lambda a: repeats(a) and exact(a)
)
def other_buckets(algorithm: Algorithm) -> Iterator[str]:
    runs = [course.run(algorithm) for course in (Course(9, STOPS, (1 << 20, 1, 200)), Course(9, (), (1 << 20,)))]
    yield from differences(*({name: x for name, x in run.items() if name.startswith("model")} for run in runs))


@ALGORITHMS.add(
    "an overflow on one rank costs all ranks this step and leaves no trace: the run equals one without the batch",
    3,
    lands,
)
def overflow(algorithm: Algorithm) -> Iterator[str]:
    options: dict[str, Any] = {"bucket_bytes": (100,), "scale": 1024.0}
    wanted = Course(without=AT, **options).run(algorithm)
    yield from differences(Course(overflows=AT, **options).run(algorithm), wanted)


@ALGORITHMS.add("stages see gradients without the loss scale: its powers of two change nothing", 2, averages_gradients)
def loss_scale(algorithm: Algorithm) -> Iterator[str]:
    one, other = (Course(6, scale=scale).run(algorithm) for scale in (1.0, 4096.0))
    yield from differences(other, one)


@ALGORITHMS.add(
    "a backward that fails on one rank costs all ranks this step, and leaves no trace",
    3,
    lambda a: lands(a) and any(r.what == "grad" and r.acts(3) for r in a.rules),
)
def failed_backward(algorithm: Algorithm) -> Iterator[str]:
    yield from differences(Course(6, fails=(3,)).run(algorithm), Course(6, without=(3,)).run(algorithm))


@ALGORITHMS.add(
    "a rank that has run out of batches has zero gradients, or only its weights, in `att.join()`",
    3,
    lambda a: joins(a) and (averages_gradients(a) or all(r.what == "data" for r in a.rules)),
)
def uneven(algorithm: Algorithm) -> Iterator[str]:
    joined = Course(max(UNEVEN), batches=UNEVEN)
    alone = replace(joined, zeros=averages_gradients(algorithm))
    yield from differences(joined.run(algorithm), alone.run(algorithm))


@ALGORITHMS.add("a second backward before a step adds to averages, or else raises on all ranks", 2, repeats)
def second_backward(algorithm: Algorithm) -> Iterator[str]:
    gradients = [rule for rule in algorithm.rules if rule.what == "grad" and rule.acts(0)]
    refused = any(rule.delay or not rule.stage.averages for rule in gradients)
    for zeroed in (True, False):
        model, said = net(), ""
        optimizer = sgd(model.parameters())
        try:
            with attach(model, optimizer, algorithm):
                loss(model, 0, 0).backward()
                if zeroed:
                    optimizer.zero_grad()
                loss(model, 0, 1).backward()
                optimizer.step()
        except RuntimeError as error:
            said = str(error)
        words = "a second backward has added gradients to what during_backward("
        if bool(said) != (refused and not zeroed) or (said and not (said.startswith(words) and "no_sync" in said)):
            between = "with" if zeroed else "without"
            yield f"{between} zero_grad between the two it raises {said or 'nothing'}"


@ALGORITHMS.add("no hook, thread, file or group is left when it is detached", 2)
def detach(algorithm: Algorithm) -> Iterator[str]:
    model = net()
    optimizer = sgd(model.parameters())

    def cycle() -> None:
        with attach(model, optimizer, algorithm):
            for step in range(3):
                optimizer.zero_grad()
                loss(model, Comm().rank, step).backward()
                optimizer.step()

    cycle()
    before = _belongings(model, optimizer)
    cycle()
    until, left = time.monotonic() + SECONDS_TO_END, True
    while left and time.monotonic() < until:
        now = _belongings(model, optimizer)
        left = any(now[name] > before[name] for name in now)
        time.sleep(0.01 * left)
    for name in now:
        if now[name] > before[name]:
            yield f"after another run there are {now[name]} {name}, and were {before[name]}"


def _belongings(model: Any, optimizer: Any) -> dict[str, int]:
    """Return how many of each kind of thing this process has."""
    gc.collect()
    hooks = [len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()]
    hooks += [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)]
    known: Any = dist.distributed_c10d._world
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return {"hooks": sum(hooks), "threads": threading.active_count(), "files": files, "groups": len(known.pg_map)}

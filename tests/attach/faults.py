"""Points in the life of an attachment at which a rank may die: 48 moments, before or after calls of functions.

They are calls of the package, or of the parts of `lives`.
"""

import functools
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everything import runs_free
from lives import algorithm_of

MESSAGES = tuple(
    f"baguakit.comm.comm:Comm.{name}"
    for name in (
        "all_reduce",
        "all_reduce_later",
        "reduce_scatter",
        "all_gather",
        "all_gather_later",
        "all_to_all_later",
        "broadcast",
        "gather_objects",
        "broadcast_object",
        "receive_later",
        "send_later",
    )
)


@dataclass(frozen=True)
class Point:
    """A moment.

    Attributes:
        where: functions whose calls are counted together, each as "module:name" or "module:Class.name".
        nth: which of the calls, from 1 on.
        after: when it returns, not when it is made.
        since: calls are counted from the first call of this function on; "" counts all.
        victim: the rank that comes there, if only one does.
    """

    where: tuple[str, ...]
    nth: int = 1
    after: bool = False
    since: str = ""
    victim: int | None = None


def at(where: str, nth: int = 1, **options: Any) -> Point:
    """The moment before a call of a function of attach/, of comm/ or of `lives`."""
    module, _, name = where.rpartition(":")
    full = {"comm": "baguakit.comm.comm", "": "lives"}.get(module, f"baguakit.{module}")
    return Point((f"{full}:{name}",), nth, **options)


def after(where: str, nth: int = 1, **options: Any) -> Point:
    """The moment after it."""
    return at(where, nth, after=True, **options)


def message(nth: int, since: str, **options: Any) -> Point:
    """The moment before a message."""
    return Point(MESSAGES, nth, since=f"lives:{since}", **options)


POINTS: dict[str, Point] = {
    "before attach": at(":attached"),
    "first line of attach": at("runtime.runtime:start_monitor"),
    "before the monitor": at("monitor:Monitor.start"),
    "after the monitor": after("monitor:Monitor.start"),
    "before its plan is told": at("runtime.agreement:_compared"),
    "its plan is told": at("monitor:Monitor.wait_until"),
    "rank 0 compares": at("runtime.agreement:odd_one", victim=0),
    "rank 0 has compared": after("runtime.agreement:odd_one", victim=0),
    "all have agreed": after("runtime.agreement:agree"),
    "before its group": at("comm.own:own_group"),
    "before warming its group": after("comm:own_groups"),
    "after its group": after("comm:Comm.own"),
    "before broadcast": at("runtime.agreement:broadcast_tensors"),
    "within broadcast": at("runtime.agreement:broadcast_into", 3),
    "broadcast of optimizers": at("attach.broadcast:broadcast_optimizers"),
    "within that": after("comm:Comm.broadcast_object", since="baguakit.attach.broadcast:broadcast_optimizers"),
    "before a stage's state": at("flights.runner:RuleRunner._init_states"),
    "last line of attach": after(":attached"),
    "first forward": at(":forward"),
    "first gradient": at("attach.backward:Backward.gradient_ready"),
    "launch of a bucket": at("flights.runner:RuleRunner.launch", 2, since="lives:forward"),
    "after a launch": after("flights.runner:RuleRunner.launch", 1, since="lives:forward"),
    "first message of a step": message(1, "second"),
    "second message": message(2, "second"),
    "after it": message(2, "second", after=True),
    "fourth message": message(4, "second"),
    "a flight lands": at("flights.runner:RuleRunner.arrive", 2, since="lives:second"),
    "what is kept": at("keeping:Joint.settle", 2),
    "before a step": at(":step", 2),
    "within a step": at("attach.engine:Engine.end_step", 2),
    "after a step": after(":step", 3),
    "before merge": at(":merge"),
    "within merge": message(1, "merge"),
    "after merge": after(":merge"),
    "within consensus": message(2, "consensus"),
    "state_dict": after("attach.engine:Engine.state_dict"),
    "load_state_dict": at("flights.checkpoint:load_runners"),
    "before recut": at(":recut"),
    "recut agrees": at("runtime.agreement:_compared", 2),
    "recut makes groups": at("comm:own_groups", since="lives:recut"),
    "recut makes states": at("flights.runner:RuleRunner._init_states", since="lives:recut"),
    "before another parameter": at(":unfreeze"),
    "another parameter": at("attach.engine:Engine._rebuild", since="lives:unfreeze"),
    "its gradient": message(2, "unfreeze"),
    "before detach": at(":detach"),
    "within detach": at("monitor:Monitor.leave"),
    "has left": after("monitor:Monitor.leave"),
    "last line of detach": after(":detach"),
    "a vote": at("flights.weights:FreeRunner.join", 2),
    "after a vote": after("flights.weights:FreeRunner.join", 2),
    "the last vote": at("flights.weights:FreeRunner.finish"),
}

IN_DDP = (
    *list(POINTS)[:12],
    "last line of attach",
    "first forward",
    "first message of a step",
    "second message",
    "after it",
    "fourth message",
    "what is kept",
    "before a step",
    "after a step",
    "before detach",
    "within detach",
    "has left",
    "last line of detach",
)


def reaches(point: str, algorithm: str) -> bool:
    """Return whether a program with this algorithm comes to this point."""
    free = runs_free(algorithm_of(algorithm))
    if "vote" in point:
        return free
    if free:
        return "recut" not in point and "parameter" not in point and point != "its gradient"
    if algorithm == "ddp":
        return point in IN_DDP
    return True


# How a rank dies


def arm(point: Point, act: Callable[[], None]) -> None:
    """Let `act` happen at a point.

    Raises:
        AttributeError, ModuleNotFoundError: this version has no such function.
    """
    counting, calls, lock = [not point.since], [0], threading.Lock()
    if point.since:

        def begin() -> None:
            counting[0] = True

        wrap(point.since, begin, lambda: None)

    def count() -> None:
        with lock:
            calls[0] += counting[0]
            now = calls[0] == point.nth and counting[0]
        if now:
            act()

    for where in point.where:
        wrap(where, *((lambda: None, count) if point.after else (count, lambda: None)))


def owner_of(where: str) -> tuple[Any, str]:
    """Return the module or class of a function, and the function's name there."""
    module_name, _, path = where.partition(":")
    owner: Any = importlib.import_module(module_name)
    *way, name = path.split(".")
    for each in way:
        owner = getattr(owner, each)
    return owner, name


def wrap(where: str, before: Callable[[], None], behind: Callable[[], None]) -> None:
    """Put something before and behind every call of a function, wherever it has been imported."""
    owner, name = owner_of(where)
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before()
        result = original(*args, **kwargs)
        behind()
        return result

    if "." in where.partition(":")[2]:  # a method
        setattr(owner, name, wrapped)
        return
    for module in [m for n, m in sys.modules.items() if n.startswith("baguakit") or n == where.partition(":")[0]]:
        for held, value in list(vars(module).items()):
            if value is original:
                setattr(module, held, wrapped)


def mishap(kind: str, note: Path) -> Callable[[], None]:
    """Return a function that notes the time, and by which this rank is "killed", "stopped" or "asleep", or "ends"."""

    def act() -> None:
        note.with_suffix(".new").write_text(repr(time.monotonic()))  # the clock is that of all processes
        note.with_suffix(".new").rename(note)
        if kind == "ends":
            sys.exit()
        if kind != "asleep":
            os.kill(os.getpid(), signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
        time.sleep(60)

    return act

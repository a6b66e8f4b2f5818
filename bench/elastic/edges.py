"""Eight hosts, one of them late, stopped or killed: `python -m bench.elastic.edges [run | page]`; `run` needs root.

Each host's link has 100 Mb/s, each way. A step sleeps before its backward, until 0.25 s have passed since it began: so
long it would compute (all hosts share two cores). A synchronous ring then sends while it computes, and loses nothing.
After 15 s something happens to host 3:

    slow edges      its link has a tenth of its rate, for 20 s
    a slow rank     its steps sleep for 1 s, for 20 s
    stands still    it is stopped (SIGSTOP) for 5 s
    killed          it is killed (SIGKILL), and nobody takes its place
    killed, 1/8 s   the same, where a step computes for half as long, and sending takes longer than that

Everyone trains under `bk.elastic`. Until 45 s each process tells each of its steps, and its weights every 2 s:

    kept            steps per second of the other ranks during the event ÷ those in the seconds before it. After a kill,
                    the 20 s after it
    longest pause   seconds between two steps of one of them, after a kill
    discarded       steps that one of them made and that did not count, after a kill
    loss            in bits, of the mean of the weights of all that live, on examples that nobody trained on, after 45 s
    distance        √(mean over r of ‖x_r − x̄‖²) / ‖x̄‖, for x_r the weights of rank r, and x̄ their mean
"""

import argparse
import itertools
import math
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from bench.netlab import Lab, obstacle
from bench.network.table import RESULTS, Table

from .crew import Crew, Trainee
from .experiment import START
from .task import loss_of

PATH = RESULTS / "elastic-edges.jsonl"
HOSTS, RATE, TENTH, COMPUTING, SLOWNESS, SAMPLE = 8, "100mbit", "10mbit", 0.25, 4, 2.0
AT, ENDS, WHOLE, CHOSEN = 15.0, 35.0, 45.0, 3  # seconds of an event, and of the training; the host
EDGE, RANK, STILL, KILLED, BRIEF = "slow edges", "a slow rank", "stands still", "killed", "killed, 1/8 s"
STANDS, SOME = 5.0, 4  # seconds; steps that all make before
KEEP_ALIVE = 2.0  # a rank is given up after five of these without a sign of life
ALGORITHMS = {
    "gradient_allreduce()": "all-reduce",
    "decentralized(Ring())": "synchronous ring",
    "decentralized(OnePeerExact())": "one peer",
    "async_gossip(Ring())": "asynchronous ring",
    "async_push_sum(Ring())": "asynchronous push-sum",
}
EVENTS = (EDGE, RANK, STILL, KILLED, BRIEF)


def cells() -> Iterator[dict[str, Any]]:
    """Yield what is measured."""
    for event, algorithm in itertools.product(EVENTS, ALGORITHMS):
        computing = 0.125 if event == BRIEF else COMPUTING
        cell = {"algorithm": algorithm, "event": event, "hosts": HOSTS, "rate": RATE, "computing": computing}
        yield cell
        if event == KILLED and algorithm == "async_gossip(Ring())":
            yield cell | {"elastic": False}


def measure(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Train, disturb host 3 and return what was found."""
    options = {**cell, "least": 1, "keep_alive": KEEP_ALIVE, "timeout": None, "sample": SAMPLE}
    with (
        tempfile.TemporaryDirectory() as folder,
        Lab(cell["hosts"] + 1, cell["rate"]) as lab,
        Crew(lab, options | {"folder": folder}) as crew,
    ):
        crew.hear_until(lambda: all(map(together, crew.all)), START, "all train")
        began, one = time.time(), crew.all[CHOSEN]
        others = [each for each in crew.all if each is not one]
        listen(crew, began + AT)
        begin, end, until = event(cell["event"], lab, crew, one)
        since = time.time()
        begin()
        listen(crew, since + until)
        end()
        over = time.time()
        listen(crew, began + WHOLE)
        return summary(crew.all, others, began, since, over)


def together(one: Trainee) -> bool:
    """Return whether a rank has made some steps with all others."""
    return sum(ranks == HOSTS for _, _, ranks in one.steps) >= SOME


def listen(crew: Crew, until: float) -> None:
    """Note what is said until a moment."""
    while (left := until - time.time()) > 0:
        crew.hear(left)


def event(name: str, lab: Lab, crew: Crew, one: Trainee) -> tuple[Callable[[], None], Callable[[], None], float]:
    """Return what begins an event, what ends it, and the seconds between."""
    long = ENDS - AT
    if name == EDGE:
        return lambda: lab.set_rate(one.host, TENTH), lambda: lab.set_rate(one.host, RATE), long
    if name == RANK:
        return lambda: one.end.send(SLOWNESS * COMPUTING), lambda: one.end.send(COMPUTING), long
    if name == STILL:
        return lambda: one.signal(signal.SIGSTOP), lambda: one.signal(signal.SIGCONT), STANDS
    return lambda: crew.kill(one), lambda: None, long


def summary(
    every: Sequence[Trainee], others: Sequence[Trainee], began: float, since: float, over: float
) -> dict[str, Any]:
    """Return what was measured of an event between two moments."""
    before = [speed(each, began, since) for each in others]
    during = [speed(each, since, over) for each in others]
    at = [began + SAMPLE * i for i in range(1, int(WHOLE / SAMPLE) + 1)]
    curve = [[round(t - began), *(float(f"{y:.4g}") for y in state_of(every, t))] for t in at]
    return {
        "before": sum(before) / len(before),
        "during": sum(during) / len(during),
        "least": min(d / b for d, b in zip(during, before, strict=True)),
        "pause": max(pause(each, since) for each in others),
        "discarded": max(len(each.discarded) for each in others),
        "curve": curve,
        "loss": state_of(every, began + WHOLE)[0],
    }


def speed(one: Trainee, since: float, until: float) -> float:
    """Return the steps per second of one between two moments; a step that is under way counts by its share."""
    moments = [t for t, _, _ in one.steps]

    def made(at: float) -> float:
        done = sum(t <= at for t in moments)
        if not 0 < done < len(moments):
            return float(done)
        last, following = moments[done - 1], moments[done]
        return done + (at - last) / (following - last)

    return (made(until) - made(since)) / (until - since)


def pause(one: Trainee, since: float) -> float:
    """Return the longest time between two steps of one, the later of which came after a moment."""
    moments = [t for t, _, _ in one.steps]
    return max((later - earlier for earlier, later in itertools.pairwise(moments) if later > since), default=math.inf)


def state_of(every: Sequence[Trainee], at: float) -> tuple[float, float]:
    """Return the loss of the mean of the weights that living ranks have told last, and their distance from it."""
    living = [each for each in every if each.ended is None or each.ended > at]
    files = [[path for t, path in each.samples if t <= at] for each in living]
    x = torch.stack([torch.load(some[-1]) for some in files if some])
    mean = x.mean(0)
    return loss_of(mean), float((x - mean).square().sum(1).mean().sqrt() / mean.norm())


def table(found: Table) -> list[str]:
    """Return the table of docs/windows.md in Markdown."""
    lines = [f"| steps kept; bits of loss after {WHOLE:g} s | {' | '.join(EVENTS)} | longest pause, discarded |"]
    lines.append("|---" * (2 + len(EVENTS)) + "|")
    rows = dict[str, dict[str, Mapping[str, Any]]]()
    for cell in cells():
        name = f"`{cell['algorithm']}`{', a fixed group' * ('elastic' in cell)}"
        if cell in found:
            rows.setdefault(name, {})[cell["event"]] = found[cell]
    for name, results in rows.items():
        words = [in_words(results[event]) if event in results else "" for event in EVENTS]
        killed = results.get(KILLED)
        words.append(f"{killed['pause']:.1f} s, {killed['discarded']}" if killed else "")
        lines.append(f"| {' | '.join([name, *words])} |")
    return lines


def in_words(result: Mapping[str, Any]) -> str:
    """Return the share of steps that the others kept, and the loss."""
    return f"{result['during'] / result['before']:.2f}; {result['loss']:.2f}"


def main(words: Sequence[str] | None = None) -> int:
    """Measure what is missing, and print the table; 1 if something could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.elastic.edges", description=str(__doc__).split("\n")[0])
    parser.add_argument("what", nargs="?", choices=["run", "page"], default="page")
    parser.add_argument("--only", metavar="TEXT", default="", help="only cells whose algorithm and event contain this")
    options = parser.parse_args(words)
    found, failed = Table(PATH), 0
    if options.what == "run":
        if reason := obstacle():
            parser.exit(1, f"{reason}\n")
        for cell in cells():
            if cell not in found and options.only in f"{cell['algorithm']}, {cell['event']}":
                try:
                    found.add(cell, measure(cell))
                    shown = {name: value for name, value in found[cell].items() if name != "curve"}
                    print(cell["algorithm"], cell["event"], shown, flush=True)
                except (RuntimeError, TimeoutError) as error:
                    failed += 1
                    print(f"failed: {cell}: {error}", file=sys.stderr)
    print(*table(found), sep="\n")
    if len(found):
        from .edges_picture import PICTURE, draw  # which imports this module

        draw(found).savefig(PICTURE, dpi=150)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

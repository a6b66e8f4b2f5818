"""The plan: predict every combination of algorithm, bucket size and number of flows, and pick one."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from torch import Tensor, nn

from .. import algorithms
from ..arguments import Declared, Positive, Range, checked
from ..comm import Comm, on_all
from ..compressors import Compressor, MinMaxUInt8, UInt4
from ..costs import Codec, Line, Link, Network, sizes_of
from ..rules import Algorithm, Rule, hierarchical, known_losses
from ..stages import Hierarchical
from ..topology import Exponential
from ..topology.base import MOST_RANKS
from .prediction import COUNT, Prediction, buckets_of, effect, predict
from .probing import Compute, probe, timed

BUCKET_BYTES = (1 << 20, 4 << 20, 10 << 20, 25 << 20, 100 << 20)
Rate = Annotated[float, Range(above=0)]
NEAR = 0.02  # of the fastest: predictions do not resolve smaller differences
NODES = "bk.hierarchical("
LEGEND = """
step      of training, in the steady state
sent      by a rank, in a step
to DDP    time for the progress of a step of DDP, as measured with a small GPT
training  as DDP; gradients rounded to so many bits; or a different trajectory
"""


def every() -> dict[Algorithm, str]:
    """Return {algorithm: its call} in order of preference: all algorithms with defaults, and variants of `bytegrad`."""
    byte, push_sum = algorithms.bytegrad, algorithms.push_sum
    found: dict[Algorithm, str] = {
        algorithms.gradient_allreduce(): "bk.algorithms.gradient_allreduce()",
        byte(): "bk.algorithms.bytegrad()",
        byte(error_feedback=True): "bk.algorithms.bytegrad(error_feedback=True)",
        byte(UInt4(), error_feedback=True): "bk.algorithms.bytegrad(bk.compressors.UInt4(), error_feedback=True)",
        push_sum(Exponential()): "bk.algorithms.push_sum(bk.topology.Exponential())",
    }
    names = [name for name in algorithms.__all__ if name != "push_sum"]  # which has no topology by default
    return found | {getattr(algorithms, name)(): f"bk.algorithms.{name}()" for name in names}


def by_nodes(algorithm: Algorithm, comm: Comm) -> Algorithm | None:
    """Return `hierarchical(algorithm)`; None if the group does not fit, or the algorithm is hierarchical already."""
    try:
        between = hierarchical(algorithm)
        check(between, comm)
        return between
    except (TypeError, ValueError):  # the stage needs shapes, or its topology does not fit this number of nodes
        return None


def compressors_in(algorithms: Sequence[Algorithm]) -> list[Compressor]:
    stages = [stage for each in algorithms for rule in each.rules for stage in rule.stage.whole()]
    return list(dict.fromkeys(each for stage in stages for each in stage.compressors()))


@dataclass(frozen=True, repr=False, eq=False)
class Plan(Declared):
    """The predictions of `plan`, the fastest first. Print it.

    Attributes:
        rows: a prediction for every combination.
        best: the picked row. Unless `algorithms` were given, it keeps DDP's loss. Among the rows within 2 % of the
            fastest, the first algorithm in order of preference is picked, then the fewest flows and buckets.
        network, compute: the measurements from which the predictions were computed.
        left_out: {expression of an algorithm: reason why it has no rows}. Empty if `algorithms` were given.
        calls: {algorithm: the call that makes it}, for algorithms to be shown otherwise than by their expression.
    """

    rows: tuple[Prediction, ...]
    best: Prediction
    network: Network
    compute: Compute
    left_out: Mapping[str, str] = field(default_factory=dict)
    calls: Mapping[Algorithm, str] = field(default_factory=dict)

    def fastest(self) -> list[Prediction]:
        """Return one row per algorithm: the picked row, and the fastest row of each other algorithm."""
        first = {row.algorithm: row for row in reversed(self.rows)} | {self.best.algorithm: self.best}
        return sorted(first.values(), key=lambda row: row.seconds)

    def _call(self, row: Prediction) -> str:
        return self.calls.get(row.algorithm, repr(row.algorithm))

    def _short(self, row: Prediction) -> str:
        """Return the short form of a row's call, such as "bytegrad" or "bytegrad, by node"."""
        call = self._call(row)
        by_node = call.startswith(NODES)
        inner = call.removeprefix(NODES)[: -1 if by_node else None]
        name = re.sub(r"bk\.(algorithms|compressors|topology)\.", "", inner)
        return name.replace("error_feedback=True", "feedback").removesuffix("()") + ", by node" * by_node

    def __str__(self) -> str:
        best, rows = self.best, [("algorithm", "step", "sent", "to DDP", "training")]
        for row in self.fastest():
            to_loss = "–" if row.to_loss is None else f"{row.to_loss * 1e3:,.1f} ms"
            cells = f"{row.seconds * 1e3:,.1f} ms", f"{row.sent / 1e6:,.2f} MB", to_loss, str(row.effect)
            rows.append((("→ " if row is best else "  ") + self._short(row), *cells))
        width = max(len(row[0]) for row in rows)
        lines = [f" {name:<{width}}{step:>12}{sent:>11}{to:>11}  {word}" for name, step, sent, to, word in rows]
        lines += [f"{name} cannot work here: {reason}" for name, reason in self.left_out.items()]
        flows = f", comm=bk.Comm(flows={best.flows})" * (best.flows > 1)
        call = f"    bk.attach(model, optimizer, {self._call(best)}{flows},"
        beyond = f"{best.exposed * 1e3:.1f} ms a step beyond the {self.compute.seconds * 1e3:.1f} ms of computing"
        pick = f"→ {self._short(best)} in {best.buckets} bucket{'s' * (best.buckets != 1)}: {beyond}.\n"
        lines += [LEGEND, pick, *known_losses(best.algorithm.rules, self.network.ranks), call]
        return "\n".join([*lines, f"              bucket_bytes={best.bucket_bytes})"])

    __repr__ = __str__


@checked
def plan(
    model: nn.Module,
    comm: Comm | None = None,
    network: Network | None = None,
    step_seconds: float | Compute | Callable[[], Any] | None = None,
    algorithms: Sequence[Algorithm] | None = None,
    bucket_bytes: Sequence[Positive] = BUCKET_BYTES,
    flows: Sequence[int] | None = None,
) -> Plan:
    """Predict the time of a step for every algorithm × bucket size × number of flows, and pick one. Collective.

        plan = bk.tune.plan(model, step_seconds=one_local_step)
        print(plan)
        comm = bk.Comm(flows=plan.best.flows)
        with bk.attach(model, optimizer, plan.best.algorithm, comm=comm, bucket_bytes=plan.best.bucket_bytes):
            ...

    Args:
        model: the model to train.
        comm: the ranks. With a mesh, each algorithm is also tried with `bk.hierarchical`.
        network: the result of `probe`; None means to probe now, for the compressors that the algorithms use. If it has
            more ranks than `comm`, as from `describe`, each rank plans alone for the ranks of the network.
        step_seconds: the time of one step without communication, while all ranks work: seconds (a third of them for
            forward), a `Compute`, or a function that takes one such step. The function is called seven times. It
            changes this rank's weights, so plan before `attach`. The slowest rank counts. None: communication only.
        algorithms: the algorithms to choose from, in order of preference. None means to predict all algorithms, and to
            pick one that keeps DDP's loss.
        bucket_bytes: bucket sizes to try, in bytes. A size that gives the same buckets as a smaller one is left out.
        flows: numbers of flows to try; None means all numbers that the network was probed for.

    Raises:
        ValueError, TypeError: there is no choice, an algorithm cannot work in this group, or a stage has no `cost`.
    """
    with suppress(RuntimeError) if comm is None and network is not None else nullcontext():
        comm = Comm() if comm is None else comm
    if network is not None and (comm is None or network.ranks > comm.size):
        comm = Described(network.ranks, network.per_node)
    assert comm is not None
    choices = list(dict.fromkeys(every() if algorithms is None else algorithms))
    if not choices:
        wanted = "a list of the algorithms to choose from, such as [bk.algorithms.bytegrad()]"
        raise TypeError(f"algorithms is {wanted}, not {algorithms!r}")
    for each in algorithms or ():
        check(each, comm)
    calls = every()
    for each in list(choices) if comm.hierarchical else ():  # each is tried between nodes as well
        if (between := by_nodes(each, comm)) is not None:
            choices.append(between)
            calls[between] = f"{NODES}{calls.get(each, repr(each))})"
    if not (sizes := sorted(set(bucket_bytes))):
        raise ValueError("bucket_bytes names no size to try; leave it out, or give some, such as (1 << 20, 25 << 20)")
    if network is None:
        device = next((p.device for p in model.parameters()), None)
        network = probe(comm, flows=flows, compressors=compressors_in(choices), device=device)
    left_out: dict[Algorithm, str] = {}
    for each in choices if algorithms is None else ():
        try:
            check(each, comm)
            for compressor in compressors_in([each]) if network.ranks > 1 else ():
                network.codec(compressor)
        except ValueError as error:
            left_out[each] = str(error)
    choices = [each for each in choices if each not in left_out]

    def as_compute() -> Compute:
        if isinstance(step_seconds, Compute):
            return step_seconds
        if callable(step_seconds):
            return timed(step_seconds, model)
        return Compute((step_seconds or 0.0) / 3, 2 * (step_seconds or 0.0) / 3)

    if isinstance(comm, Described):  # each rank plans by itself
        compute = as_compute()
    else:
        gathered = comm.gather_objects(on_all(comm, as_compute, "plan"))
        compute = max(gathered, key=lambda each: each.seconds)  # the slowest; of equals that of the lowest rank
    counts = network.flows() if flows is None else flows
    kept = [each for each in choices if algorithms is not None or effect(each).keeps_loss]
    found = plan_of(model, network, compute, choices, sizes, counts, kept)
    return replace(found, left_out={repr(each): why for each, why in left_out.items()}, calls=calls)


def check(algorithm: Algorithm, comm: Comm) -> None:
    """Raise a ValueError if an algorithm cannot work in this group."""
    for rule in algorithm.rules:
        rule.stage.check(comm)


def plan_of(
    model: nn.Module,
    network: Network,
    compute: Compute,
    choices: Sequence[Algorithm],
    sizes: Sequence[int],
    flows: Sequence[int],
    kept: Sequence[Algorithm] | None = None,
) -> Plan:
    """Return the plan for given measurements. If `kept` is given, pick one of these algorithms."""
    named: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise ValueError("the model has no trainable parameter, so that there is nothing to plan")
    counts, rows = sorted(set(flows)), []
    for algorithm in choices:
        # With nodes, only exchanges between nodes are divided into flows.
        by_node = any(isinstance(rule.stage, Hierarchical) for rule in algorithm.rules)
        tried = counts if network.per_node == 1 or by_node else counts[:1]
        for size in distinct(algorithm.rules, named, sizes):
            rows += [predict(algorithm, model, network, compute, size, count) for count in tried]
    able = [row for row in rows if kept is None or row.algorithm in kept]
    near = min(row.seconds for row in able) * (1 + NEAR)
    candidates = [row for row in able if row.seconds <= near]
    best = min(candidates, key=lambda row: (choices.index(row.algorithm), row.flows, row.buckets, row.seconds))
    return Plan(tuple(sorted(rows, key=lambda row: row.seconds)), best, network, compute)


def distinct(rules: Sequence[Rule], named: Mapping[str, Tensor], sizes: Sequence[int]) -> list[int]:
    """Return the sizes that give different buckets. Of several sizes with equal buckets, keep the first."""
    found: dict[str, int] = {}
    for size in sizes:
        cuts = [buckets_of(rule, named, sizes_of((), size)) for rule in rules]
        lengths = [[len(bucket) for bucket in cut] for cut in cuts]
        found.setdefault(repr(lengths), size)
    return list(found.values())


# Networks that are described by numbers, not measured


@checked
def describe(
    nodes: Annotated[int, Range(1, MOST_RANKS)],
    per_node: Annotated[int, Range(1, MOST_RANKS)],
    between: Rate,
    within: Rate,
    within_to_all: Rate | None = None,
    *,
    memory: Rate = 1e12,
    compressors: Sequence[Compressor] = (MinMaxUInt8(),),
    alpha: float = 20e-6,
    device: str = "cuda",
) -> Network:
    """Return the network of `nodes` machines with `per_node` ranks each, from given speeds. Nothing is measured.

        network = bk.tune.describe(2, 4, between=10e9 / 8, within=12e9, within_to_all=6e9)
        print(bk.tune.plan(model, network=network, algorithms=[bk.algorithms.bytegrad()]))

    A ring uses a machine's network card once. In an all-to-all of N ranks, each of a machine's L ranks sends N − L of
    its N − 1 messages through the card, so a byte takes L (N − L)/(N − 1)/`between` s, or L/`between` s among nodes.

    Args:
        nodes, per_node: the number of machines, and L, the number of ranks per machine.
        between: bytes per second that a machine's network card sends.
        within: bytes per second that a rank sends in a ring within one machine.
        within_to_all: bytes per second that a rank sends in an all-to-all within one machine; None: as `within`.
        memory: bytes per second that kernels read and write.
        compressors: the compressors. Each is modelled as a read of the values and a write of the codes, at `memory`.
        alpha: the latency of a message, in seconds.
        device: "cuda" or "cpu".

    Raises:
        ValueError: a number is out of range.
    """
    n, L, N = nodes, per_node, nodes * per_node
    out, ring, spread, byte = 1 / between, 1 / within, 1 / (within_to_all or within), 1 / memory
    inside = Line(alpha, ring), Line(alpha, ring), Line(alpha, spread)
    around = Line(alpha, max(ring if L > 1 else 0.0, out if n > 1 else 0.0))
    crossing = L * (N - L) / max(1, N - 1) * out
    links = [Link("flat", 1, N, around, around, Line(alpha, max(crossing, spread if L > 1 else 0.0)))] if N > 1 else []
    if L > 1:
        shared = Line(alpha, L * out)
        links += [Link("intra", 1, L, *inside), Link("inter", 1, n, shared, shared)]
    packed = {repr(each): each.row_bytes(COUNT) / COUNT * byte for each in compressors}
    codecs = [Codec(name, 4 * byte + row, 4 * byte + row, row) for name, row in packed.items()]
    return Network(N, L, device, 1, tuple(links), tuple(codecs), copy=2 * byte)


class Described(Comm):
    """A group of ranks that do not run. Algorithms can be checked for this group, but nothing can be sent."""

    per_node: int

    def __init__(self, size: int, per_node: int = 1) -> None:
        vars(self).update(rank=0, size=size, per_node=per_node, _parts=() if per_node > 1 else None)

    @property
    def intra(self) -> Comm:
        return Described(self.per_node)

    @property
    def inter(self) -> Comm:
        return Described(self.size // self.per_node)

    def __repr__(self) -> str:
        return f"<Comm: {self.size} ranks that are not at hand>"

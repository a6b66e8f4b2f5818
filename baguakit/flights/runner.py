"""The runner of one rule: it launches the flights of its buckets, and waits for them.

At every launch, padding is zero in the bucket (loading zeroes it) and in every elementwise tensor of the state. A
coarse compressor may turn zeros in a block into other values. If these values were not zeroed, they would stay in
residuals and replicas, change the scales of the next flight, and be missing from a checkpoint.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import itemgetter
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..buckets import Bucket, Pair, local
from ..comm import Comm, SentFormat, Weights
from ..compressors import Compressor
from ..keeping import tensors_of
from ..lanes import Phases
from ..monitor import Collective
from ..primitives import mean_
from ..rules import Rule
from ..runtime.runtime import Channel
from ..stages import Hierarchical, Stage, State, call_stage, has_phases, in_phases, init_stage, remembered
from ..topology.chosen import as_chosen, chooses

PADDED = 4096  # values by which any bucket may be padded
MOST_KINDS = 64  # of flights that are told apart in a bucket
RECORDED = 100  # flights of a bucket, and steps, of which records are kept
Weighing = Callable[[], Weights | None]
Tally = list[tuple[Tensor, Tensor]]  # the norms of the tensors compressed in a flight, each with that of its error


@dataclass(eq=False, kw_only=True)
class BucketFlight(Collective):
    runner: "RuleRunner"
    bucket: int
    round: int
    before: Tensor | None = None  # the weights that were launched, where only their change is added at landing
    formats: list[SentFormat] = field(default_factory=list)  # in which the stage has sent values
    tally: Tally = field(default_factory=list)  # of its errors of compression, if they are measured
    kept: list[State] = field(default_factory=list)  # a copy of the state before it, if the flight's step may be lost


@dataclass(eq=False)
class Ledger:
    """Statistics of the flights of one bucket, for reports: their number, formats and bytes, and the latest flights."""

    name: str = ""  # of each flight, such as "CompressedMean, bucket 3"
    launches: int = 0
    sent: dict[str, float] = field(default_factory=dict)  # by part of the network
    flights: deque[Collective] = field(default_factory=lambda: deque(maxlen=RECORDED))
    # The formats of a flight, and how many flights had these formats. The entry of the latest flight comes first.
    kinds: list[tuple[tuple[SentFormat, ...], int]] = field(default_factory=list)

    def landed(self, formats: Iterable[SentFormat]) -> None:
        """Count a landed flight in the entry of its formats, and move this entry to the front of `kinds`."""
        kind, known = tuple(formats), [*map(itemgetter(0), self.kinds)]
        flights = self.kinds.pop(known.index(kind))[1] if kind in known else 0
        self.kinds.insert(0, (kind, flights + 1))
        del self.kinds[MOST_KINDS:]


@dataclass(eq=False)
class RuleRunner:
    """A rule, its buckets, the state of its stage for each bucket, and the flights in the air."""

    index: int
    rule: Rule
    buckets: list[Bucket]
    channel: Channel
    round: int = 0
    states: list[State] = field(default_factory=list)
    air: dict[int, BucketFlight] = field(default_factory=dict)  # by bucket
    to_average: list[Tensor] = field(default_factory=list)  # from a checkpoint of another number of ranks
    tallies: dict[int, Tally] | None = None  # of the latest landed flights, by bucket, if errors are measured
    # The flights in the air, and those that have landed since the last step ended; None if the group cannot change. If
    # a step is lost, the state goes back to the copy made before the first of these flights.
    journal: list[BucketFlight] | None = None
    current_stage: Stage | None = None  # the stage in this round
    weights: Weighing = field(default=lambda: None, repr=False)  # waits for those of all ranks, in flights launched now

    def __post_init__(self) -> None:
        stage = self.rule.stage
        taken = replace(self.rule, stage=stage._on(self.channel.comm))
        self.label, self.outline = repr(taken), outline(stage)  # in words; in few, for profilers and figures
        self.guards = all(each.keeps for each in stage.whole())  # it changes its state by `update_if_finite_` only
        self.in_phases = has_phases(stage)
        self.chosen = chooses(stage)  # its weights are chosen in each round
        self.ledgers = [self.new_ledger(i) for i in range(len(self.buckets))]

    def new_ledger(self, bucket: int) -> Ledger:
        return Ledger(self.outline + (f" of rule {self.index}" if self.index else "") + f", bucket {bucket}")

    def make_states(self) -> None:
        """Make the states before the first flight, from the weights as they are. Collective."""
        self.channel.together(f"the state of {self.label}", self._init_states)

    def _init_states(self, comm: Comm) -> None:
        states = []
        for i, bucket in enumerate(self.buckets):
            if self.rule.what == "data":
                bucket.load("data")
            here = comm.for_flight(0, None, self.number(i), {})._with(_weights=self.weights())
            states.append(init_stage(self.rule.stage, bucket, here))
        self.states = states  # whole: those so far stay if a rank is lost meanwhile

    def number(self, bucket: int) -> int:
        """Return a number that no other bucket of the attachment has."""
        return self.index << 16 | bucket

    def launch(
        self, i: int, step: int | None, work: Any = None, before: Tensor | None = None,
        beside: list[Pair] | None = None, source: int | None = None,
    ) -> BucketFlight:  # fmt: skip
        """Launch bucket `i`: on the lane, call `work(stage, flat, comm)`, or the stage if there is no `work`.

        `stage` is the stage of this round. Once `compression_error` has been called, the stage also measures its error.
        If `beside` is given, pairs (padding, zeros) are added to this list, and `work` copies them to zero the padding.
        With a `source`, all ranks first take that rank's state.
        """
        state, bucket, channel, ledger = self.states[i], self.buckets[i], self.channel, self.ledgers[i]
        formats, tally, kept, weights = list[SentFormat](), Tally(), list[State](), self.weights
        comm = channel.comm.for_flight(self.round, step, self.number(i), ledger.sent, formats)
        if self.rule.window == "free_running":  # for checkpoints meanwhile
            kept.append(tree_map_only(Tensor, Tensor.clone, state))
        if channel.monitor.error is not None:
            channel.monitor.check()
        averaged, self.to_average = self.to_average, []
        label = f"{self.label}, bucket {i}, round {self.round}"
        if i == 0 or self.current_stage is None:
            self.current_stage = as_chosen(self.rule.stage) if self.chosen else self.rule.stage
        stage = self.current_stage if self.tallies is None else measured(self.current_stage, tally)

        def fly() -> Phases:
            if channel.failed or channel.monitor.error is not None:
                channel.check()
            try:
                if averaged:
                    mean_(averaged, comm)
                if source is not None:
                    for _, tensor, _ in remembered(self.rule.stage, state):
                        comm.broadcast(tensor, source)
                if self.journal is not None and not kept:
                    kept.append(tree_map_only(Tensor, Tensor.clone, state))
                if state:
                    pairs = clear_padding_(self.rule.stage, state, bucket, comm, beside is not None)
                    if beside is not None:
                        beside.extend(pairs)
                used = comm._with(_weights=weights())
                if work is not None:
                    result = work(stage, bucket.flat, used)
                    return (yield from result) if type(result) is GeneratorType else result
                return (yield from self.phases_of(stage, bucket.flat, state, used))
            except Exception as error:
                channel.note(label, error)
                raise

        flight = self.air[i] = BucketFlight(
            label=label,
            step=step,
            flight=channel.lane.run(fly, ledger.name, self.in_phases),
            runner=self,
            bucket=i,
            round=self.round,
            before=before,
            formats=formats,
            tally=tally,
            kept=kept,
        )
        ledger.launches += 1
        if self.journal is not None:
            self.journal.append(flight)
        if channel.comm.size > 1:
            ledger.flights.append(flight)
        channel.monitor.launched(channel.number, flight)
        return flight

    def phases_of(self, stage: Stage, flat: Tensor, state: State, comm: Comm) -> Phases:
        if self.in_phases:
            return (yield from in_phases(stage, flat, state, comm, self.channel.check))
        return call_stage(stage, flat, state, comm)

    def arrive(self, i: int) -> Any:
        """Wait for the flight of bucket `i` and return its result, or raise an error that names the rank at fault."""
        flight = self.air.pop(i)
        try:
            result = self.channel.monitor.wait_for(flight)
            self.ledgers[i].landed(flight.formats)
            return result
        finally:
            flight.before = flight.flight.value = None  # a report keeps the flight
            if self.tallies is not None:
                self.tallies[i] = flight.tally

    def commit(self) -> None:
        """Drop landed flights from the journal at the end of a step. Their changes to the states are final."""
        flying = self.flights()
        self.journal = [flight for flight in self.journal or () if flight in flying]

    def compression_error(self) -> float:
        """Return  ε = √( Σ ‖x − Q(x)‖² / Σ ‖x‖² );  NaN if nothing was compressed. Waits for the device.

        Q(x) is x compressed and decompressed. The sums are over all x, such as gradients or differences of weights,
        that this rank compressed in the latest flight of each bucket. The first call begins to measure.
        """
        self.tallies = {} if self.tallies is None else self.tallies
        pairs = [torch.stack(pair) for tally in self.tallies.values() for pair in tally]
        given, lost = torch.stack(pairs).square().sum(0).tolist() if pairs else (1.0, float("nan"))
        return float((lost / given) ** 0.5) if given else 0.0

    def remembers(self) -> bool:
        """Return whether the rule's flights depend on earlier flights: its stage says so, or a state has tensors."""
        stage = self.rule.stage
        return stage.remembers() or any(True for state in self.states for _ in remembered(stage, state))

    def flights(self) -> list[BucketFlight]:
        return list(self.air.values())

    def drop(self) -> None:
        """Wait for every flight in the air, and discard the results."""
        for i in sorted(self.air):
            self.arrive(i)

    def params(self) -> list[Tensor]:
        return [p for bucket in self.buckets for p in bucket.params]


def outline(stage: Stage) -> str:
    """Return the names of a stage and of the stages in it, such as "ErrorFeedback(SparseMean)"."""
    inner = ", ".join(map(outline, stage.nested().values()))
    return type(stage).__name__ + (f"({inner})" if inner else "")


def clear_padding_(stage: Stage, state: State, bucket: Bucket, comm: Comm, beside: bool = False) -> list[Pair]:
    """Zero the padding of every elementwise tensor in the state of a bucket, on the lane.

    With `beside`, return pairs (padding, zeros) for tensors of the bucket's dtype: loading the bucket copies the zeros.
    """
    length, zeros = bucket.flat.numel(), bucket.zeros if beside else None
    pairs, others = list[Pair](), list[Tensor]()
    for each in padding_of(stage, state, length - bucket.padding.numel(), length, comm):
        alike = zeros is not None and (each.dtype, each.device) == (zeros.dtype, zeros.device)
        if zeros is not None and alike and 0 < each.numel() <= zeros.numel():
            pairs.append((each, zeros[: each.numel()]))
        elif each.numel():
            others.append(each)
    if others:
        torch._foreach_zero_(others)
    return pairs


def padding_of(stage: Stage, state: State, used: int, length: int, comm: Comm) -> Iterator[Tensor]:
    """Yield the padding of every elementwise tensor that a state now has: all after the first `used` of `length`."""
    nested = stage.nested()
    for name, value in state.items():
        if name not in nested or not isinstance(value, dict):
            held = tensors_of(value) if used < length and name in stage.elementwise else ()
            yield from (tensor[used:] for _, tensor in held if tensor.shape == (length,))
        elif isinstance(stage, Hierarchical):
            shard = -(-length // comm.intra.size)
            mine = min(max(used - comm.intra.rank * shard, 0), shard)
            yield from padding_of(nested[name], value, mine, shard, comm.inter)
        elif not stage.shards:
            yield from padding_of(nested[name], value, used, length, comm)


def buckets_of(params_of_buckets: Sequence[Sequence[Tensor]], rule: Rule, comm: Comm) -> list[Bucket]:
    return [Bucket(params, padded_multiple(rule.stage.multiple_of(comm), params)) for params in params_of_buckets]


def padded_multiple(multiple: int, params: Sequence[Tensor]) -> int:
    """Return `multiple` times a power of two, so that shards of a large bucket are whole blocks of a compressor.

    First, `multiple` is halved (set to 64 if odd) while it exceeds both `PADDED` and an eighth of the bucket. The power
    is the largest, up to 128, that keeps the result below 1 % of the bucket, or else 1. Return 1 if `multiple` is 1.
    """
    values, times = sum(local(p).numel() for p in params), 1
    most = max(PADDED, values // 8)
    while multiple > most:
        multiple = multiple // 2 if multiple % 2 == 0 else 64
    while multiple > 1 and times < 128 and 200 * times * multiple < values:
        times *= 2
    return times * multiple


def norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64)  # type: ignore[no-any-return]


def measured(stage: Stage, tally: Tally) -> Stage:
    """Return a copy of `stage` whose compressor adds the norms of inputs and errors to `tally`.

    A stage that loses values without a compressor (`LowRankMean`) is wrapped. Results and sent bytes stay the same.
    """
    held = {f.name: getattr(stage, f.name) for f in fields(stage)}
    changed: dict[str, Any] = {k: _measured(each, tally) for k, each in held.items() if isinstance(each, Compressor)}
    if stage.lossy and not changed:
        return MeasuredStage(stage, tally)
    other = copy.copy(stage)
    vars(other).update(changed, **{name: measured(inner, tally) for name, inner in stage.nested().items()})
    return other


def _measured(compressor: Compressor, tally: Tally) -> Compressor:
    def compress(x: Tensor, residual: Tensor | None = None, key: int = 0) -> Tensor:
        lost = torch.empty(x.shape, dtype=torch.float32, device=x.device) if residual is None else residual
        packed = compressor._unchecked_compress(x, lost, key)
        tally.append((norm(x), norm(lost)))
        return packed

    other = copy.copy(compressor)
    # `reduce` compresses again. The error of this compression is not measured, as its values are of all ranks.
    kept = {"_unchecked_compress": compress, "_unchecked_reduce": compressor._unchecked_reduce}
    vars(other).update(compress=compress, **kept)
    return other


@dataclass(frozen=True, repr=False, eq=False)
class MeasuredStage(Stage):
    """A wrapper that measures the error of `inner`, a lossy stage without a compressor."""

    inner: Any
    tally: Tally

    def __call__(self, x: Tensor, state: State, comm: Comm, residual: Tensor | None = None) -> Tensor:
        lost = torch.empty_like(x, dtype=torch.float32) if residual is None else residual
        given = norm(x)  # the stage may overwrite it
        result: Tensor = self.inner(x, state, comm, residual=lost)
        self.tally.append((given, norm(lost)))
        return result

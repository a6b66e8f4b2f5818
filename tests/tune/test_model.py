"""The model of a step: closed forms where there are some, and a plan computed by hand."""

from dataclasses import replace
from itertools import count

import everything
import pytest
import torch
from torch import nn

import baguakit as bk
from baguakit.compressors import MinMaxUInt8
from baguakit.costs import piped
from baguakit.stages import Mean, Stage
from baguakit.tune import Codec, Compute, Cost, Line, Link, Load, Network, Place, predict, probing
from baguakit.tune.planning import plan_of
from baguakit.tune.prediction import overlapped

A, B = 1e-3, 1e-7  # α and β of the link
LINE = Line(A, B)
FAST = Line(A, B / 2)
CODEC = Codec("MinMaxUInt8()", 1e-9, 2e-9, 3e-9)
N = 1_000_000  # values of a layer
COMPUTE = Compute(0.1, 0.2, 0.05)


def network(*, ranks=4, copy=0.0, crowding=0.0, line=LINE):
    links = (Link("flat", 1, ranks, line, line), Link("flat", 2, ranks, FAST, FAST))
    return Network(ranks, 1, "cpu", 1, links, (CODEC,), copy=copy, crowding=crowding)


def model(layers=2):
    return nn.Sequential(*(nn.Linear(1000, 1000, bias=False, device="meta") for _ in range(layers)))


def costs(*seconds, busy=0.0):
    return [Cost(each, busy * each) for each in seconds]


def test_a_step_is_timed_on_the_device_of_the_model(monkeypatch):
    """It need not be the current device."""
    devices, ticks = set(), count()
    monkeypatch.setattr(probing, "moment", lambda device: (devices.add(device), float(next(ticks)))[1])
    there, x = model(), torch.empty(1, 1000, device="meta")
    found = probing.timed(lambda: there(x).sum().backward(), there)
    assert devices == {torch.device("meta")}
    assert found == Compute(1.0, 2.0, 1.0, (1.0, 0.5))


# Overlap


def test_ends_of_the_range():
    """Without computing the sum of the flights; without a network the computing; one bucket adds to backward."""
    for kappa in (0.0, 0.5, 1.0):
        assert overlapped(0.0, [(0.0, each) for each in costs(1, 2, 3, busy=0.7)], kappa) == 6
    assert overlapped(5.0, [(r, Cost()) for r in (1, 2, 5)], 1.0) == overlapped(5.0, []) == 5
    assert overlapped(5.0, [(5.0, Cost(3.0, 1.0))], 1.0) == 8


def test_with_room_for_both_flights_follow_each_other():
    """c_i = max(r_i, c_{i−1}) + T_i."""
    ready, seconds = [1.0, 2.0, 6.0, 6.5], [3.0, 0.5, 1.0, 4.0]
    landed = 0.0
    for r, each in zip(ready, seconds, strict=True):
        landed = max(r, landed) + each
    assert overlapped(7.0, list(zip(ready, costs(*seconds, busy=1.0), strict=True))) == pytest.approx(landed)
    assert overlapped(40.0, list(zip(ready, costs(*seconds, busy=1.0), strict=True))) == 40


@pytest.mark.parametrize(
    "within, between, ten", [(2.0, 5.0, 52.0), (3.0, 3.0, 33.0), (5.0, 2.0, 50.0), (0.0, 4.0, 40.0)]
)
def test_phases_between_nodes_overlap_those_of_other_flights_within_them(within, between, ten):
    """Within, between and within: of ten flights the lane that has more to do is busy but for the ends of the whole."""
    flights = [(0.0, Cost(within + between, beside=between))] * 10
    assert overlapped(0.0, flights[:1]) == within + between
    assert overlapped(0.0, flights) == pytest.approx(ten)
    assert overlapped(100.0, flights) == 100.0
    assert overlapped(8.0, [(8.0, flight) for _, flight in flights]) == pytest.approx(8.0 + ten)
    others = [*flights[:1], (0.0, Cost(1.0)), *flights[:1]]
    assert overlapped(0.0, others) == pytest.approx(2 * (within + between) + 1.0)


@pytest.mark.parametrize("count", [1, 2, 10, 1000])
def test_many_buckets_hide_all_but_the_last(count):
    """Flights as long as backward, in equal buckets: c = b + T/k."""
    flights = [(5.0 * (i + 1) / count, Cost(5.0 / count)) for i in range(count)]
    assert overlapped(5.0, flights) == pytest.approx(5.0 + 5.0 / count)


def test_on_one_core_no_work_is_hidden():
    """κ = 1: computing for a flight takes as long beside backward as after it."""
    for W, r, T in [(10.0, 1.0, 2.0), (10.0, 9.0, 4.0), (10.0, 0.0, 30.0)]:
        assert overlapped(W, [(r, Cost(T, T))], 1.0) == pytest.approx(W + T)
        assert overlapped(W, [(r, Cost(T, 0.0))], 1.0) == pytest.approx(max(W, r + T))
        half = overlapped(W, [(r, Cost(T, T))], 0.5)
        assert max(W, r + T) <= half <= W + T


def test_pieces_overlap_the_machine_and_the_link():
    assert piped(2.0, 3.0, 1.0) == Cost(5.0, 3.0)  # one piece: one after the other
    assert piped(2.0, 3.0, 0.5, 4).seconds == pytest.approx(3.0 + 2.0 / 4)  # bound by the link
    assert piped(5.0, 3.0, 1.0, 4).seconds == pytest.approx(6.0 + 2.0 / 4)  # bound by the machine
    assert piped(2.0, 3.0, 0.0, 10**9).seconds == pytest.approx(3.0)


# Costs of flights


def test_costs_by_hand():
    place, load = Place(network()), Load(2 * N)
    assert Mean().cost(load, place) == Cost(6 * A + 1.5 * B * 8 * N, 0.0, 12 * N)
    for values, pieces in ((2 * N, 1), (8 * N, 7)):
        b = MinMaxUInt8().row_bytes(values // 4)
        q, w = values * 6e-9, 2 * (A + 3 * B * b)
        assert w > q
        packed = bk.stages.CompressedMean().cost(Load(values), place)
        assert (packed.seconds, packed.busy, packed.sent) == pytest.approx((w + q / pieces, q, 6 * b))
    gpu = Place(Network(**vars(network()) | {"device": "cuda"}))  # where nothing is cut in pieces
    whole = bk.stages.CompressedMean().cost(Load(8 * N), gpu)
    assert whole.seconds == pytest.approx(w + q) and whole.sent == packed.sent
    few = bk.stages.CompressedMean().cost(Load(1000), place)
    b, q = MinMaxUInt8().row_bytes(1000), 1000 * (CODEC.compress + 4 * CODEC.decompress)
    assert (few.seconds, few.busy, few.sent) == pytest.approx((q + A + 3 * B * b, q, 3 * b))  # in one hop
    ring = bk.stages.NeighborMean(bk.topology.Ring()).cost(load, place)
    assert (ring.seconds, ring.sent) == pytest.approx((A + 2 * B * 8 * N, 16 * N))
    peer = bk.stages.NeighborMean(bk.topology.OnePeerExponential()).cost(load, place)
    assert (peer.seconds, peer.sent) == pytest.approx((A + B * 8 * N, 8 * N))


@pytest.mark.parametrize("algorithm", everything.ALGORITHMS)
def test_every_algorithm_has_a_cost_and_one_rank_sends_nothing(algorithm):
    algorithm = everything.made(algorithm)
    used = {each for stage in everything.stages(algorithm) for each in stage.compressors()}
    codecs = tuple(Codec(repr(each), 1e-9, 1e-9, 1e-9) for each in used)
    for ranks in (1, 4):
        links = (Link("flat", 1, ranks, LINE, LINE),) if ranks > 1 else ()
        row = predict(algorithm, model(), Network(ranks, 1, "cpu", 1, links, codecs), COMPUTE)
        assert row.seconds >= COMPUTE.seconds - 1e-12
        assert (row.sent > 0) == (ranks > 1)
        if ranks == 1:
            assert row.seconds == pytest.approx(COMPUTE.seconds)


def test_between_nodes_a_rank_sends_a_part():
    links = (
        Link("flat", 1, 8, LINE, LINE),
        Link("intra", 1, 4, Line(0.0, 0.0), Line(0.0, 0.0)),
        Link("inter", 1, 2, LINE, LINE),
        Link("inter", 2, 2, FAST, FAST),
    )
    nodes = Network(8, 4, "cpu", 1, links)
    for flows, line in ((1, LINE), (2, FAST)):
        found = bk.stages.Hierarchical(Mean()).cost(Load(N), Place(nodes, flows=flows))
        assert found.seconds == pytest.approx(2 * A + line.beta * N)
        assert found.sent == pytest.approx(2 * 3 * N + N)


def test_a_stage_of_ones_own_declares_its_cost_or_is_refused():
    class Mine(Stage):
        pass

    class Declared(Stage):
        def cost(self, load: Load, place: Place) -> Cost:
            return Cost(1.0)

    with pytest.raises(TypeError, match=r"Mine has no cost: give it a method cost\(load, place\)"):
        Mine().cost(Load(N), Place(network()))
    assert Declared().cost(Load(N), Place(network())) == Cost(1.0)


# Steps, by hand


def step(algorithm, bucket_bytes=25 << 20, flows=1, compute=COMPUTE, **of_network):
    return predict(algorithm, model(), network(**of_network), compute, bucket_bytes, flows)


def test_steps_of_gradients_by_hand():
    f, b, o = 0.1, 0.2, 0.05
    one = 6 * A + 1.5 * B * 8 * N
    half = 6 * A + 1.5 * B * 4 * N
    row = step(bk.algorithms.gradient_allreduce())
    assert (row.seconds, row.exposed, row.buckets) == pytest.approx((f + b + one + o, one, 1))
    row = step(bk.algorithms.gradient_allreduce(), 1 << 20)
    assert (row.seconds, row.buckets) == pytest.approx((f + b / 2 + 2 * half + o, 2))
    early = Compute(f, b, o, ready=(0.25, 0.25))  # both gradients are there after a quarter of backward
    row = step(bk.algorithms.gradient_allreduce(), 1 << 20, compute=early)
    assert row.seconds == pytest.approx(f + b / 4 + 2 * half + o)
    assert step(bk.algorithms.gradient_allreduce(), flows=2).seconds == pytest.approx(
        f + b + 6 * A + 0.75 * B * 8 * N + o
    )
    for d in (1, 2):  # the lane has a whole step for the flights of a step, whatever the delay
        delayed = step(bk.algorithms.gradient_allreduce(delay=d))
        assert (delayed.seconds, delayed.sent) == pytest.approx((max(f + b + o, one), row.sent))


def test_steps_of_weights_by_hand():
    f, b, o = 0.1, 0.2, 0.05
    peer, mean, c = A + B * 8 * N, 6 * A + 1.5 * B * 8 * N, 1e-9
    topology = bk.topology.OnePeerExponential()
    assert step(bk.algorithms.decentralized(topology)).seconds == pytest.approx(max(f + b, peer) + o)
    assert step(bk.algorithms.decentralized(topology, order="atc")).seconds == pytest.approx(f + b + o + peer)
    row = step(bk.algorithms.local_sgd(every=8))
    assert (row.seconds, row.sent) == pytest.approx((f + b + o + mean / 8, 12 * N / 8))
    delayed = bk.after_step(Mean(), every=8, delay=4)  # 1.2 s in the air, and 4 · 0.35 to do it in
    assert step(delayed).seconds == pytest.approx(f + b + o)
    assert step(bk.after_step(Mean(), every=8, delay=2)).seconds == pytest.approx(f + b + o + (mean - 0.7) / 8)
    # copies: into the bucket and back; for what flies on a copy to compare with, and the landing
    assert step(bk.after_step(Mean(), every=2), copy=c).exposed == pytest.approx((mean + 3 * c * 8 * N) / 2)
    for mix, copies in ((None, 6), (0.5, 6), (0.0, 2)):  # nothing is compared where a landing overwrites
        late = bk.after_step(Mean(), every=8, delay=4, mix=mix)
        assert step(late, copy=c).exposed == pytest.approx(copies * c * 8 * N / 8)
    awc = step(bk.between_steps(Mean()), copy=c)
    assert awc.seconds == pytest.approx(max(f + b, mean + c * 8 * N) + o + 6 * c * 8 * N)


def test_a_warm_up_that_ends_is_left_out():
    assert step(bk.algorithms.local_sgd(every=8, start=100)).seconds == step(bk.algorithms.local_sgd(every=8)).seconds


def test_free_running_hides_everything_but_its_copies():
    assert step(bk.algorithms.async_model_average()).exposed == 0
    assert 0 < step(bk.algorithms.async_model_average(), copy=1e-9).exposed < 6e-9 * 8 * N


# The plan


def the_plan(network, compute=COMPUTE, sizes=(1 << 20, 25 << 20, 100 << 20), flows=(1,)):
    choices = [bk.algorithms.gradient_allreduce(), bk.algorithms.bytegrad()]
    return plan_of(model(), network, compute, choices, sizes, flows)


def test_the_plan_is_the_predictions_sorted():
    found = the_plan(network(), flows=(1, 2))
    assert [row.seconds for row in found.rows] == sorted(row.seconds for row in found.rows)
    assert len(found.rows) == 2 * 2 * 2  # 100 MiB cut nothing that 25 do not
    best = found.best
    assert best.algorithm == bk.algorithms.bytegrad() and best.flows == 2 and best is found.rows[0]
    assert best.seconds == step(bk.algorithms.bytegrad(), best.bucket_bytes, 2).seconds


def test_on_a_fast_network_exact_means_are_picked():
    """If both hide behind backward, the plan takes the algorithm named first and the fewest flows and buckets."""
    free = Line(0.0, 1e-15)
    found = the_plan(network(line=free))
    assert (found.best.algorithm, found.best.buckets) == (bk.algorithms.gradient_allreduce(), 1)
    codec_bound = the_plan(network(line=free), compute=Compute(0.0, 0.0))
    assert codec_bound.best.algorithm == bk.algorithms.gradient_allreduce()


def test_the_plan_prints_its_pick(monkeypatch):
    monkeypatch.setattr("baguakit.tune.prediction.measured", dict)
    found = the_plan(network())
    text = str(found).splitlines()
    assert text[0].split() == ["algorithm", "step", "sent", "to", "DDP", "training"]
    assert [line[:3] for line in text[:3]] == [" al", " → ", "   "]
    assert text[1].endswith("  8-bit") and text[2].endswith("  as DDP")
    beyond = f"{found.best.exposed * 1e3:.1f} ms a step beyond the {COMPUTE.seconds * 1e3:.1f} ms of computing"
    assert text[-4] == f"→ during_backward(CompressedMean(MinMaxUInt8())) in 2 buckets: {beyond}."
    assert text[-2:] == [
        "    bk.attach(model, optimizer, during_backward(CompressedMean(MinMaxUInt8())),",
        f"              bucket_bytes={found.best.bucket_bytes})",
    ]


def test_a_plan_shows_calls_in_short():
    byte = bk.algorithms.bytegrad()
    shown = str(replace(the_plan(network(), flows=(1, 2)), calls={byte: "bk.hierarchical(bk.algorithms.bytegrad())"}))
    assert shown.splitlines()[1].startswith(" → bytegrad, by node   ")
    assert "\n→ bytegrad, by node in 2 buckets: " in shown
    assert "bk.attach(model, optimizer, bk.hierarchical(bk.algorithms.bytegrad()), comm=bk.Comm(flows=2),\n" in shown


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ValueError, match="no trainable parameter"):
        plan_of(nn.Identity(), network(), COMPUTE, [bk.algorithms.bytegrad()], [1], [1])
    with pytest.raises(ValueError, match="'flat' network over 4 flows"):
        the_plan(network(), flows=(4,))
    with pytest.raises(ValueError, match="tells of 1 gradients, and the model has 2"):
        the_plan(network(), compute=Compute(0.1, 0.1, 0.0, (1.0,)))
    with pytest.raises(ValueError, match="ready is a finite number, 0 to 1"):
        Compute(0.1, 0.1, 0.0, (1.5,))

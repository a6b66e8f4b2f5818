"""The timeline: every flight once, in the order of things, on clocks that agree, and as a trace."""

import json
import math
import random
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from timelines import STEPS, every_rule, of, timed
from training import loss, net_and_sgd, run_steps

import baguakit as bk
from baguakit.report.timeline import Span, Timeline, ahead


@every_rule
def test_all_ranks_hold_the_same(name):
    whole, two, _ = of(name)
    assert whole[0] == whole[1] and two[0] == two[1]
    assert whole[0].ranks == 2 and 0 < whole[0].error < 1
    assert whole[0].steps == tuple(range(STEPS)) and two[0].steps == (STEPS - 2, STEPS - 1)
    first = min([s.start for s in whole[0].spans] + [f.launched for f in whole[0].flights])
    assert first == 0


@every_rule
def test_every_flight_that_has_landed_is_there_once(name):
    whole, _, landed = of(name)
    for rank in range(2):
        flights = [f for f in whole[0].flights if f.rank == rank]
        counts = dict.fromkeys(landed[rank], 0)
        for flight in flights:
            counts[flight.rule, flight.bucket] += 1
        assert counts == landed[rank]
        assert len({(f.rule, f.bucket, f.round) for f in flights}) == len(flights)
    assert name == "free" or whole[0].flights


@every_rule
def test_a_flight_goes_from_launch_to_landing(name):
    whole, _, _ = of(name)
    for f in whole[0].flights:
        assert f.launched <= f.start <= f.end <= f.landed, f
        waits = [s for s in whole[0].spans if s.waits and same_flight(s, f)]
        assert len(waits) == 1 and waits[0].end == f.landed and waits[0].start >= f.launched


def same_flight(a, b):
    return (a.rank, a.rule, a.bucket, a.round) == (b.rank, b.rule, b.bucket, b.round)


@every_rule
def test_spans_of_a_thread_nest_or_lie_apart(name):
    whole, _, _ = of(name)
    for rank, thread in {(s.rank, s.thread) for s in whole[0].spans}:
        open_ends = []
        for span in (s for s in whole[0].spans if (s.rank, s.thread) == (rank, thread)):
            while open_ends and open_ends[-1] <= span.start:
                open_ends.pop()
            assert not open_ends or (span.end <= open_ends[-1] and thread == "training"), span
            open_ends.append(span.end)


@every_rule
def test_steps_follow_each_other_and_hold_their_parts(name):
    whole, _, _ = of(name)
    for rank in range(2):
        training = [s for s in whole[0].spans if s.rank == rank and s.thread == "training" and not s.waits]
        steps = [s for s in training if s.name == "step"]
        assert [s.step for s in steps] == list(range(STEPS))
        assert all(a.end == b.start for a, b in pairwise(steps))
        parts = ["SGD.step"] + ["backward"] * ("gradients" in name)
        for step in steps:
            inside = [s for s in training if s.step == step.step and s is not step]
            assert sorted(s.name for s in inside) == parts
            assert all(step.start <= s.start <= s.end <= step.end for s in inside)


@every_rule
def test_no_collective_arrives_before_all_have_begun_it(name):
    """So the clocks agree as closely as is claimed."""
    timeline = of(name)[0][0]
    for f in timeline.flights:
        for g in timeline.flights:
            if (f.rule, f.bucket, f.round) == (g.rule, g.bucket, g.round):
                assert f.end >= g.start - timeline.error


def test_clocks_are_compared_by_what_leaves_after_all_have_entered():
    draw = random.Random(0)
    for _ in range(200):
        truth, a, b = draw.uniform(-100, 100), [], []
        for k in range(4):
            entered = [k + draw.random() / 10 for _ in range(2)]
            left = [max(entered) + draw.random() / 10 for _ in range(2)]
            a.append((entered[0], left[0]))
            b.append((entered[1] + truth, left[1] + truth))
        found, error = ahead(a, b)
        assert abs(found - truth) <= error + 1e-12 and error <= 0.2


def by_hand():
    """Two ranks, three steps of 10 s; rank 0's first flight is waited for a third of its way, rank 1's never."""
    steps = [Span(r, "training", "step", 10.0 * i, 10.0 * i + 10, 7 + i) for r in range(2) for i in range(3)]
    which = (7, "during_backward(Mean())", 0, 0)
    waits = [
        Span(0, "training", "wait for Mean, bucket 0", 6.0, 8.0, *which),
        Span(1, "training", "wait for Mean, bucket 0", 8.0, 8.0, *which),
    ]
    flights = [Span(r, "lane 0", "Mean, bucket 0", 3.0, 7.0, *which, 2.0, 8.0) for r in range(2)]
    return Timeline(2, tuple(steps + waits + flights), 0.0)


def test_overlap_by_hand():
    timeline = by_hand()
    assert timeline.steps == (7, 8, 9)
    assert timeline.overlap() == 1 - 2 / 12
    assert repr(timeline) == "<Timeline: 2 ranks, steps 7 to 9, 2 flights, clocks within 0 s>"
    nothing = Timeline(1, (), 0.0)
    assert nothing.steps == () and math.isnan(nothing.overlap())


def test_a_timeline_is_asked_for_in_time():
    def run():
        errors = []
        model, optimizer = net_and_sgd()
        with bk.attach(model, optimizer, bk.algorithms.gradient_allreduce()) as att:
            loss(model, dist.get_rank(), 0).backward()
            between = att.timeline()  # the step has not ended
            optimizer.step()
            try:
                att.timeline(0)
            except ValueError as error:
                errors.append(str(error))
        try:
            att.timeline()
        except RuntimeError as error:
            errors.append(str(error))
        return between.spans, errors

    for spans, (wrong, late) in ranks(2, run):
        assert spans == () and wrong.startswith("steps is a whole number, 1 or more") and "before it detaches" in late


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_times_are_those_of_the_device():
    for results in ranks(2, timed, "cuda", cuda=True):
        for whole, _, landed in results.values():
            assert len(whole.flights) == 2 * sum(landed.values()) or any("free" in rule for rule, _ in landed)
            assert all(f.launched <= f.start <= f.end <= f.landed for f in whole.flights)


@every_rule
def test_a_trace_names_all_that_it_shows(name, tmp_path):
    timeline = of(name)[0][0]
    timeline.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    shown = [e for e in events if e["ph"] == "X"]
    assert len(shown) == len(timeline.spans) and all(e["dur"] >= 0 for e in shown)
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in shown} == threads and {e["pid"] for e in shown} <= processes
    arrows = {}
    for e in events:
        if e["ph"] in "stf":
            arrows.setdefault(e["id"], []).append(e)
    assert len(arrows) == len(timeline.flights)
    for launch, lane, landing in arrows.values():
        assert [e["ph"] for e in (launch, lane, landing)] == ["s", "t", "f"]
        assert launch["ts"] <= lane["ts"] <= landing["ts"]
        assert launch["tid"] == landing["tid"] == 0 < lane["tid"] and launch["pid"] == lane["pid"] == landing["pid"]
        held = [x for x in shown if x["tid"] == lane["tid"] and x["pid"] == lane["pid"] and x["ts"] == lane["ts"]]
        assert launch["name"] in [x["name"] for x in held]


@pytest.mark.parametrize("all_threads", [False, True])
def test_a_profiler_is_shown_launches_and_waits_and_on_request_the_lane(all_threads):
    def run():
        from torch.profiler import ProfilerActivity, profile

        model, optimizer = net_and_sgd()
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=all_threads)
        with bk.attach(model, optimizer, bk.algorithms.gradient_allreduce(), bucket_bytes=300) as att:
            run_steps(model, optimizer, range(1))  # the first: ranks compare the order of gradients after it
            with profile(activities=[ProfilerActivity.CPU], experimental_config=config, acc_events=True) as seen:
                run_steps(model, optimizer, range(3))
            buckets = len(att.report().rows)
        return {e.key: e.count for e in seen.key_averages() if e.key.startswith("baguakit: ")}, buckets

    for seen, buckets in ranks(2, run):
        what = ["launch ", "wait for ", *([""] if all_threads else [])]
        assert buckets > 1 and seen == {f"baguakit: {w}Mean, bucket {i}": 3 for w in what for i in range(buckets)}

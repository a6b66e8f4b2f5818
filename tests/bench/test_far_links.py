"""A probe finds the rate and the round trip of links with delay, and the plan does without frequent messages there."""

import sys

import pytest
from laboratory import ROOT, needs_root
from torch import nn

import baguakit as bk
from bench.netlab import Lab
from bench.netlab.distance import seconds

pytestmark = [pytest.mark.slow, needs_root, pytest.mark.timeout(400)]

PAYLOAD = 0.956  # of a frame, that is TCP's payload
RATE = 100e6 / 8  # bytes a second, of "100mbit"
PROBE = """
import torch.distributed as dist, baguakit as bk

dist.init_process_group("gloo")
kinds = [bk.compressors.MinMaxUInt8(), bk.compressors.UInt4()]
found = bk.tune.probe(flows=(1,), compressors=kinds)
if dist.get_rank() == 0:
    print("found", found.to_json().replace(chr(10), ""))
dist.barrier()
dist.destroy_process_group()
"""


def probed(lab):
    """Return what a probe of the hosts of a laboratory finds."""
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = lab.run([sys.executable, "-c", PROBE], env=env, timeout=380)
    assert ended.status == 0, ended.outputs
    (line,) = [line for line in ended.outputs[0].splitlines() if line.startswith("found ")]
    return bk.tune.Network.from_json(line.removeprefix("found "))


@pytest.mark.parametrize("there, back", [("5ms", "5ms"), ("10ms", "40ms"), ("100ms", "100ms")])
def test_rate_and_round_trip_of_a_link(there, back):
    """A message takes a round trip: gloo asks the receiver first. So do both messages of an all-reduce of two ranks."""
    with Lab(2, rate="100mbit", delay=(there, back)) as lab:
        (link,) = probed(lab).links
    assert link.exchange.rate == pytest.approx(PAYLOAD * RATE, rel=0.1)
    assert link.exchange.alpha == pytest.approx(seconds(there) + seconds(back), rel=0.1)
    assert link.all_reduce.alpha == pytest.approx(seconds(there) + seconds(back), rel=0.1)


def test_between_two_cities_an_infrequent_algorithm_of_four_bits_is_planned():
    """One connection of cubic through a queue in the middle fills it to four fifths or so, and never more than all.

    What is picked is the best in the table of docs/situations/far_apart.md, by step and by seconds to DDP's loss.
    """
    with Lab(4, rate="1gbit", nodes=2, between="100mbit", delay="25ms") as lab:
        network = probed(lab)
    (link,) = network.links
    assert link.exchange.alpha == pytest.approx(0.050, rel=0.1)
    assert 0.6 * PAYLOAD * RATE < link.exchange.rate < 1.02 * PAYLOAD * RATE

    a, four = bk.algorithms, bk.compressors.UInt4()
    paper = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    rarely = a.diloco(every=30, inner=bk.stages.ErrorFeedback(bk.stages.CompressedMean(four)), **paper)
    exact, byte, few = a.gradient_allreduce(), a.bytegrad(), a.bytegrad(four, error_feedback=True)
    choices = [exact, byte, few, a.local_sgd(every=8), a.diloco(every=30, **paper), rarely]
    model = nn.Linear(1792, 1792)  # as many values as the model of the table
    plan = bk.tune.plan(model, network=network, step_seconds=0.085, algorithms=choices)
    assert plan.best.algorithm == rarely
    known = {row.algorithm: row.to_loss for row in plan.fastest() if row.to_loss is not None}
    assert min(known, key=known.get) == rarely and known[exact] > 8 * known[rarely]

    # Of those that keep DDP's loss, no ring of delayed hops is picked, and no more buckets than one.
    kept = bk.tune.plan(model, network=network, step_seconds=0.085).best
    assert kept.algorithm == byte and kept.buckets == 1

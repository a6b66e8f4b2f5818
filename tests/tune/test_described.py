"""Machines in figures: steps by hand, and the plan that follows from them on one process."""

import pytest
import torch
from torch import nn

import baguakit as bk
from baguakit.compressors import MinMaxUInt8
from baguakit.tune import describe, plan

V, GBIT = 88_000_000, 1e9 / 8
CHOICES = [bk.algorithms.gradient_allreduce(), bk.algorithms.bytegrad()]


def model(dtype=torch.float32):
    with torch.device("meta"):
        return nn.ParameterList([nn.Parameter(torch.empty(V, dtype=dtype))])


@pytest.mark.parametrize("per_node, dtype", [(4, torch.float32), (4, torch.bfloat16), (8, torch.float32)])
def test_the_exchanges_of_two_machines_by_hand(per_node, dtype):
    """A ring crosses each network card once; an all-to-all L (1 − 1/n) times, its shards' ring once."""
    L, n, within, spread, nic = per_node, 2, 12e9, 6e9, 10 * GBIT
    N, S, c = L * n, V * dtype.itemsize, V * MinMaxUInt8().row_bytes(1 << 20) / (1 << 20)
    network = describe(n, L, nic, within, spread, memory=1e18, alpha=0.0)
    found = plan(model(dtype), network=network, algorithms=CHOICES)
    seconds = {row.algorithm: row.seconds for row in found.rows}
    flat = max(L * (N - L) / N * c / nic, (N - 1) / N * c / spread) + (N - 1) / N * c / nic
    assert seconds[CHOICES[0]] == pytest.approx(2 * (N - 1) / N * S / nic, rel=1e-3)
    assert seconds[CHOICES[1]] == pytest.approx(flat, rel=1e-3)
    inside, outside = 2 * (L - 1) / L * S / within, 2 * (n - 1) / n * c / nic
    # The two on one lane take the sum, on a lane each the longer of the two.
    between = seconds[bk.hierarchical(CHOICES[1])]
    assert max(inside, outside) * 0.999 <= between <= (inside + outside) * 1.001


@pytest.mark.parametrize("per_node, gbit", [(4, 1), (4, 10), (4, 25), (8, 25)])
def test_two_machines_of_several_gpus_take_the_hierarchical_form(per_node, gbit):
    network = describe(2, per_node, gbit * GBIT * 0.9, 12e9, 6e9, memory=0.8e12)
    for dtype in (torch.float32, torch.bfloat16):
        assert plan(model(dtype), network=network, algorithms=CHOICES).best.algorithm == bk.hierarchical(CHOICES[1])


def test_machines_alone_and_of_one_rank():
    one = describe(1, 8, GBIT, 12e9, 6e9)
    assert plan(model(), network=one, algorithms=CHOICES).best.algorithm == CHOICES[1]
    singles = describe(4, 1, GBIT, 12e9)
    assert [link.part for link in singles.links] == ["flat"]
    line = singles.link("flat")
    assert line.exchange.rate == pytest.approx(GBIT) == line.to_all.rate
    assert bk.tune.Network.from_json(singles.to_json()) == singles
    assert describe(1, 1, GBIT, 12e9).links == ()


def test_what_cannot_be_described_is_named():
    with pytest.raises(ValueError, match="per_node"):
        describe(2, 0, GBIT, 1e9)
    with pytest.raises(ValueError, match="between"):
        describe(2, 2, 0.0, 1e9)


def test_algorithms_that_the_described_ranks_cannot_run_are_left_out():
    """ShiftOne pairs ranks off: not three machines."""
    found = plan(model(), network=describe(3, 2, GBIT, 12e9), algorithms=None, bucket_bytes=(1 << 30,))
    assert all("rank" in reason or "speed" in reason for reason in found.left_out.values())
    with pytest.raises(ValueError, match="this group has 3"):
        stage = bk.stages.NeighborMean(bk.topology.ShiftOne())
        plan(model(), network=describe(3, 1, GBIT, 12e9), algorithms=[bk.after_step(stage)])

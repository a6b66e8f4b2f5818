"""One rank of many: the real attachment, against a group that only counts, costs what its neighbours cost."""

import pytest
import torch
from tiers import slow

import baguakit as bk
from bench.scaling.many import page
from bench.scaling.many.group import alone
from bench.scaling.many.measures import SIZES, facts

FEW, MANY = SIZES[0], SIZES[-1]
ONE_PEER = "decentralized(OnePeerExponential())"
CHOCO = "choco(OnePeerExact(), gamma=1.0)"  # 28 copies of the weights, for 14 rounds
A_FEW = [ONE_PEER, *map(slow, ("decentralized(Ring())", "low_precision_decentralized()", CHOCO))]
COLLECTIVE = ["gradient_allreduce()", *map(slow, ("local_sgd(every=2)", "diloco(every=2)"))]


@pytest.fixture(scope="module")
def counted():
    """`facts`, on a process of its own: threads and descriptors of other tests end when they will."""
    with bk.Ranks(1) as ranks:
        yield lambda *given: ranks.run(facts, *given)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", A_FEW)
def test_gossip_costs_a_rank_the_same_among_16384_as_among_8(counted, name):
    """The same Python calls, messages, bytes and requests a step; the same threads and descriptors."""
    few, many = counted(name, FEW), counted(name, MANY)
    assert many["step"] == few["step"]
    assert many["step"]["requests"] == 0 and many["step"]["messages"] == (2 if "OnePeer" in name else 4)
    assert [many["added"][k] for k in ("threads", "descriptors")] == [
        few["added"][k] for k in ("threads", "descriptors")
    ]
    if "choco" not in name:  # which keeps two copies for each round of a period
        assert many["tensors"] == few["tensors"]


@pytest.mark.parametrize("name", COLLECTIVE)
def test_a_step_of_collectives_makes_the_same_calls_on_any_number_of_ranks(counted, name):
    few, many = (counted(name, size)["step"] for size in (FEW, MANY))
    assert {k: v for k, v in many.items() if k != "bytes"} == {k: v for k, v in few.items() if k != "bytes"}
    assert many["bytes"] / few["bytes"] == pytest.approx((1 - 1 / MANY) / (1 - 1 / FEW), rel=1e-3)


@pytest.mark.slow
def test_a_compressed_mean_sends_a_row_to_every_rank_and_no_more(counted):
    few, many = (counted("bytegrad()", size, 1) for size in (FEW, 512))
    for found, size in ((few, FEW), (many, 512)):
        assert found["step"]["messages"] == 4 * (size - 1) and found["peers"] == size - 1
    assert (many["step"]["calls"] - few["step"]["calls"]) / (512 - FEW) < 24  # of four messages


def test_the_first_time_in_each_round_costs_the_same_too(counted):
    """A step of each has come before, with other rounds: the row of this one is asked of the topology."""
    assert counted(ONE_PEER, MANY, 1)["step"] == counted(ONE_PEER, FEW, 1)["step"]


def test_small_buckets_of_many_ranks_stay_small():
    """155 values: a compressed mean of them would send 64 for each of 16,384 ranks."""
    model = torch.nn.Linear(154, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with alone(MANY) as (comm, tally), bk.attach(model, optimizer, bk.algorithms.bytegrad(), comm=comm):
        before = tally.sent
        model(torch.ones(1, 154)).sum().backward()
        optimizer.step()
        assert tally.sent - before < 1 << 16


def test_the_page_is_what_the_program_writes(tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    assert page.write(page.RESULTS, folder / "README.md").read_text() == page.PAGE.read_text()

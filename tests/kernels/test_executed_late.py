"""A rank that does not come to a mean in one kernel leaves no other waiting: run with `--ptx ARCH`."""

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from exchanges import Mean, Node, run, unlike

from baguakit.compressors import UInt4
from ptx.faults import DeadlockFault
from ptx.ranks import drawn

SECOND = 10**9
HOPS = pytest.mark.parametrize("one_hop", [False, True], ids=["two hops", "one hop"])
CODECS = pytest.mark.parametrize("codec", [UInt4(), None], ids=repr)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("only_executed")]


def gave_up(results, node, place, late, ranks):
    """Return whether all values of ranks are NaN, none of their programs says finite, and they name who is late."""
    for rank in ranks:
        named = [int(each == late) for each in range(node.ranks)]
        assert results.values[place][rank].isnan().all()
        assert not results.finite[place][rank].any()
        assert node.control[rank].tolist() == [0, *named]


@HOPS
@CODECS
def test_a_rank_that_never_comes(codec, one_hop, executed_gpu):
    mean = Mean(3, 301, codec, one_hop=one_hop)
    for late, order in enumerate(drawn(3)):
        node = Node(3, mean.bytes, 2, limit=SECOND)
        results = run(executed_gpu, node, mean, order=order, come=[int(rank != late) for rank in range(3)])
        gave_up(results, node, 0, late, {0, 1, 2} - {late})
        assert torch.equal(results.values[0][late], mean.values[late])


@HOPS
def test_a_rank_that_comes_to_fewer_means(one_hop, executed_gpu):
    means = [Mean(3, 301, one_hop=one_hop, seed=seed) for seed in range(2)]
    for order in drawn(5):
        node = Node(3, means[0].bytes, 2, limit=SECOND)
        results = run(executed_gpu, node, *means, order=order, come=[2, 1, 2])
        assert not unlike(node, results, means[0])
        gave_up(results, node, 1, 1, [0, 2])


def test_a_rank_that_gives_up_between_the_hops(executed_gpu):
    """Its host ends its waits. A program of another rank has the mean, or gives up, too, and names the one."""
    mean, ended = Mean(3, 301), 0
    for order in drawn(20):
        node = Node(3, mean.bytes, 2, limit=SECOND)
        node.control[1][0] = 1
        results = run(executed_gpu, node, mean, order=order)
        for rank in range(3):
            values, finite = results.values[0][rank], results.finite[0][rank]
            there = torch.equal(values, mean.wanted[0])
            assert there or values.isnan().all()
            assert bool(finite[0]) == there  # the other program has no values
            if rank != 1 and not finite.all():
                assert node.control[rank].tolist()[:3] == [0, 0, 1]
                ended += 1
    assert ended


@triton.jit
def stop_kernel(control_ptr):
    WRITE: tl.constexpr = "{ st.relaxed.sys.global.u32 [$1], 1; mov.u32 $0, 1; }"
    tl.inline_asm_elementwise(WRITE, "=r,l", [control_ptr.to(tl.int64)], tl.uint32, False, 1)


@HOPS
def test_a_host_ends_waits_that_have_no_limit(one_hop, executed_gpu):
    mean = Mean(2, 301, one_hop=one_hop)
    for order in drawn(5):
        node, x = Node(2, mean.bytes, 2), mean.values[0].clone()
        finite = []

        def launch(rank, node=node, x=x, finite=finite):
            if rank == 0:
                finite.append(node.launch(0, mean, x, None))
            elif rank == 2:
                stop_kernel[(1,)](node.control[0])

        node.together(executed_gpu, launch, order, others=1)
        assert x.isnan().all() and not finite[0].any()
        assert node.control[0].tolist() == [1, 0, 1]


def test_without_a_limit_and_a_host_a_wait_does_not_end(executed_gpu):
    mean = Mean(2, 301)
    with pytest.raises(DeadlockFault, match=r"mean_kernel: program 0 of rank 0 waits for .*signals of rank 0"):
        run(executed_gpu, Node(2, mean.bytes, 2), mean, come=[1, 0])

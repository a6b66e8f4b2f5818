"""Ranks whose calls differ: all raise a sentence that names the odd one, before anything has been mixed."""

import re

import pytest
import torch
import torch.distributed as dist
from bagua import group, said
from pool import ranks

import baguakit as bk

N, ODD = 3000, 1
SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX


def ones(n=N, dtype=torch.float32):
    return torch.ones(n, dtype=dtype)


def within(g):
    with bk.backend.exact():
        dist.all_reduce(ones(), group=g)


def gather(g, x, to):
    parts = [torch.empty_like(x) for _ in range(3)] if dist.get_rank() == to else None
    dist.gather(x, parts, group=g, group_dst=to)


def scatter(g, x, of):
    parts = [x.clone() for _ in range(3)] if dist.get_rank() == of else None
    dist.scatter(x, parts, group=g, group_src=of)


def exchange(g, x, sends, receives):
    dist.all_to_all_single(x.new_empty(sum(receives)), x[: sum(sends)], receives, sends, group=g)


# Two calls of a group; one rank makes the second. Tensors of 3,000 floats fly compressed, and those of 9 exactly.
CALLS = {
    "size": (lambda g: dist.all_reduce(ones(), group=g), lambda g: dist.all_reduce(ones(N + 3), group=g)),
    "size, exact": (lambda g: dist.all_reduce(ones(9), group=g), lambda g: dist.all_reduce(ones(12), group=g)),
    "size of a gather": (
        lambda g: dist.all_gather([ones() for _ in range(3)], ones(), group=g),
        lambda g: dist.all_gather([ones(2 * N) for _ in range(3)], ones(2 * N), group=g),
    ),
    "dtype": (
        lambda g: dist.all_reduce(ones(), group=g),
        lambda g: dist.all_reduce(ones(dtype=torch.bfloat16), group=g),
    ),
    "dtype, as many bytes": (
        lambda g: dist.all_reduce(ones(dtype=torch.float16), group=g),
        lambda g: dist.all_reduce(ones(dtype=torch.bfloat16), group=g),
    ),
    "dtype, exact": (
        lambda g: dist.all_reduce(ones(9), group=g),
        lambda g: dist.all_reduce(ones(9, torch.int32), group=g),
    ),
    "reduction": (lambda g: dist.all_reduce(ones(), group=g), lambda g: dist.all_reduce(ones(), AVG, group=g)),
    "reduction, one exact": (
        lambda g: dist.all_reduce(ones(), group=g),
        lambda g: dist.all_reduce(ones(), MAX, group=g),
    ),
    "shape": (
        lambda g: dist.all_reduce(torch.ones(50, 60), group=g),
        lambda g: dist.all_reduce(torch.ones(60, 50), group=g),
    ),
    "layout": (
        lambda g: dist.broadcast(torch.ones(3, 4), group_src=0, group=g),
        lambda g: dist.broadcast(torch.ones(4, 3).t(), group_src=0, group=g),
    ),
    "kind": (
        lambda g: dist.all_reduce(ones(), group=g),
        lambda g: dist.all_gather([ones() for _ in range(3)], ones(), group=g),
    ),
    "kind, broadcast": (
        lambda g: dist.all_reduce(ones(9), group=g),
        lambda g: dist.broadcast(ones(9), group_src=0, group=g),
    ),
    "source": (
        lambda g: dist.broadcast(ones(9), group_src=0, group=g),
        lambda g: dist.broadcast(ones(9), group_src=1, group=g),
    ),
    "root of a reduction": (
        lambda g: dist.reduce(ones(9), group_dst=0, group=g),
        lambda g: dist.reduce(ones(9), group_dst=2, group=g),
    ),
    "root of a scatter": (lambda g: scatter(g, ones(9), 0), lambda g: scatter(g, ones(9), 1)),
    "size of a scatter of one": (lambda g: scatter(g, ones(9), 0), lambda g: scatter(g, ones(8), 0)),
    "within exact()": (lambda g: dist.all_reduce(ones(), group=g), within),
    "splits": (
        lambda g: exchange(g, ones(), [1000] * 3, [1000] * 3),
        lambda g: exchange(g, ones(), [500, 1000, 1500], [1000] * 3),
    ),
}
FAST = ("size", "dtype, exact", "reduction, one exact", "source", "splits")


def differ(cases, odd, compare=True):
    """Return what each rank says to each case, and the sum of a call that follows in another group."""
    found = {}
    for case in cases:
        with group(bk.backend.Policy(least=1024, compare=compare), timeout=20) as g:
            call = CALLS[case][dist.get_rank() == odd]
            found[case] = said(lambda call=call, g=g: call(g))
    with group(bk.backend.Policy(least=1024)) as g:
        x = ones()
        dist.all_reduce(x, group=g)
    return found, x[0].item()


@pytest.mark.parametrize(
    "cases", [FAST, pytest.param([case for case in CALLS if case not in FAST], marks=pytest.mark.slow)]
)
def test_the_rank_whose_call_differs_is_named(cases):
    results = ranks(3, differ, cases, ODD)
    for rank, (found, after) in enumerate(results):
        assert after == 3
        for case, sentence in found.items():
            if case == "splits":
                count, to = ("500", 0) if rank == ODD else (("500", "1,000", "1,500")[rank], rank)
                assert f"rank 1 sends {count} values to rank {to} in all_to_all" in sentence
            else:
                assert sentence.startswith("PeerError: rank 1 has diverged from ranks 0, 2: as launch 1, "), (
                    case,
                    sentence,
                )
                first, other = re.search("rank 1 made (.*), and ranks 0, 2 (.*); all ranks must", sentence).groups()
                assert first != other


@pytest.mark.slow  # it waits for heartbeats
def test_without_the_comparison_ranks_are_named_later():
    for found, after in ranks(3, differ, ["size", "reduction", "kind", "dtype, as many bytes"], ODD, False):
        assert after == 3
        for sentence in found.values():
            assert sentence.startswith("PeerError: rank 1 has diverged from ranks 0, 2")


def test_two_ranks_are_both_named():
    for found, _ in ranks(2, differ, ["reduction"], ODD):
        assert found["reduction"].startswith("PeerError: rank 1 and rank 0 have diverged: as launch 1, rank 1 made")


def test_many_calls_in_the_air_are_not_late():
    """They may take longer than the timeout, and each is there soon after the one before it."""

    def run():
        with group(bk.backend.Policy(least=1024), timeout=8) as g:
            xs = [torch.full((300 + i % 7,), i, dtype=(torch.float32, torch.int64)[i % 2]) for i in range(300)]
            works = [dist.all_reduce(x, group=g, async_op=True) for x in xs]
            for work in works:
                work.wait()
            return [round(x[0].item()) for x in xs]

    assert ranks(2, run) == [[2 * i for i in range(300)]] * 2


def test_a_call_after_the_end_of_its_group_raises():
    def run():
        bk.backend.register()
        g = dist.new_group(backend="bagua")
        work = dist.all_reduce(x := ones(), group=g, async_op=True)
        dist.destroy_process_group(g)
        work.wait()
        calls = (lambda: g.allreduce([ones(9)]), lambda: g.allreduce([ones(1 << 16)]), lambda: g.send([x], 0, 0))
        return x[0].item(), [said(call) for call in calls]

    for value, sentences in ranks(2, run):
        assert value == 2
        assert (
            sentences
            == ["RuntimeError: this process group has been destroyed; make another with torch.distributed.new_group"]
            * 3
        )


def test_a_message_of_another_length_never_arrives():
    """Gloo ends a process that gets more bytes than it waits for."""

    def run():
        with group() as g:
            rank, x, y = dist.get_rank(), torch.arange(4.0), torch.zeros(3)
            if rank:
                works = [dist.isend(x, group=g, group_dst=0), dist.isend(x[:3], group=g, group_dst=0)]
            else:
                works = [dist.irecv(y, group=g, group_src=1), dist.irecv(torch.zeros(4), group=g, group_src=1)]
            for work in reversed(works):
                work.wait()
            return y.tolist()

    assert ranks(2, run)[0] == [0, 1, 2]

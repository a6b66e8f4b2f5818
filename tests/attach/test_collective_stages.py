"""Compressed collectives within a stage: ranks that differ, or die half-way, are named."""

import os
import signal
from dataclasses import dataclass

import torch
import torch.distributed as dist
from pool import Pool
from training import net_and_sgd, run_steps

import baguakit as bk

TIMEOUT = 3.0


def trained(compressors, killed=None):
    """Train with a stage of a reduce-scatter and an all-gather; return what was raised, or the weights.

    Args:
        compressors: of each rank.
        killed: (rank, round): that rank is killed there, between the two collectives.
    """

    @dataclass(frozen=True)
    class InShards(bk.stages.Stage):
        compressor: object

        def __call__(self, x, state, comm):
            n = comm.size
            rows = torch.nn.functional.pad(x, (0, -len(x) % n)).view(n, -1)
            shard = bk.primitives.compressed_reduce_scatter(rows, self.compressor, comm, average=True)
            if killed == (comm.rank, comm.round):
                os.kill(os.getpid(), signal.SIGKILL)
            return bk.primitives.compressed_all_gather(shard, self.compressor, comm).view(-1)[: len(x)]

    rank = dist.get_rank()
    model, optimizer = net_and_sgd()
    rule = bk.during_backward(InShards(eval(compressors[rank], vars(bk.compressors))))
    try:
        with bk.attach(model, optimizer, rule, timeout=TIMEOUT):
            run_steps(model, optimizer, range(4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return [p.tolist() for p in model.parameters()]


def test_ranks_that_agree_have_equal_weights_and_one_that_differs_is_named(own_pools):
    pool = own_pools(3)
    first, *others = pool.run(trained, ["UInt4()"] * 3)
    assert not isinstance(first, str) and others == [first] * 2
    for said in pool.run(trained, ["UInt4()", "UInt4()", "MinMaxUInt8()"]):
        assert said.startswith("ValueError: ranks must attach the same: rank 0 has rule during_backward(")
        assert "compressor=UInt4()" in said and "where rank 2 has" in said and "compressor=MinMaxUInt8()" in said


def test_a_rank_that_dies_between_two_collectives_of_a_stage_is_named():
    victim = 1
    with Pool(3) as pool:
        said = pool.run(trained, ["UInt4()"] * 3, (victim, 2), lost=(victim,))
    for rank in {0, 1, 2} - {victim}:
        assert said[rank].startswith(f"PeerError: rank {victim} is dead: no sign of it for"), said[rank]
        assert "InShards(compressor=UInt4())), bucket 0, round 2" in said[rank], said[rank]

"""A rank dies, is late, differs or raises: all others raise one sentence that names it."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from bagua import group, said
from pool import Pool, ranks
from tiers import slow

import baguakit as bk

TIMEOUT = 10.0  # starting ranks on a busy machine takes seconds


def test_ranks_whose_policies_differ_are_refused():
    def run():
        policy = bk.backend.Policy(bk.compressors.UInt4() if dist.get_rank() == 1 else bk.compressors.MinMaxUInt8())

        def make():
            with group(policy):
                pass

        return said(make)

    sentence = (
        "ValueError: ranks must register the same: rank 0 has Policy(MinMaxUInt8()) where rank 1 has Policy(UInt4())"
    )
    assert ranks(3, run) == [sentence] * 3


@pytest.mark.parametrize("kind", [*map(slow, ("DDP", "compressed", "exact", "messages"))])
def test_a_killed_rank_is_named(kind):
    def run(kind):
        with group(bk.backend.Policy(least=0), timeout=TIMEOUT) as g:
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(30, 30), process_group=g)

            def train():
                for step in range(1000):
                    if step == 3 and dist.get_rank() == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if kind == "messages":
                        x, size = torch.ones(5), dist.get_world_size()
                        sending = dist.isend(x, group=g, group_dst=(dist.get_rank() + 1) % size)
                        dist.recv(x, group=g, group_src=(dist.get_rank() - 1) % size)
                        sending.wait()
                    elif kind == "DDP":
                        model(torch.ones(2, 30)).sum().backward()
                    else:
                        dist.all_reduce(
                            torch.ones(500, dtype=torch.float if kind == "compressed" else torch.int), group=g
                        )

            began = time.monotonic()
            return said(train), time.monotonic() - began

    with Pool(3) as pool:
        found = pool.run(run, kind, lost=[1])
    for sentence, seconds in (found[0], found[2]):
        assert "rank 1 is dead: no sign of it for" in sentence
        assert seconds < 60  # a silence of four heartbeats is 4 s


@pytest.mark.slow  # it waits for a timeout
def test_a_late_rank_is_named():
    def run():
        def make():
            if dist.get_rank() == 2:
                time.sleep(TIMEOUT + 10)
            with group(timeout=TIMEOUT):
                pass

        return said(make)

    with Pool(3) as pool:
        first, second, third = pool.run(run)
    expected = "PeerError: rank 2 is late: it has not come to init_process_group('bagua') within the timeout of 10 s; "
    expected += "its process is dead"
    assert first.startswith(expected) and second.startswith(expected) and third.startswith("PeerError: rank 2 is late")


@pytest.mark.slow  # it waits for a timeout
def test_a_rank_that_does_not_come_to_a_collective_is_named():
    def run():
        with group(bk.backend.Policy(least=0), timeout=TIMEOUT) as g:
            if dist.get_rank() == 2:
                time.sleep(TIMEOUT + 10)
            return said(lambda: dist.all_reduce(torch.ones(500), group=g))

    with Pool(3) as pool:
        for sentence in pool.run(run):
            assert sentence.startswith(
                "PeerError: rank 2 is late: it has not launched all_reduce of 500 values of float32, SUM within the "
                "timeout of 10 s"
            )


ANEW = """
import sys
import torch, torch.distributed as dist
import baguakit as bk

bk.backend.register(bk.backend.Policy(least=0))
store, rank = dist.FileStore(sys.argv[1], 2), int(sys.argv[2])
for time in range(3):
    dist.init_process_group("bagua", store=store, rank=rank, world_size=2)
    x = torch.full((500,), float(time + rank))
    dist.all_reduce(x)
    assert x.tolist() == [2.0 * time + 1] * 500
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_program_may_begin_anew_over_the_same_store(tmp_path):
    """As under torchrun, whose agent has one store for all groups."""
    command = [sys.executable, "-c", ANEW, str(tmp_path / "store")]
    both = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        said = [each.communicate(timeout=100)[1] for each in both]
    finally:
        for each in both:
            each.kill()
    assert [each.returncode for each in both] == [0, 0], said

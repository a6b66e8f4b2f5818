"""Groups over real NCCL: a first message that not all ranks send, torch's debugging, and a rank that is killed.

The functions that ranks run stand at the top of this file, so that they can be sent where cloudpickle is missing.
"""

import gc
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from pool import Pool, ranks
from training import batch, net, sgd

import baguakit as bk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

TIMEOUT = 6.0
LIMIT = 80.0  # seconds that the call may take in which a rank is killed: it needs 20


def first_message_of_two():
    """Ranks 1 and 2 exchange through a group that nobody has used; rank 0 has no peer, and goes on."""
    comm, x = bk.Comm(dist.new_group()), torch.full((4,), float(dist.get_rank()), device="cuda")
    peers = [3 - comm.rank] if comm.rank else []
    received = comm.exchange(x, peers, peers)
    return {peer: t.tolist() for peer, t in received.items()}


def test_a_first_message_that_not_all_ranks_send():
    assert ranks(3, first_message_of_two, cuda=True) == [{}, {2: [2.0] * 4}, {1: [1.0] * 4}]


def trained_under_detail():
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group()
    try:
        said = bk.Comm(group).gather_objects(dist.get_rank())
        model = net().cuda()
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, bk.algorithms.bytegrad(), comm=bk.Comm(group)) as att:
            for step in range(3):
                x, y = (t.cuda() for t in batch(dist.get_rank(), step))
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()
            return said, att.consensus_distance()
    finally:
        dist.destroy_process_group(group)
        dist.set_debug_level(before)


def test_debugging_breaks_nothing():
    assert ranks(2, trained_under_detail, cuda=True) == [([0, 1], 0.0)] * 2


def killed():
    """Train on GPUs until rank 1 is killed: what rank 0 raises, and the seconds until it has, and has let go."""
    rank, model = dist.get_rank(), net().cuda()
    optimizer = sgd(model.parameters())
    began, sentence = time.monotonic(), ""
    try:
        with bk.attach(model, optimizer, bk.algorithms.gradient_allreduce(), timeout=TIMEOUT):
            for step in range(200):
                if step == 3:
                    torch.cuda.synchronize()
                    began = time.monotonic()
                    if rank == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                x, y = (t.cuda() for t in batch(rank, step))
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()
                torch.cuda.synchronize()
    except RuntimeError as error:
        sentence = f"{type(error).__name__}: {error}"
    gc.collect()
    ended = time.monotonic() - began
    time.sleep(10)  # torch's watchdog would have ended the process by then, at its settings for our groups
    return sentence, ended, float(torch.ones(4, device="cuda").sum())


def test_a_rank_killed_is_named_and_the_other_process_lives():
    pool = Pool(2, cuda=True)
    try:
        sentence, seconds, alive = pool.run(killed, lost=(1,), limit=LIMIT)[0]
    finally:
        pool.close()
    assert sentence.startswith("PeerError: rank 1 is dead: no sign of it for")
    assert seconds < TIMEOUT + 10 and alive == 4.0

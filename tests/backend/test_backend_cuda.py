"""The backend over real NCCL: its results equal those over gloo, DDP and FSDP2 train, a killed rank is named.

The functions that ranks run are those of this file, none within another: they can be sent without cloudpickle.
"""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from bagua import flown, group, said
from pool import Pool, ranks
from sharding import full, sharded
from test_methods import N, calls
from torch.distributed.device_mesh import DeviceMesh
from training import batch, flat, net

import baguakit as bk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

DEVICE = "cuda"
POLICIES = {
    "8 bits": bk.backend.Policy(least=0),
    "4 bits": bk.backend.Policy(bk.compressors.UInt4(), least=0),
    "exact": bk.backend.Policy(None, least=0),
    "none": bk.backend.Policy(operations=()),
}
TIMEOUT = 6.0
LIMIT = 50.0  # seconds that the call may take in which a rank is killed: it needs 20


def differences(policy):
    """The largest difference of each method's result on a GPU from what it is to be, by what differs.

    That is the result on the processor, or where it is exact what torch says.
    """
    found, exact = {}, policy.compressor is None or not policy.operations
    with group(policy) as g:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) if not exact else (dist.ReduceOp.SUM,):
            torch.manual_seed(dist.get_rank())
            x = torch.randint(-50, 50, (N,)).float() if exact else torch.randn(N)  # sums of whole numbers are exact
            for name in calls(g, x, op):
                results = [calls(g, x, op)[name][3].float()] if exact else []
                for where in (DEVICE,) if exact else ("cpu", DEVICE):
                    operation, arguments, result, _ = calls(g, x.to(where), op)[name]
                    _, rows = flown(lambda a=arguments, name=name: getattr(g, name)(*a).wait())
                    assert [key[0] for key in rows] == [operation]
                    results.append(torch.cat(result) if isinstance(result, list) else result)
                difference = (results[0] - results[1].cpu()).abs().max().item()
                if difference:
                    found[name, str(op)] = difference
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n", [2, 3])
def test_each_method_means_what_it_means_over_gloo(n, policy):
    assert ranks(n, differences, POLICIES[policy], cuda=True) == [{}] * n


def gathered_at_once(policy, whole):
    """The least and largest value gathered of a tensor whose memory is let go of, and written, before it is sent."""
    single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it
    n, found = 1 << 22, []
    with group(policy) as g:
        out = torch.empty(2 * n, device=DEVICE)
        gather, to = (single, out) if whole else (dist.all_gather, list(out.chunk(2)))
        for round in range(5):
            torch.cuda.synchronize()
            works = [gather(to, torch.full((n,), float(round), device=DEVICE), g, True) for _ in range(3)]
            for _ in range(8):
                torch.full((2 * n,), -1.0, device=DEVICE)
            for work in works:
                work.wait()
            found.append((out.min().item(), out.max().item()))
    return found


@pytest.mark.parametrize("whole", [True, False], ids=["one tensor", "a list"])  # NCCL copies those of a list
@pytest.mark.parametrize("policy", ["8 bits", "exact"])
def test_a_tensor_may_be_let_go_of_once_its_collective_is_launched(policy, whole):
    found = ranks(2, gathered_at_once, POLICIES[policy], whole, cuda=True)
    assert found == [[(float(round), float(round)) for round in range(5)]] * 2


def trained(model):
    """Train on this rank's data."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(5):
        x, y = (t.to(DEVICE) for t in batch(dist.get_rank(), step))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


def data_parallel(g):
    model = net().to(DEVICE)
    trained(torch.nn.parallel.DistributedDataParallel(model, process_group=g))
    return flat(model)


def fully_sharded(g):
    mesh = DeviceMesh.from_group(g, DEVICE, mesh_dim_names=(f"of {id(g)}",))
    model = sharded(mesh, net().to(DEVICE))
    trained(model)
    return full(model)


def programs(kind, policy):
    """The weights of DDP or FSDP2 over the backend, how far they are from those over torch's own, and what flew."""
    train = {"DDP": data_parallel, "FSDP2": fully_sharded}[kind]
    with group(policy) as g:
        ours, rows = flown(lambda: train(g))
    theirs = train(dist.new_group())
    return ours.tolist(), (ours - theirs).abs().max().item(), {(name, kind) for name, kind, _ in rows}


@pytest.mark.parametrize("policy", ["exact", "8 bits"])
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_programs_train(kind, policy):
    (first, far, flew), (second, *_) = ranks(2, programs, kind, POLICIES[policy], cuda=True)
    assert first == second
    assert far == 0 if policy == "exact" else 0 < far < 0.05
    used = "exact" if policy == "exact" else "MinMaxUInt8()"
    assert {("all_reduce", used)} <= flew if kind == "DDP" else {("reduce_scatter", used), ("all_gather", used)} <= flew


def killed(kind, policy):
    """Work in rounds until rank 1 is killed: what rank 0 says, the seconds until it does, and that a GPU answers."""
    began, rank = [0.0], dist.get_rank()

    def work():
        bk.backend.register(policy)
        g = dist.new_group(backend="bagua", timeout=timedelta(seconds=TIMEOUT))
        model = torch.nn.parallel.DistributedDataParallel(net().to(DEVICE), process_group=g)
        received = torch.empty(4, device=DEVICE)
        for step in range(200):
            if step == 3:
                torch.cuda.synchronize()
                began[0] = time.monotonic()
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            if kind == "DDP":
                x, y = (t.to(DEVICE) for t in batch(rank, step))
                (model(x) - y).square().mean().backward()
            else:
                dist.recv(received, group=g, group_src=1) if rank == 0 else dist.send(received, group=g, group_dst=0)
            torch.cuda.synchronize()

    sentence = said(work)
    ended = time.monotonic() - began[0]
    time.sleep(10)  # torch's watchdog would have ended the process by then, at its settings for our groups
    return sentence, ended, float(torch.ones(4, device=DEVICE).sum())


@pytest.mark.parametrize("kind, policy", [("DDP", "8 bits"), ("DDP", "exact"), ("DDP", "none"), ("message", "none")])
def test_a_killed_rank_is_named_and_the_other_process_lives(kind, policy):
    pool = Pool(2, cuda=True)
    try:
        sentence, seconds, alive = pool.run(killed, kind, POLICIES[policy], lost=(1,), limit=LIMIT)[0]
    finally:
        pool.close()
    assert "rank 1 is dead: no sign of it for" in sentence
    assert seconds < TIMEOUT + 10 and alive == 4.0

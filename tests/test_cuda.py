"""Several ranks over real NCCL on one GPU: lanes, streams and the allocator.

The functions that ranks run stand at the top of this file, so that they can be sent where cloudpickle is missing.
"""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
from everything import exact, made, runs_free, usual
from pool import never_waiting, ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import batch, flat, net, sgd

import baguakit as bk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

DELAYED = "after_step(Mean(), every=4, delay=2)"
FEEDBACK = "bytegrad(MinMaxUInt8(block=64), error_feedback=True)"
ALGORITHMS = [each for each in usual().values() if not runs_free(made(each))]
ALGORITHMS += [FEEDBACK, "decentralized(order='atc')", DELAYED, "bytegrad(error_feedback=True, delay=2)"]
ALGORITHMS += ["diloco(every=2, optimizer=torch.optim.AdamW, lr=0.01, eps=1e-3)"]


def trained(expression, device, steps=8, dtype=torch.float32, stream=False, strict=False):
    """The weights after some steps on this rank. `strict`: any synchronisation of the host is an error."""
    rank = dist.get_rank()
    model = net(dtype).to(device)
    optimizer = sgd(model.parameters())
    data = [tuple(t.to(device) for t in batch(rank, step, dtype)) for step in range(steps)]
    side = torch.cuda.Stream() if stream else None
    with bk.attach(model, optimizer, made(expression), bucket_bytes=200) as att:
        torch.cuda.synchronize()
        with torch.cuda.stream(side), contextlib.ExitStack() as from_here:
            for step, (x, y) in enumerate(data):
                if strict and step == 3:
                    from_here.enter_context(never_waiting())
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()
        torch.cuda.synchronize()
        report = str(att.report())
    assert "sent a step" in report
    return flat(model).cpu()


def on_cpu(expression, steps=8, dtype=torch.float32):
    rank = dist.get_rank()
    model = net(dtype)
    optimizer = sgd(model.parameters())
    with bk.attach(model, optimizer, made(expression), bucket_bytes=200):
        for step in range(steps):
            x, y = batch(rank, step, dtype)
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    return flat(model)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_cuda_means_what_the_cpu_means(name):
    there = ranks(2, trained, name, "cuda", cuda=True)
    here = ranks(2, on_cpu, name, cuda=True)
    for a, b in zip(there, here, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5 if exact(made(name)) else 2e-3)


@pytest.mark.parametrize(
    "name", ["gradient_allreduce()", "gradient_allreduce(delay=1)", FEEDBACK, "decentralized()", DELAYED]
)
def test_a_stream_of_the_user_changes_nothing(name):
    there = ranks(2, trained, name, "cuda", 8, torch.float32, True, cuda=True)
    here = ranks(2, trained, name, "cuda", cuda=True)
    assert all(torch.equal(a, b) for a, b in zip(there, here, strict=True))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_never_synchronises_the_host(name):
    ranks(2, trained, name, "cuda", 8, torch.float32, False, True, cuda=True)


def sharded_run(expression):
    """Steps under FSDP2, of which those after the third may not wait."""
    model = net().cuda()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("intra",))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    optimizer = sgd(model.parameters())
    data = [tuple(t.cuda() for t in batch(dist.get_rank(), step)) for step in range(8)]
    stage, weights = eval(expression, {"bk": bk})
    with bk.interop.fsdp(model, stage, weights=weights), contextlib.ExitStack() as from_here:
        for step, (x, y) in enumerate(data):
            if step == 3:
                torch.cuda.synchronize()
                from_here.enter_context(never_waiting())
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        from_here.close()
        torch.cuda.synchronize()


SHARDED = {
    "mean": "bk.stages.Mean(), None",
    "error feedback": "bk.stages.ErrorFeedback(bk.stages.CompressedMean(bk.compressors.MinMaxUInt8(block=64))), None",
    "weights": "bk.stages.CompressedMean(bk.compressors.MinMaxUInt8(block=64)), bk.compressors.MinMaxUInt8(block=64)",
}


@pytest.mark.parametrize("name", SHARDED)
def test_a_step_of_a_sharded_model_never_synchronises_the_host(name):
    ranks(2, sharded_run, SHARDED[name], cuda=True)


class SlowBackward(torch.autograd.Function):
    """Nothing; but its backward keeps the stream of its forward busy."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        torch.cuda._sleep(50_000_000)
        return g.clone()


def branched(apart):
    """Train two layers side by side, the later one on a stream of its own if they are `apart`: all in one bucket."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(6, 1), torch.nn.Linear(6, 1)]).cuda()
    optimizer = sgd(model.parameters())
    here = torch.cuda.current_stream()
    side = torch.cuda.Stream() if apart else here
    with bk.attach(model, optimizer, bk.algorithms.gradient_allreduce()):
        for step in range(4):
            x, y = (t.cuda() for t in batch(dist.get_rank(), step))
            optimizer.zero_grad()
            first = model[0](x)
            side.wait_stream(here)
            with torch.cuda.stream(side):
                x.record_stream(side)
                second = SlowBackward.apply(model[1](x))
            here.wait_stream(side)
            second.record_stream(here)
            (first + second - y).square().mean().backward()
            del first, second
            optimizer.step()
            with torch.cuda.stream(side):  # takes the memory of gradients, if it can have it
                junk = [torch.full_like(p, 7.0) for p in model.parameters() for _ in range(8)]
            del junk
        torch.cuda.synchronize()
    return flat(model).cpu()


def test_a_bucket_waits_for_gradients_of_every_stream():
    there, here = (ranks(2, branched, apart, cuda=True) for apart in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(there, here, strict=True))


def free_running_run():
    model = torch.nn.Linear(64, 64, bias=False).cuda()
    torch.nn.init.constant_(model.weight, float(dist.get_rank()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with bk.attach(model, optimizer, bk.algorithms.async_model_average(), broadcast=False) as att:
        for _ in range(150):
            model(torch.ones(1, 64, device="cuda")).sum().backward()
            optimizer.step()
            time.sleep(0.004 * (1 + dist.get_rank()))
        flights = att.report().rows[0].flights
    return float(model.weight.detach().mean()), flights


def test_free_running_over_nccl():
    for mean, flights in ranks(2, free_running_run, cuda=True):
        assert mean == pytest.approx(0.5) and flights > 2


def beside_collectives_run():
    """The launches of averages in steps with a sum over the ranks of their own, as SyncBatchNorm has."""
    model = torch.nn.Linear(64, 64, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with bk.attach(model, optimizer, bk.algorithms.async_model_average()) as att:
        launched, runner = [], att._life.free_runners[0].runner
        launch = runner.launch_all
        runner.launch_all = lambda *arguments, **more: launched.append(att.step) or launch(*arguments, **more)
        for _ in range(150):
            total = model(torch.ones(1, 64, device="cuda")).sum().detach()
            dist.all_reduce(total)
            model(torch.ones(1, 64, device="cuda")).sum().backward()
            optimizer.step()
            total.item()
    return launched


def test_free_running_beside_a_collective_of_the_program_over_nccl():
    first, second = ranks(2, beside_collectives_run, cuda=True)
    shared = min(len(first), len(second))
    assert shared > 2 and first[:shared] == second[:shared]


def overflow_run():
    model = net().cuda()
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    skipped = []
    rule = bk.algorithms.bytegrad(bk.compressors.MinMaxUInt8(block=64), error_feedback=True)
    with bk.attach(model, optimizer, rule, scaler=scaler) as att:
        for step in range(6):
            x, y = (t.cuda() for t in batch(dist.get_rank(), step))
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                value = (model(x) - y).square().mean()
            if step == 2 and dist.get_rank() == 1:
                value = value * float("inf")
            before = att.step
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
            if att.step == before:
                skipped.append(step)
        return skipped, att.consensus_distance()


def test_one_overflow_costs_one_step():
    assert ranks(2, overflow_run, cuda=True) == [([2], 0.0)] * 2

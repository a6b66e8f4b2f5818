"""Algorithms on gradients against `DistributedDataParallel`, each other, and their equations."""

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from torch.distributed.device_mesh import init_device_mesh
from training import flat, loss, net, net_and_sgd, run_steps, sgd, train

import baguakit as bk

SIZES = (2, 3, 4)


def ddp(steps: int, **options) -> torch.Tensor:
    """The weights that torch's own data parallelism arrives at."""
    model = net()
    wrapped = torch.nn.parallel.DistributedDataParallel(model, **options)
    optimizer = sgd(model.parameters())
    loss(wrapped, dist.get_rank(), 0).backward()  # only after one backward has DDP made the buckets that it keeps
    run_steps(wrapped, optimizer, range(steps))
    return flat(model)


@pytest.mark.parametrize("n", SIZES)
def test_gradient_allreduce_is_ddp(n):
    ours = ranks(n, train, lambda bk: [bk.algorithms.gradient_allreduce()], 8)
    theirs = ranks(n, ddp, 8)
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-6)
    assert all(torch.equal(ours[0], other) for other in ours)


@pytest.mark.parametrize("n", SIZES)
def test_gradient_allreduce_is_ddp_bit_for_bit_in_equal_buckets(n):
    # A bucket for each parameter: within a larger one the rounding of a sum depends on where a value stands.
    ours = ranks(n, lambda: train(lambda bk: [bk.algorithms.gradient_allreduce()], 8, bucket_bytes=1))
    theirs = ranks(n, lambda: ddp(8, bucket_cap_mb=1e-6))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("error_feedback", [False, True])
def test_bytegrad_keeps_replicas_equal_and_near_the_mean(n, error_feedback):
    ours = ranks(n, train, lambda bk: [bk.algorithms.bytegrad(error_feedback=error_feedback)], 8)
    exact = ranks(n, train, lambda bk: [bk.algorithms.gradient_allreduce()], 8)
    assert all(torch.equal(ours[0], other) for other in ours)
    assert 0 < (ours[0] - exact[0]).norm() < 0.02 * exact[0].norm()


@pytest.mark.parametrize("n", (2, 4))
def test_error_feedback_loses_nothing_for_ever(n):
    """Σ_t result_t = Σ_t mean(x_t) + mean(e_0) − mean(e_T), so that the mean of what is sent tends to the true mean."""

    def run():
        comm = bk.Comm()
        x = torch.randn(n * 640, generator=torch.Generator().manual_seed(dist.get_rank()))
        stage = bk.stages.ErrorFeedback(bk.stages.CompressedMean(bk.compressors.MinMaxUInt8(block=64)))
        state = stage.init(bk.Bucket([x]), comm)
        total = torch.zeros_like(x, dtype=torch.float64)
        for round in range(50):
            total += stage(x.clone(), state, comm.at(round))
        mean, residual = x.double(), state["residual"].double()
        dist.all_reduce(mean)
        dist.all_reduce(residual)
        once = stage.inner(x.clone(), {}, comm).double()
        return total, 50 * mean / n - residual / n, (total / 50 - mean / n).norm(), (once - mean / n).norm()

    for total, owed, after, once in ranks(n, run):
        torch.testing.assert_close(total, owed, rtol=0, atol=2e-5)
        assert after < once / 20


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
def test_what_is_fed_back_decays(decay):
    """y ← x + β e;  e ← y − top(y), to the last bit, for both widths of values. With β = 1 nothing changes."""

    def run():
        comm, codec = bk.Comm(), bk.compressors.TopK(0.1, chunk=64)
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(1000, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)
            stage = bk.stages.ErrorFeedback(bk.stages.SparseMean(codec), decay=decay)
            plain = bk.stages.ErrorFeedback(stage.inner)
            state, other = stage.init(bk.Bucket([x]), comm), plain.init(bk.Bucket([x]), comm)
            e = torch.zeros(1000)
            for round in range(4):
                y = torch.add(x, e, alpha=decay)
                e = y - codec.decompress(codec.compress(y[None]), 1000)[0]
                found, without = stage(x.clone(), state, comm.at(round)), plain(x.clone(), other, comm.at(round))
                assert torch.equal(state["residual"], e)
                assert torch.equal(found, without) == (decay == 1 or round == 0)

    ranks(2, run)


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_decay_that_grows_is_refused_at_declaration(decay):
    with pytest.raises(ValueError, match=r"decay is a finite number, (0 to 1, )?not"):
        bk.stages.ErrorFeedback(bk.stages.CompressedMean(), decay=decay)


@pytest.mark.parametrize("n", (1, 2, 3))
@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_micro_batches_are_the_hand_loop(n, algorithm):
    """J backward passes under no_sync equal, bit for bit, the sum of J local gradients given once to the stage."""

    def attached():
        model, optimizer = net_and_sgd()
        with bk.attach(model, optimizer, getattr(bk.algorithms, algorithm)()) as att:
            for step in range(4):
                optimizer.zero_grad()
                with att.no_sync():
                    for j in range(2):
                        loss(model, dist.get_rank(), 10 * step + j).backward()
                loss(model, dist.get_rank(), 10 * step + 2).backward()
                optimizer.step()
        return flat(model)

    def by_hand():
        model, comm = net(), bk.Comm()
        optimizer = sgd(model.parameters())
        stage = getattr(bk.algorithms, algorithm)().stage
        bucket = bk.Bucket(reversed(list(model.parameters())), stage.multiple_of(comm))
        for step in range(4):
            optimizer.zero_grad()
            for j in range(3):
                loss(model, dist.get_rank(), 10 * step + j).backward()
            stage(bucket.load("grad"), stage.init(bucket, comm), comm)
            bucket.store("grad")
            optimizer.step()
        return flat(model)

    assert all(torch.equal(a, b) for a, b in zip(ranks(n, attached), ranks(n, by_hand), strict=True))


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_hierarchical_is_flat(algorithm):
    def run(nodes: bool):
        comm = bk.Comm(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))) if nodes else None
        chosen = getattr(bk.algorithms, algorithm)()
        return train(lambda bk: [bk.hierarchical(chosen) if nodes else chosen], comm=comm)

    nodes, flat_ = ranks(4, run, True), ranks(4, run, False)
    assert all(torch.equal(nodes[0], other) for other in nodes)
    atol = 1e-6 if algorithm == "gradient_allreduce" else 0.02 * float(flat_[0].norm())
    torch.testing.assert_close(nodes[0], flat_[0], rtol=0, atol=atol)


@pytest.mark.parametrize(
    "algorithm",
    [
        lambda bk: [bk.algorithms.gradient_allreduce()],
        lambda bk: [bk.algorithms.bytegrad(error_feedback=True)],
        lambda bk: [bk.algorithms.decentralized()],
        lambda bk: [bk.algorithms.decentralized(bk.topology.Ring(), order="atc", every=3)],
        lambda bk: [bk.algorithms.local_sgd(3, start=2)],
        lambda bk: [bk.after_step(bk.stages.Mean(), every=4, delay=2)],
        lambda bk: [bk.free_running(bk.stages.Mean())],
        lambda bk: [bk.algorithms.gradient_tracking(bk.topology.Ring())],
        lambda bk: [bk.algorithms.push_sum(bk.topology.Ring())],
    ],
)
def test_one_rank_is_the_plain_optimizer(algorithm):
    def plain():
        model, optimizer = net_and_sgd()
        run_steps(model, optimizer, range(8), rank=0)
        return flat(model)

    assert torch.equal(ranks(1, train, algorithm)[0], ranks(1, plain)[0])

"""Theorems on 32 and 64 real ranks: gossip, compressed means and local steps; and every algorithm on 64."""

import everything
import pytest
import torch
import torch.distributed as dist
from everything import ALGORITHMS, made
from pool import by_value, strictly
from training import flat, net, net_and_sgd, run_steps, sgd, simulate

import baguakit as bk
from baguakit.topology import BaseK, OnePeerExact, OnePeerExponential, Ring

SIXTY_FOUR = 64
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # 64 processes on two cores


@pytest.fixture(scope="module", params=[32, SIXTY_FOUR])
def group(request):
    """Ranks that live as long as the tests on so many: 64 of them have 4 GiB."""
    with bk.Ranks(request.param, timeout=600) as ranks:
        yield ranks


def on(group, function, *args):
    """Run a function on all ranks of a group."""
    by_value(function, *args)
    return group.run(strictly, function, *args, limit=1500)


def mixed(topology, n, round):
    return torch.from_numpy(topology.matrix(n, round))


def gossip(topology, n, order):
    """Return the equation of one step of decentralized SGD, X ← W X − γ d or X ← W (X − γ d)."""

    def exchange(step, x, move):
        w = mixed(topology, n, step)
        return w @ x - move if order == "awc" else w @ (x - move)

    return exchange


def trained(entries, steps):
    """Train the small network in fp64 with each algorithm on this rank; return its weights after each."""
    found = []
    for entry in entries:
        model = net(torch.float64)
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, made(entry), timeout=500):
            run_steps(model, optimizer, range(steps))
        found.append(flat(model))
    return found


def check_equations(group, equations, steps):
    """Compare the weights of all ranks with the equation of each algorithm, simulated in one process."""
    for (entry, exchange), *found in zip(equations.items(), *on(group, trained, list(equations), steps), strict=True):
        expected = simulate(group.size, exchange, steps)
        torch.testing.assert_close(torch.stack(found), expected, rtol=0, atol=1e-10, msg=lambda m, e=entry: f"{e}: {m}")


def test_gossip_is_its_matrix_equation(group):
    equations = {
        f"decentralized({topology!r}, {order!r})": gossip(topology, group.size, order)
        for topology in (OnePeerExponential(), Ring(), BaseK(1))
        for order in ("awc", "atc")
    }
    check_equations(group, equations, steps=4)


def test_one_peer_reaches_the_exact_mean_after_log2_n_rounds(group):
    def run():
        comm = bk.Comm()
        x = torch.full((5,), float(comm.rank), dtype=torch.float64)
        for round in range((comm.size - 1).bit_length()):
            bk.primitives.neighbor_mean_(x, bk.topology.OnePeerExponential(), comm.at(round))
        return x

    for x in on(group, run):
        torch.testing.assert_close(x, torch.full((5,), (group.size - 1) / 2, dtype=torch.float64), rtol=0, atol=0)


@pytest.mark.parametrize("length", [5, 4097, 40_000])
def test_a_compressed_mean_is_equal_on_all_ranks_and_loses_what_it_says(group, length):
    """Σ_r residual_r = Σ_r x_r − n · result; in fp64, up to the rounding of an fp32 result times n."""

    def run(length):
        comm = bk.Comm()
        x = torch.randn(length, generator=torch.Generator().manual_seed(comm.rank))
        lost = torch.full((length,), float("nan"))
        result = bk.primitives.compressed_mean_(x.clone(), bk.compressors.MinMaxUInt8(), comm, residual=lost)
        total, residuals, first = x.double(), lost.double(), result.clone()
        for each in (total, residuals):
            dist.all_reduce(each)
        dist.broadcast(first, 0)
        return torch.equal(first, result), float((residuals - (total - comm.size * result.double())).abs().max())

    for same, error in on(group, run, length):
        assert same and error < group.size * 2e-6


def test_local_steps_are_their_equation(group):
    def mean_every(every):
        def exchange(step, x, move):
            x = x - move
            return x.mean(0).expand_as(x) if (step + 1) % every == 0 else x

        return exchange

    check_equations(group, {f"local_sgd(every={h})": mean_every(h) for h in (1, 3)}, steps=6)


EQUATIONS = {  # of entries of the one list
    "gradient_allreduce()": lambda step, x, move: x - move.mean(0),
    "decentralized()": gossip(OnePeerExact(), SIXTY_FOUR, "awc"),
    "decentralized(order='atc')": gossip(OnePeerExact(), SIXTY_FOUR, "atc"),
    "local_sgd(every=2)": lambda step, x, move: (x - move).mean(0).expand_as(x) if step % 2 else x - move,
}


@pytest.mark.release
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("group", [SIXTY_FOUR], indirect=True)
def test_every_algorithm_trains_on_64_ranks(group):
    """All weights are finite, and equal where gradients are averaged; the exact ones are their matrix equation."""

    def run(entries):
        found = []
        for entry in entries:
            model, optimizer = net_and_sgd()
            with bk.attach(model, optimizer, made(entry), timeout=900) as att:
                run_steps(model, optimizer, range(4))
                found.append((att.step, flat(model)))
        return found

    assert set(EQUATIONS) <= set(ALGORITHMS)
    by_value(run)
    everyone = group.run(strictly, run, list(ALGORITHMS))
    for entry, *found in zip(ALGORITHMS, *everyone, strict=True):
        assert all(step == 4 and bool(weights.isfinite().all()) for step, weights in found), entry
        if everything.averages_gradients(made(entry)):
            assert all(torch.equal(found[0][1], weights) for _, weights in found), entry
    check_equations(group, EQUATIONS, steps=4)

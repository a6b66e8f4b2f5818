"""Rules on weights over FSDP2: each rank's shards, averaged over the dimension in which they are the same."""

import io

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from sharding import full, grid, line, sharded
from tiers import slow_after, slow_unless
from training import batch, flat, net, sgd

import baguakit as bk

RULES = {
    "local_sgd": lambda bk: bk.algorithms.local_sgd(every=2),
    "diloco": lambda bk: bk.algorithms.diloco(every=3),
    "diloco, delayed": lambda bk: bk.algorithms.diloco(every=3, delay=2),
    "diloco, mixed": lambda bk: bk.algorithms.diloco(every=3, delay=1, mix=0.5),
    "exact_diffusion": lambda bk: bk.algorithms.exact_diffusion(),
    "quasi_global_momentum": lambda bk: bk.algorithms.quasi_global_momentum(),
    "awc": lambda bk: bk.algorithms.decentralized(),
    "atc": lambda bk: bk.algorithms.decentralized(order="atc"),
}
STEPS = 7


def rows(step, place, of):
    """The batch of a node, or one of two parts of it."""
    x, y = batch(place, step, torch.float64, rows=12)
    return x[of], y[of]


def over_nodes(rule, steps=STEPS, begin=0, saved=None):
    """Two nodes of two ranks: shard within, and let the rule act between them."""
    mesh = grid()
    module = sharded(mesh["intra"], net(torch.float64))
    optimizer = sgd(module.parameters())
    node, place = divmod(dist.get_rank(), 2)
    with bk.attach(module, optimizer, rule(bk), comm=bk.Comm(mesh.get_group("inter"))) as att:
        if saved is not None:
            loaded = torch.load(io.BytesIO(saved), weights_only=True)
            for p, held in zip(module.parameters(), loaded["model"], strict=True):
                p.to_local().detach().copy_(held)
            for p, held in zip(module.parameters(), loaded["momentum"], strict=True):
                optimizer.state[p]["momentum_buffer"] = torch.empty_like(p)
                optimizer.state[p]["momentum_buffer"].to_local().copy_(held)
            att.load_state_dict(loaded["att"])
        for step in range(begin, steps):
            optimizer.zero_grad()
            x, y = rows(step, node, slice(6) if place == 0 else slice(6, None))
            (module(x) - y).square().mean().backward()
            optimizer.step()
        model = [p.to_local().detach().clone() for p in module.parameters()]
        momentum = [optimizer.state[p]["momentum_buffer"].to_local() for p in module.parameters()]
        buffer = io.BytesIO()
        torch.save({"model": model, "momentum": momentum, "att": att.state_dict()}, buffer)
        weights, apart = full(module), att.consensus_distance()
        att.merge()
        return weights, full(module), apart, buffer.getvalue()


def over_ranks(rule):
    """Two ranks, each with a node's batch."""
    module = net(torch.float64)
    optimizer = sgd(module.parameters())
    with bk.attach(module, optimizer, rule(bk)) as att:
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = rows(step, dist.get_rank(), slice(None))
            (module(x) - y).square().mean().backward()
            optimizer.step()
        weights, apart = flat(module), att.consensus_distance()
        att.merge()
        return weights, flat(module), apart


@pytest.mark.parametrize("rule", slow_unless(("diloco", "awc"), RULES))
def test_nodes_of_two_ranks_are_as_ranks_of_their_own(rule):
    nodes, alone = ranks(4, over_nodes, RULES[rule]), ranks(2, over_ranks, RULES[rule])
    for rank, (weights, merged, _, _) in enumerate(nodes):
        torch.testing.assert_close(weights, alone[rank // 2][0], rtol=0, atol=1e-9)
        torch.testing.assert_close(merged, alone[0][1], rtol=0, atol=1e-9)
    # Each rank tells how far apart its own shards are.
    apart = (nodes[0][2] ** 2 + nodes[1][2] ** 2) ** 0.5
    assert apart == pytest.approx(alone[0][2], abs=1e-9)


@pytest.mark.parametrize("rule", slow_after(1, ["diloco", "awc"]))
def test_a_resumed_run_is_the_uninterrupted_one(rule):
    def parts():
        saved = over_nodes(RULES[rule], 4)[3]
        return over_nodes(RULES[rule], begin=4, saved=saved)[0]

    whole = ranks(4, over_nodes, RULES[rule])
    assert all(torch.equal(a[0], b) for a, b in zip(whole, ranks(4, parts), strict=True))


def test_an_evaluation_before_attach_leaves_whole_parameters_behind():
    """After a forward FSDP keeps the root's parameters whole; the rule must act on the shards all the same."""

    def run():
        mesh = grid()
        module = sharded(mesh["intra"])
        optimizer = sgd(module.parameters(), lr=0.0)
        with torch.no_grad():
            for p in module.parameters():
                p.to_local().add_(dist.get_rank() // 2)
            module(torch.zeros(1, 6))
        rule = bk.algorithms.local_sgd(every=1)
        with bk.attach(module, optimizer, rule, comm=bk.Comm(mesh.get_group("inter")), broadcast=False):
            (module(torch.ones(1, 6)) ** 2).sum().backward()
            with torch.no_grad():
                module(torch.zeros(1, 6))
            optimizer.step()
        module.reshard()
        return full(module)

    for weights in ranks(4, run):
        torch.testing.assert_close(weights, flat(net()) + 0.5, rtol=0, atol=1e-6)


def test_optimizers_begin_alike_or_say_so():
    def run(all_stepped):
        mesh = grid()
        module = sharded(mesh["intra"])
        optimizer = sgd(module.parameters())
        node = dist.get_rank() // 2
        if all_stepped or node == 0:
            (module(torch.ones(1, 6) * (1 + node)) ** 2).sum().backward()
            optimizer.step()
        comm = bk.Comm(mesh.get_group("inter"))
        if not all_stepped:
            with pytest.raises(Exception, match="optimizer state of a sharded model"):
                bk.attach(module, optimizer, bk.algorithms.local_sgd(), comm=comm, timeout=5)
            return None
        with bk.attach(module, optimizer, bk.algorithms.local_sgd(), comm=comm):
            return torch.cat(
                [optimizer.state[p]["momentum_buffer"].full_tensor().flatten() for p in module.parameters()]
            )

    momenta = ranks(4, run, True)
    assert all(torch.equal(momenta[0], other) for other in momenta)
    ranks(4, run, False)


def test_other_numbers_of_shards_are_refused():
    def run():
        module, other = sharded(line()), net()
        comm = bk.Comm(torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True))
        optimizer, plain = sgd(module.parameters()), sgd(other.parameters())
        with bk.attach(other, plain, RULES["diloco"](bk), comm=comm) as att:
            saved = att.state_dict()
        with (
            bk.attach(module, optimizer, RULES["diloco"](bk), comm=comm) as att,
            pytest.raises(ValueError, match="resumed with as many as there were"),
        ):
            att.load_state_dict(saved)
        return True

    assert all(ranks(2, run))

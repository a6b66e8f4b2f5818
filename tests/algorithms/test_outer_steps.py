"""Methods that are DiLoCo with another stage inside, another optimizer outside, or taking turns: each its equation."""

import everything
import pytest
import torch
import torch.distributed as dist
from pool import ranks
from tiers import slow_after
from training import flat, net, simulate, train

import baguakit as bk
from baguakit import Fragment

N = 4


def weights(rule, steps, momentum=0.9):
    """Return the final weights of each rank, in fp64, under an expression `rule(baguakit)`."""

    def run():
        def sgd(params):
            return torch.optim.SGD(params, lr=0.05, momentum=momentum)

        return train(lambda bk: [rule(bk)], steps, torch.float64, sgd)

    return torch.stack(ranks(N, run))


def close(found, expected, atol=1e-11):
    torch.testing.assert_close(found, expected.expand_as(found), rtol=0, atol=atol)


@pytest.mark.parametrize("values", ["None", "UInt2()"])
def test_sparse_loco(values):
    """u_r ← β e_r + (a − x_r);  s_r ← Q(top(u_r));  e_r ← u_r − s_r;  a ← a − η mean of s;  x_r ← a, to the last bit.

    A second copy of the weights follows these equations, by compress, decompress and a gather. Five chunks of 64, the
    last of 44 values: two of each whole one are kept, and one of that.
    """
    every, beta, eta, lr = 2, 0.9, 0.8, 0.1

    def run():
        codec = bk.compressors.TopK(2 / 64, chunk=64, values=everything.made(values))
        inner = bk.stages.ErrorFeedback(bk.stages.SparseMean(codec), decay=beta)
        goal = torch.randn(300, generator=torch.Generator().manual_seed(dist.get_rank()))
        scale, model = torch.linspace(0.1, 3, 300), torch.nn.ParameterList([torch.zeros(300)])
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        a, x, e = torch.zeros(300), torch.zeros(300), torch.zeros(300)
        with bk.attach(model, optimizer, bk.algorithms.diloco(every, inner=inner, lr=eta)):
            for step in range(8):
                optimizer.zero_grad()
                (0.5 * scale * (model[0] - goal).square()).sum().backward()
                optimizer.step()
                x = torch.add(x, scale * (x - goal), alpha=-lr)
                if step % every == every - 1:
                    u = torch.add(a - x, e, alpha=beta)
                    packed = codec.compress(u[None])
                    rows = [torch.empty_like(packed) for _ in range(2)]
                    dist.all_gather(rows, packed)
                    s = codec.decompress(torch.cat(rows), 300)
                    e = u - s[dist.get_rank()]
                    a = torch.add(a, s[0] / 2 + s[1] / 2, alpha=-eta)
                    x = a
                assert torch.equal(model[0].detach(), x), step
        return a, e

    (first, lost), (second, _) = ranks(2, run)
    assert torch.equal(first, second) and first.any() and lost.any()


def test_noloco():
    """δ_i ← α δ_i + β ⟨x − φ⟩ + γ (⟨φ⟩ − φ_i), means over the pair of i, and φ_i ← φ_i + δ_i, x_i ← φ_i; β = γ."""
    from baguakit.topology import RandomMatching

    alpha, beta = 0.5, 0.7
    phi, delta = flat(net(torch.float64)).expand(N, -1), 0

    def exchange(step, x, move):
        nonlocal phi, delta
        x = x - move
        if (step + 1) % 3:
            return x
        w = torch.from_numpy(RandomMatching(3).matrix(N, (step + 1) // 3 - 1))
        delta = alpha * delta + beta * (w @ (x - phi)) + beta * (w @ phi - phi)
        phi = phi + delta
        return phi

    def rule(bk):
        inner = bk.stages.NeighborMean(bk.topology.RandomMatching(3))
        return bk.algorithms.diloco(every=3, inner=inner, lr=beta, momentum=alpha)

    found = weights(rule, 12)
    close(found, simulate(N, exchange, 12), atol=1e-14)
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("order", ["awc", "atc"])
def test_gossip_with_a_periodic_exact_mean(order):
    """Gossip-PGA: 11ᵀ/n after every third step. Beside AWC it is a rule of its own, in ATC a matrix of the period."""
    from baguakit.topology import Ring

    w = torch.from_numpy(Ring().matrix(N, 0))

    def exchange(step, x, move):
        x = w @ x - move if order == "awc" else w @ (x - move)
        return x.mean(0).expand_as(x) if (step + 1) % 3 == 0 else x

    def rule(bk):
        if order == "awc":
            return bk.algorithms.decentralized(bk.topology.Ring()), bk.after_step(bk.stages.Mean(), every=3)
        mean = torch.full((N, N), 1 / N)
        return bk.algorithms.decentralized(bk.topology.FromMatrix([w, w, mean]), "atc")

    close(weights(rule, 8), simulate(N, exchange, 8))


def parts_of(model, of):
    """The positions of each fragment's values among all weights."""
    named = dict(model.named_parameters())
    owner = torch.empty(sum(p.numel() for p in named.values()), dtype=torch.long)
    for k in range(of):
        chosen, at = Fragment(k, of).choose(named), 0
        for name, p in named.items():
            if name in chosen:
                owner[at : at + p.numel()] = k
            at += p.numel()
    return owner


@pytest.mark.parametrize("delay, mix", slow_after(2, [(1, None), (1, 0.5), (0, None), (0, 0.25), (1, 0.0)]))
def test_fragments_take_turns(delay, mix):
    """Fragment k has its outer step k H / P steps after fragment 0; with a delay it lands so many steps later.

    A landing is x ← x + result − x at launch, or with `mix` x ← α x + (1 − α) result: Streaming DiLoCo.
    """
    every, of, lr = 6, 3, 0.7
    owner = parts_of(net(torch.float64), of)
    anchor = flat(net(torch.float64))
    air = {}

    def landed(x, mask, result, before):
        return torch.where(mask, x + result - before if mix is None else mix * x + (1 - mix) * result, x)

    def exchange(step, x, move):
        x = x - move
        if step in air:
            x = landed(x, *air.pop(step))
        for k in range(of):
            if (step + 1) % every == k * every // of:
                mask = owner == k
                new = anchor - lr * (anchor - x.mean(0))
                anchor[mask] = new[mask]
                air[step + delay] = mask, anchor.clone(), x.clone()
                if not delay:
                    x = landed(x, *air.pop(step))
        return x

    def rule(bk):
        return bk.algorithms.diloco(every=every, fragments=of, delay=delay, mix=mix, lr=lr)

    close(weights(rule, 15), simulate(N, exchange, 15))


def test_fragments_are_all_there_is_and_of_like_size():
    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(50, 20)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(20, 20) for _ in range(9))

    model = Layers()
    named = dict(model.named_parameters())
    for of in (1, 2, 3, 5, 12):
        parts = [Fragment(k, of).choose(named) for k in range(of)]
        assert sorted(name for part in parts for name in part) == sorted(named)
        sizes = [sum(named[name].numel() for name in part) for part in parts]
        if of <= 5:
            assert max(sizes) - min(sizes) <= 1000
    assert Fragment(2, 3).choose(named) == {f"layers.{i}.{kind}" for i in (1, 3, 5, 8) for kind in ("weight", "bias")}
    assert all(("layers.4.weight" in part) == ("layers.4.bias" in part) for part in parts)


def test_fragments_print_and_refuse():
    first, second = bk.algorithms.diloco(every=10, fragments=2, lr=1.0).rules
    assert repr(first) == "after_step(OuterStep(torch.optim.SGD, lr=1.0), every=10, where=Fragment(k=0, of=2))"
    assert (
        repr(second) == "after_step(OuterStep(torch.optim.SGD, lr=1.0), every=10, offset=5, where=Fragment(k=1, of=2))"
    )
    with pytest.raises(ValueError, match="cannot take turns within every=3"):
        bk.algorithms.diloco(every=3, fragments=4)
    with pytest.raises(ValueError, match="k is one of the parts, 0 to 1 for of=2, not 2"):
        bk.Fragment(2, 2)
    with pytest.raises(ValueError, match="offset=5 must be less than every=5"):
        bk.after_step(bk.stages.Mean(), every=5, offset=5)

    def run():
        assert dist.is_initialized()
        model = torch.nn.Linear(2, 2)
        with pytest.raises(ValueError, match="selects none"):
            bk.attach(model, torch.optim.SGD(model.parameters(), 0.1), bk.algorithms.diloco(4, fragments=2))

    ranks(1, run)


@pytest.mark.parametrize("start", [1, 4])
def test_an_anchor_is_made_when_its_rule_sets_out(start):
    anchor = None

    def exchange(step, x, move):
        nonlocal anchor
        if step == start:
            anchor = x[0].clone()
        x = x - (move.mean(0) if step < start else move)
        if step >= start and (step - start + 1) % 2 == 0:
            anchor = anchor - 0.5 * (anchor - x.mean(0))
            x = anchor.expand_as(x)
        return x

    def rule(bk):
        outer = bk.algorithms.diloco(every=2, lr=0.5).stage
        return [bk.during_backward(bk.stages.Mean(), stop=start), bk.after_step(outer, every=2, start=start)]

    close(weights(rule, start + 5, momentum=0), simulate(N, exchange, start + 5, momentum=0), atol=1e-10)

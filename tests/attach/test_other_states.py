"""Optimizers with states of other kinds: in parts, made of several tensors, or copies of the weights."""

import warnings

import pytest
import torch
import torch.distributed as dist
from everything import made
from pool import ranks
from saying import said
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from training import close, flat, loss, mean_loop, net, run_steps, sgd

import baguakit as bk

EXACT = "gradient_allreduce()"


def test_an_optimizer_of_which_each_rank_has_a_part():
    """It trains as the same optimizer does whole; rules on weights, which it would undo, are refused."""

    def zero(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's import of it uses torch.jit
            from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)

    def adam(model):
        return torch.optim.Adam(model.parameters(), lr=0.01)

    def run(algorithm):
        model = net()
        optimizer = zero(model)
        with bk.attach(model, optimizer, made(algorithm)):
            run_steps(model, optimizer, range(4))
        return flat(model)

    expected = flat(mean_loop(2, lambda m, rank, step: loss(m, rank, step).backward(), optimizer=adam))
    for weights in ranks(2, run, EXACT):
        close(weights, expected)
    for sentence in ranks(2, said, run, "local_sgd()"):
        assert sentence.startswith("ValueError: ZeroRedundancyOptimizer steps each parameter on one rank and sends it")


def test_a_state_made_of_several_tensors_is_taken_from_rank_0():
    """As the states of optimizers in 8 bits are."""

    def run():
        model = nn.Linear(3, 2, bias=False)
        optimizer = sgd(model.parameters())
        a = torch.full((2, 3), float(dist.get_rank()))
        optimizer.state[model.weight]["pair"] = TwoTensor(a, a + 5)
        with bk.attach(model, optimizer, made(EXACT)):
            pair = optimizer.state[model.weight]["pair"]
        return type(pair).__name__, pair.a.tolist(), pair.b.tolist()

    for kind, a, b in ranks(2, run):
        assert kind == "TwoTensor" and a == [[0.0] * 3] * 2 and b == [[5.0] * 3] * 2


def test_lbfgs_is_refused_with_the_way_in_which_it_trains():
    def run(attached):
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        with bk.attach(model, optimizer if attached else None, made(EXACT)):

            def closure():
                optimizer.zero_grad()
                value = loss(model, dist.get_rank(), 0)
                value.backward()
                return value

            optimizer.step(closure)
        return flat(model)

    for sentence in ranks(2, said, run, True):
        assert "with rules on gradients give None for the optimizer, which trains as DDP does" in sentence
    a, b = ranks(2, run, False)
    assert torch.equal(a, b)


class Slow(torch.optim.SGD):
    """Lookahead, which keeps slow weights."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("slow", p.detach().clone())
        return torch.optim.SGD.step.__wrapped__(self, closure)


@pytest.mark.parametrize("algorithm, warned", [("local_sgd()", 1), (EXACT, 0)])
def test_copies_of_the_weights_in_an_optimizer_are_said_once(algorithm, warned):
    def run():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = net()
            optimizer = Slow(model.parameters(), lr=0.01)
            with bk.attach(model, optimizer, made(algorithm)):
                run_steps(model, optimizer, range(3))
        return [str(each.message) for each in caught]

    for texts in ranks(2, run):
        assert len(texts) == warned
        assert all(text.startswith("Slow keeps a copy of the weights in its state, 'slow', which") for text in texts)

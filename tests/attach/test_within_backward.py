"""Steps within a backward, and second backward passes through the gradients of a first."""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from everything import made
from pool import ranks
from saying import said
from training import flat, loss, net, net_and_sgd, sgd

import baguakit as bk

EXACT = "gradient_allreduce()"

# Steps within a backward


def test_a_step_within_backward_is_refused():
    def run():
        model = net()
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
        with bk.attach(model, optimizers, bk.algorithms.gradient_allreduce()):
            for p, optimizer in zip(model.parameters(), optimizers, strict=True):
                p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
            loss(model, 0, 0).backward()

    for sentence in ranks(2, said, run):
        assert "SGD steps within a backward, before the gradients of all ranks have landed" in sentence


def by_optimizers(p):
    optimizer = torch.optim.SGD([p], lr=0.1)
    return lambda _: optimizer.step()


def by_data(p):
    p.data.sub_(0.1 * p.grad)
    p.grad = None


@torch.no_grad()
def by_values(p):
    p.sub_(0.1 * p.grad)


WAYS = {
    "by optimizers": (by_optimizers, "SGD steps"),
    "by data": (lambda p: by_data, "4.bias has lost its gradient"),
    "by values": (lambda p: by_values, "0.weight has changed"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("late", [False, True])
def test_a_step_in_backward_is_refused_without_an_optimizer(way, late):
    """Before a second one; and before the first, if an optimizer makes it."""

    def run():
        model, (hook, words) = net(), WAYS[way]
        hooks = [(p, hook(p)) for p in model.parameters()]
        for p, each in () if late else hooks:
            p.register_post_accumulate_grad_hook(each)
        before = flat(model)

        def train():
            with bk.attach(model, None, made(EXACT)):
                for p, each in hooks if late else ():
                    p.register_post_accumulate_grad_hook(each)
                loss(model, 0, 0).backward()

        sentence = said(train)
        words = "0.weight has changed" if late and way == "by data" else words
        assert sentence.startswith("RuntimeError: ") and f"{words} within a backward, before the" in sentence
        assert torch.equal(flat(model), before) == (way == "by optimizers")

    ranks(2, run)


# Gradients with a graph


def penalised(model, rank, step):
    """Add a penalty on the gradient: a second backward, through the first."""
    loss(model, rank, step).backward(create_graph=True)
    sum(p.grad.square().sum() for p in model.parameters()).backward()


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_second_backward_through_gradients_is_that_of_all_batches(to_none):
    """The penalty is on the mean gradient, as in one process with the batches of all ranks."""

    def run(alone):
        model = net(torch.float64)
        optimizer = sgd(model.parameters(), 0.01)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward|gradients of backward")
            with contextlib.nullcontext() if alone else bk.attach(model, optimizer, made(EXACT), bucket_bytes=200):
                for step in range(4):
                    optimizer.zero_grad(set_to_none=to_none)
                    if alone:
                        sum(loss(model, rank, step) for rank in range(2)).div(2).backward(create_graph=True)
                        sum(p.grad.square().sum() for p in model.parameters()).backward()
                    else:
                        penalised(model, dist.get_rank(), step)
                    optimizer.step()
        return flat(model)

    wanted = run(alone=True)
    for each in ranks(2, run, False):
        torch.testing.assert_close(each, wanted, rtol=0, atol=1e-12)


def test_of_gradients_with_a_graph_it_is_said_what_is_averaged():
    def run(algorithm):
        model, optimizer = net_and_sgd()
        with bk.attach(model, optimizer, algorithm):
            loss(model, 0, 0).backward(create_graph=True)

    def heard():
        with pytest.warns(UserWarning, match="land as the mean, with the graph of this rank"):
            run(made(EXACT))
        return said(run, bk.during_backward(bk.stages.Mean(), delay=1))

    for sentence in ranks(2, heard):
        assert "lands those of an earlier backward, without one; leave create_graph out" in sentence

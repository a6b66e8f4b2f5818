"""Steps as the attachment sees them: with gradients that have landed, or with others, or to make optimizer state."""

import copy

import pytest
import torch
import torch.distributed as dist
from everything import ALGORITHMS, averages_gradients, made, others_slow, runs_free, usual
from pool import ranks
from saying import said
from torch import nn
from training import close, flat, loss, mean_loop, net, run_steps, sgd

import baguakit as bk

EXACT = "gradient_allreduce()"


def by_hand(model, rank, step):
    """Put gradients in place that no backward has brought."""
    params = list(model.parameters())
    for p, g in zip(params, torch.autograd.grad(loss(model, rank, step), params), strict=True):
        p.grad = g


def by_func(model, rank, step):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    grads = torch.func.grad(lambda w: torch.func.functional_call(model, w, (x,)).square().mean())(weights)
    for name, p in model.named_parameters():
        p.grad = grads[name]


def into_the_old(model, rank, step):
    """Write gradients into the tensors that the last step has used."""
    if step == 0:
        return loss(model, rank, step).backward()
    params = list(model.parameters())
    for p, g in zip(params, torch.autograd.grad(loss(model, rank, step), params), strict=True):
        p.grad.copy_(g)


# Gradients that have not landed


@pytest.mark.parametrize("make", [by_hand, by_func, into_the_old])
def test_gradients_that_did_not_land_are_refused(make):
    def run():
        model = net()
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, made(EXACT)):
            for step in range(3):
                if make is not into_the_old:
                    optimizer.zero_grad()
                make(model, dist.get_rank(), step)
                optimizer.step()

    for sentence in ranks(2, said, run):
        assert sentence.startswith("RuntimeError: SGD steps with a gradient of 0.weight that during_backward(Mean())")
        assert "att.average_()" in sentence


@pytest.mark.parametrize("when", ["under no_sync", "under no_sync after a landing", "before attach", "in a closure"])
def test_gradients_of_a_backward_that_was_not_averaged_are_refused(when):
    def run():
        model = net()
        optimizer = sgd(model.parameters())
        if when == "before attach":
            loss(model, dist.get_rank(), 0).backward()
        with bk.attach(model, optimizer, made(EXACT)) as att:
            if when == "under no_sync after a landing":
                loss(model, dist.get_rank(), 0).backward()
            if when.startswith("under"):
                with att.no_sync():
                    loss(model, dist.get_rank(), 1).backward()
            optimizer.step(*[lambda: by_hand(model, dist.get_rank(), 0)] * (when == "in a closure"))

    for sentence in ranks(2, said, run):
        assert sentence.startswith("RuntimeError: SGD steps with a gradient of 0.weight that during_backward(Mean())")


@pytest.mark.parametrize("algorithm", others_slow(each for each in ALGORITHMS if averages_gradients(made(each))))
def test_gradients_made_by_hand_are_averaged_as_those_of_a_backward(algorithm):
    """To the last bit."""

    def run():
        found = []
        for way in ("backward", "by hand"):
            model = net()
            optimizer = sgd(model.parameters())
            with bk.attach(model, optimizer, made(algorithm), bucket_bytes=100) as att:
                for step in range(4):
                    optimizer.zero_grad()
                    if way == "backward":
                        loss(model, dist.get_rank(), step).backward()
                    else:
                        by_hand(model, dist.get_rank(), step)
                        att.average_()
                    optimizer.step()
            found.append(flat(model))
        return found

    for backward, hand in ranks(2, run):
        assert torch.equal(backward, hand)


def by_clone(model, optimizer):
    for p in model.parameters():
        p.grad = p.grad.clone()


def by_clipping(model, optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for p in model.parameters():
        p.grad.data.mul_(0.5)


def by_two_steps(model, optimizer):
    optimizer.step()


@pytest.mark.parametrize("change", [by_clone, by_clipping, by_two_steps])
@pytest.mark.parametrize("to_none", [True, False])
def test_what_is_done_to_gradients_that_landed_is_the_users(change, to_none):
    def run():
        model = net()
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, made(EXACT)):
            for step in range(3):
                optimizer.zero_grad(set_to_none=to_none)
                loss(model, dist.get_rank(), step).backward()
                change(model, optimizer)
                optimizer.step()
        return flat(model)

    expected = flat(mean_loop(2, lambda m, rank, step: loss(m, rank, step).backward(), steps=3, prepare=change))
    for each in ranks(2, run):
        close(each, expected)


def test_gradients_that_nobody_zeroes_may_be_used_again():
    """One network is trained with gradients that stay from the first step, as nobody brings new ones."""

    def backward(model, rank, step):
        model[0].zero_grad()
        x = torch.full((2, 6), float(rank + step + 1))
        (model[0](x).square().mean() + (model[1](x).square().mean() if step == 0 else 0)).backward()

    def two():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 2), nn.Linear(6, 2))

    def run():
        model = two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with bk.attach(model, optimizer, made(EXACT)):
            for step in range(3):
                backward(model, dist.get_rank(), step)
                nn.utils.clip_grad_norm_(model[0].parameters(), 0.5)
                optimizer.step()
        return flat(model)

    a, b = ranks(2, run)
    assert torch.equal(a, b)


# Steps that train nothing


@pytest.mark.parametrize("algorithm", others_slow(each for each in ALGORITHMS if not runs_free(made(each))))
def test_a_resume_by_torch_distributed_checkpoint_is_exact(algorithm):
    """It makes optimizer state by a step with zero gradients: that counts for nothing, while saving and loading."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def run():
        model = net()
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, made(algorithm)) as att:
            get_optimizer_state_dict(model, optimizer)
            assert att.step == 0
            run_steps(model, optimizer, range(5))
            saved = copy.deepcopy((model.state_dict(), get_optimizer_state_dict(model, optimizer), att.state_dict()))
            run_steps(model, optimizer, range(5, 8))
        expected, model = flat(model), net()
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, made(algorithm)) as att:
            model.load_state_dict(saved[0])
            set_optimizer_state_dict(model, optimizer, saved[1])
            att.load_state_dict(saved[2])
            run_steps(model, optimizer, range(5, 8))
        return expected, flat(model)

    for expected, found in ranks(2, run):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("algorithm", [usual()["local_sgd"], EXACT])
def test_a_checkpoint_of_an_optimizer_without_state_counts_for_nothing(algorithm):
    """At any step, also on one rank only."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    def run():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with bk.attach(model, optimizer, made(algorithm)) as att:
            for step in range(3):
                run_steps(model, optimizer, [step])
                optimizer.zero_grad()
                if dist.get_rank() == 0:
                    get_optimizer_state_dict(model, optimizer)
                assert att.step == step + 1

    ranks(2, run)


@pytest.mark.parametrize("algorithm", [usual()["local_sgd"], EXACT])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_of_a_warm_up_counts_where_the_gradients_of_one_rank_are_zero(algorithm, momentum):
    def run():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=momentum)
        with bk.attach(model, optimizer, made(algorithm)) as att:
            for step in range(2):
                optimizer.zero_grad()
                loss(model, 0, step).mul(dist.get_rank()).backward()
                optimizer.step()
            return att.step

    assert ranks(2, run) == [2, 2]


# Steps that move the weights and go back, and compiled ones


def moves_weights(algorithm):
    return not averages_gradients(made(algorithm)) and not runs_free(made(algorithm))


class Sharp(torch.optim.Optimizer):
    """SAM: it moves the weights, evaluates the closure there, and steps from its copy of the weights."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure):
        params = [p for group in self.param_groups for p in group["params"]]
        kept = [p.clone() for p in params]
        for p in params:
            p.add_(1.0)
        with torch.enable_grad():
            closure()
        torch._foreach_copy_(params, kept)
        for p in params:
            p.sub_(self.param_groups[0]["lr"] * p.grad)


@pytest.mark.parametrize("algorithm", others_slow(each for each in ALGORITHMS if moves_weights(each)))
def test_an_optimizer_that_moves_and_goes_back_loses_no_exchange(algorithm):
    """Its steps are those of SGD with the gradients at the other weights."""

    def run():
        found = []
        for kind in (Sharp, torch.optim.SGD):
            model = net()
            with torch.no_grad():
                model[0].bias.add_(dist.get_rank())
            optimizer = kind(model.parameters(), lr=0.01)
            with bk.attach(model, optimizer, made(algorithm), broadcast=False):
                for step in range(5):

                    def closure(model=model, optimizer=optimizer, step=step):
                        optimizer.zero_grad()
                        sum(p.sum() for p in model.parameters()).mul(1.0 + step).backward()  # the same anywhere

                    optimizer.step(closure)
            found.append(flat(model))
        return found

    for sharp, plain in ranks(2, run):
        close(sharp, plain)

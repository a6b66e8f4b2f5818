"""Hooks of the user's that change gradients: they count whenever they were registered, as with DDP."""

import pytest
import torch
import torch.distributed as dist
from everything import ALGORITHMS, made, others_slow, runs_free, windows
from pool import ranks
from torch.nn.parallel import DistributedDataParallel
from training import flat, loss, net_and_sgd

import baguakit as bk

ON_GRADIENTS = [each for each in ALGORITHMS if "during_backward" in windows(made(each)) and not runs_free(made(each))]


def quarter(p):
    p.grad.mul_(0.25)


def other_grad(p):
    p.grad = p.grad + 0.5 * p.detach()


def hook(model, steps=(), step=0):
    """Register both hooks on all parameters, if it is one of the steps."""
    if step in steps:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(quarter)
            p.register_post_accumulate_grad_hook(other_grad)


def trained(algorithm, before=(), between=(), within=()):
    """Return the weights after training with hooks registered before attach, or before or within a backward."""
    model, optimizer = net_and_sgd()
    hook(model, before)
    with bk.attach(model, optimizer, made(algorithm), bucket_bytes=100):
        for step in range(4):
            hook(model, between, step)
            optimizer.zero_grad()
            value = loss(model, dist.get_rank(), step)
            value.register_hook(lambda _, step=step: hook(model, within, step))
            value.backward()
            optimizer.step()
    return flat(model)


@pytest.mark.parametrize("algorithm", others_slow(ON_GRADIENTS))
def test_a_hook_counts_whenever_it_was_registered(algorithm):
    def run():
        early = trained(algorithm, before=[0])
        return [torch.equal(early, trained(algorithm, **late)) for late in ({"between": [0]}, {"within": [0]})]

    assert ranks(2, run) == [[True] * 2] * 2


def test_hooks_that_come_and_come_again_count_as_with_ddp():
    def run():
        model, optimizer = net_and_sgd()
        wrapped = DistributedDataParallel(model)
        for step in range(4):
            hook(model, [1, 3], step)
            optimizer.zero_grad()
            loss(wrapped, dist.get_rank(), step).backward()
            optimizer.step()
        found = [trained("gradient_allreduce()", **{when: [1, 3]}) for when in ("between", "within")]
        return [torch.equal(flat(model), each) for each in found]

    assert ranks(2, run) == [[True] * 2] * 2


def test_only_the_backward_after_a_registration_launches_late():
    """From the next one on the hook of the attachment is behind all others, and buckets fly while backward runs."""

    def run():
        model, optimizer = net_and_sgd()
        early = []
        with bk.attach(model, optimizer, bk.algorithms.gradient_allreduce(), bucket_bytes=100) as att:
            for step in range(3):
                hook(model, [1], step)
                optimizer.zero_grad()
                value, before = loss(model, dist.get_rank(), step), att.report().rows[0].flights
                handle = next(model.parameters()).register_hook(
                    lambda _, before=before: early.append(att.report().rows[0].flights - before)
                )
                value.backward()
                handle.remove()
                optimizer.step()
        return early

    assert ranks(2, run) == [[1, 0, 1]] * 2

"""A model in DistributedDataParallel: the wrapper stands aside while an attachment over the same ranks communicates."""

import contextlib
import copy
from itertools import product

import pytest
import torch
import torch.distributed as dist
from everything import made
from pool import ranks
from tiers import slow_after
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import flat, loss, net, net_and_sgd, run_steps, sgd

import baguakit as bk

ALGORITHMS = ["gradient_allreduce()", "bytegrad(error_feedback=True)", "local_sgd(2)", "decentralized()"]
OPTIONS = [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}]


def with_no_sync(wrapped, last):
    return contextlib.nullcontext() if last else wrapped.no_sync()


def with_flag(wrapped, last):
    wrapped.require_backward_grad_sync = last
    return contextlib.nullcontext()


def trained(algorithm, wrap, accumulate=with_no_sync, steps=3):
    """The weights of this rank after some steps of two micro-batches."""
    model, optimizer = net_and_sgd()
    wrapped = wrap(model)
    with bk.attach(wrapped, optimizer, made(algorithm)) as att:
        for step in range(steps):
            optimizer.zero_grad()
            for part in range(2):
                with accumulate(wrapped if wrap is not same else att, last=part == 1):
                    loss(wrapped, dist.get_rank(), 2 * step + part).backward()
            optimizer.step()
        return flat(model), att.step, [row.flights for row in att.report().rows]


def same(model):
    return model


@pytest.mark.parametrize(
    "algorithm, options", slow_after(2, [*zip(ALGORITHMS, OPTIONS, strict=True), *product(ALGORITHMS, OPTIONS[1:])])
)
def test_an_attachment_trains_as_without_the_wrapper(algorithm, options):
    def run():
        def wrap(model):
            return DistributedDataParallel(model, **options)

        plain = trained(algorithm, same)
        found = [trained(algorithm, wrap, how) for how in (with_no_sync, with_flag)]
        return [torch.equal(each[0], plain[0]) and each[1:] == plain[1:] for each in found]

    assert ranks(2, run) == [[True, True]] * 2


def test_the_wrapper_averages_again_after_the_last_attachment():
    def gradients(wrapped, optimizer):
        run_steps(wrapped, optimizer, [0])
        mine = torch.cat([p.grad.flatten() for p in wrapped.parameters()])
        both = bk.Comm().gather_objects(mine)
        return torch.equal(both[0], both[1])

    def run():
        model, optimizer = net_and_sgd()
        wrapped = DistributedDataParallel(model)
        found = [gradients(wrapped, optimizer)]
        one = bk.attach(wrapped, optimizer, bk.algorithms.local_sgd(1000))
        found.append(gradients(wrapped, optimizer))
        two = bk.attach(wrapped, optimizer, bk.algorithms.gradient_allreduce())
        found.append(gradients(wrapped, optimizer))
        two.detach()
        found.append(gradients(wrapped, optimizer))
        one.detach()
        return [*found, gradients(wrapped, optimizer)], type(wrapped) is DistributedDataParallel

    assert ranks(2, run) == [([True, False, True, False, True], True)] * 2


def test_buffers_stay_those_of_the_rank():
    def run():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        wrapped = DistributedDataParallel(model)
        with bk.attach(wrapped, sgd(model.parameters()), bk.algorithms.gradient_allreduce()):
            for step in range(2):
                wrapped(torch.randn(5, 3, generator=torch.Generator().manual_seed(2 * step + dist.get_rank())))
            means = bk.Comm().gather_objects(model[1].running_mean)
        return torch.equal(*means)

    assert ranks(2, run) == [False, False]


def test_a_copy_is_made_as_ever():
    """As torch.optim.swa_utils.AveragedModel makes one."""

    def run():
        model, optimizer = net_and_sgd()
        wrapped = DistributedDataParallel(model)
        with bk.attach(wrapped, optimizer, bk.algorithms.gradient_allreduce()):
            average = torch.optim.swa_utils.AveragedModel(wrapped)
            run_steps(wrapped, optimizer, range(2))
            average.update_parameters(wrapped)
            return torch.equal(flat(average.module), flat(copy.deepcopy(model)))

    assert ranks(2, run) == [True, True]


def test_what_cannot_stand_aside_is_refused():
    def run():
        said = []
        rank, model = dist.get_rank(), DistributedDataParallel(net())
        alone = [dist.new_group([each]) for each in range(2)][rank]
        hooked = DistributedDataParallel(net())
        bk.interop.ddp(hooked, bk.stages.Mean()).detach()
        for each in (DistributedDataParallel(net(), process_group=alone), hooked):
            with pytest.raises(TypeError) as error:
                bk.attach(each, sgd(each.parameters()), bk.algorithms.bytegrad())
            said.append(str(error.value))
        refused = pytest.raises(ValueError, match=r"use att\.join\(\) for uneven inputs")
        with bk.attach(model, sgd(model.parameters()), bk.algorithms.bytegrad()), refused:
            model.join()
        return said

    sentence = (
        "DistributedDataParallel averages the gradients that during_backward(CompressedMean(MinMaxUInt8())) acts on, "
        "by a communication hook or over other ranks; wrap the model anew, or give "
        "comm=bk.Comm(ddp_model.process_group)"
    )
    assert ranks(2, run) == [[sentence] * 2] * 2


def test_rules_between_nodes_leave_the_wrapper_of_a_node():
    """DDP averages over pairs of ranks, and a rule on weights over the others."""

    def run():
        rank, model = dist.get_rank(), net()
        node = [dist.new_group(each) for each in ([0, 1], [2, 3])][rank // 2]
        across = [dist.new_group(each) for each in ([0, 2], [1, 3])][rank % 2]
        wrapped, optimizer = DistributedDataParallel(model, process_group=node), sgd(model.parameters())
        found = []
        with bk.attach(wrapped, optimizer, bk.algorithms.local_sgd(2), comm=bk.Comm(across)):
            for step in range(2):
                run_steps(wrapped, optimizer, [step])
                every = bk.Comm().gather_objects(flat(model))
                found.append([torch.equal(every[0], each) for each in every])
        return found

    assert ranks(4, run) == [[[True, True, False, False], [True] * 4]] * 4

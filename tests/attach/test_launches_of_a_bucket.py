"""The kernels and collectives of one bucket of one backward, counted on a GPU that holds no values."""

from collections import Counter

import pytest
import torch
from blind import Inline, Silent
from everything import made
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import baguakit as bk
from baguakit.comm import FLAT
from baguakit.flights.gradients import GradientRunner
from baguakit.flights.life import Decisions
from baguakit.keeping import Joint
from baguakit.rules import rules_of
from baguakit.runtime.runtime import Channel
from baguakit.testing.blind import Blind, Nowhere, Two

NO_KERNEL = {  # views, and memory without values
    "view", "detach", "as_strided", "slice", "select", "unbind", "split", "split_with_sizes", "alias", "empty",
    "empty_like", "new_empty", "_unsafe_view", "expand", "t", "transpose", "permute", "reshape", "unsqueeze", "squeeze",
    "promote_types",
}  # fmt: skip
COLLECTIVES = [
    *("allreduce", "_reduce_scatter_base", "reduce_scatter_single", "_allgather_base", "all_gather_single"),
    *("allgather_into_tensor_coalesced", "alltoall_base", "all_to_all_single"),
]
TOGETHER = {  # where the flights of several buckets decide together: the decision, which comes once, included
    "bytegrad(error_feedback=True)": (6, 2),
    "power_sgd()": (16, 3),
    "top_k()": (6, 1),
}
MOST = {  # kernels and collectives
    "gradient_allreduce()": (2, 2),
    "bytegrad()": (4, 2),
    "hierarchical(gradient_allreduce())": (4, 4),
    "hierarchical(bytegrad())": (6, 4),
    "bytegrad(error_feedback=True)": (6, 2),
    "hierarchical(bytegrad(error_feedback=True))": (8, 4),
    "power_sgd()": (18, 3),
    "top_k()": (6, 1),
}


class Kernels(TorchDispatchMode):
    """Counts the operations that launch a kernel."""

    def __init__(self):
        super().__init__()
        self.counted = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in NO_KERNEL and not (name == "copy_" and args[0] is args[1]):  # to itself, which torch leaves
            self.counted[name] += 1
        return func(*args, **(kwargs or {}))


SENT = Counter()  # by collective


class Counting(Nowhere):
    """A group that counts what it sends."""

    def __getattr__(self, name):
        if name in COLLECTIVES:
            SENT[name] += 1
        return super().__getattr__(name)


class Counted(Two):
    """Two ranks, whose collectives are counted, within nodes and between them."""

    ranks = 2

    def __post_init__(self):
        super().__post_init__()
        group = Counting()
        vars(self).update(group=group, _parts=(group, group), size=self.ranks if self._part == FLAT else 2)


class Nodes(Counted):
    """Two nodes of two ranks."""

    ranks = 4


def of_third_step(algorithm, joint=None, shapes=((600, 700), (71000,)), apart=False):
    """The kernels and the collectives of a bucket in the third backward, when all memory has been made.

    With a `Joint` it decides as if there were other buckets; with `apart` there are, one for each shape.
    """
    with Blind(copies=False), torch.no_grad(), Kernels() as kernels:
        params = [nn.Parameter(torch.empty(shape, device="cuda")) for shape in shapes]
        (rule,) = rules_of(made(algorithm))
        comm = Nodes() if algorithm.startswith("hierarchical") else Counted()
        held = [[p] for p in params] if apart else [params]
        buckets = [bk.Bucket(each, rule.stage.multiple_of(comm)) for each in held]
        runner = GradientRunner(0, rule, buckets, Channel(0, Inline(), comm, Silent()))
        runner.make_states()
        decisions = Decisions(joint)
        for step in range(3):
            for p in params:
                p.grad = torch.empty_like(p)
            kernels.counted.clear()
            SENT.clear()
            for i in range(len(buckets)):
                runner.launch_bucket(i, step, set(params), None, decisions.joint)
            decisions.begin([runner])
            runner.arrive_all()
            runner.land(None)
            decisions.settle()
            runner.step_ended()
        return kernels.counted, Counter(SENT)


@pytest.mark.parametrize("algorithm", MOST)
def test_a_bucket_costs_no_more_launches_than_this(algorithm):
    kernels, collectives = of_third_step(algorithm)
    assert (kernels.total(), collectives.total()) == MOST[algorithm], (kernels, collectives)


@pytest.mark.parametrize("algorithm", TOGETHER)
def test_a_bucket_that_decides_with_others_costs_no_more_than_this(algorithm):
    kernels, collectives = of_third_step(algorithm, Joint())
    assert (kernels.total(), collectives.total()) == TOGETHER[algorithm], (kernels, collectives)


def test_the_decision_of_several_buckets_costs_two_kernels():
    kernels, collectives = of_third_step("bytegrad(error_feedback=True)", Joint(), apart=True)
    assert (kernels.total(), collectives.total()) == (2 * 6 + 2, 2 * 2), (kernels, collectives)

"""Nothing in a step reads a GPU's memory on the host, nor waits for a copy to it: shown without a GPU."""

import pytest
import torch
from blind import Inline, Silent
from everything import COMPRESSORS, made, runs_free, usual
from tiers import slow_after, slow_unless
from torch import nn

import baguakit as bk
from baguakit.flights.gradients import Flags, GradientRunner
from baguakit.flights.life import Decisions
from baguakit.flights.weights import WeightRunner
from baguakit.interop.handle import HookRunner
from baguakit.interop.sharded import scatter
from baguakit.keeping import Joint
from baguakit.kernels.steps.operators import tables_of
from baguakit.rules import rules_of
from baguakit.runtime.runtime import Channel
from baguakit.testing.blind import Blind, Two, Waited

compressors, stages, topology = bk.compressors, bk.stages, bk.topology
DENSE = [each for each in map(made, usual(COMPRESSORS).values()) if each.dense]
OUTER = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "RMSprop", "ASGD", "Rprop")
ALGORITHMS = [each for each in usual().values() if not runs_free(made(each))]
ALGORITHMS += [f"bytegrad({each!r})" for each in DENSE]
SELDOM = [f"diloco(5, torch.optim.{name}, lr=0.1)" for name in OUTER]
ALGORITHMS += SELDOM
ALGORITHMS += [
    "decentralized(order='atc')",
    "hierarchical(bytegrad(error_feedback=True))",
    "qadam(1, error_feedback=True)",
    "choco(OnePeerExact(), TopK(0.1))",
    "after_step(Mean(), delay=1)",
    "diloco(5, inner=ErrorFeedback(CompressedMean()))",
]


def runners(algorithm, dtype):
    """The rules of an algorithm, each with one bucket of two parameters that no host can read."""
    params = [nn.Parameter(torch.empty(shape, device="cuda", dtype=dtype)) for shape in ((60, 70), (71,))]
    made = []
    for i, rule in enumerate(rules_of(algorithm)):
        buckets = [bk.Bucket(params, rule.stage.multiple_of(Two()))]
        kind = GradientRunner if rule.what == "grad" else WeightRunner
        made.append(kind(i, rule, buckets, Channel(0, Inline(), Two(), Silent())))
        made[-1].make_states()
    return made


def gradients(runner, step):
    """A backward through one bucket, under a loss scale."""
    params, decisions = runner.params(), Decisions(Joint(), alike=step > 0)
    for p in params:
        p.grad = torch.ones_like(p)
    runner.launch_bucket(0, step, set(params), torch.ones((), device="cuda"), decisions.joint)
    decisions.begin([runner])
    assert not runner.arrive_all()
    runner.land(torch.ones((), device="cuda"))
    decisions.settle()
    runner.step_ended()


def weights(runner, step):
    """An exchange of weights."""
    runner.launch_all(step, keep=runner.rule.window != "after_step" or runner.rule.delay > 0)
    runner.land_all()


def train(made, step):
    for runner in made:
        (gradients if runner.rule.what == "grad" else weights)(runner, step)


@pytest.mark.parametrize("dtype", slow_after(1, [torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("name", slow_unless({*ALGORITHMS} - {*SELDOM}, ALGORITHMS))
def test_no_algorithm_waits(name, dtype):
    with Blind(copies=False), torch.no_grad():  # what is made once may be copied
        rules = runners(made(name), dtype)
        train(rules, 0)
    with Blind(), torch.no_grad():
        train(rules, 1)
        train(rules, 2)


def test_an_outer_optimizer_that_can_only_count_on_the_host_waits_there():
    with Blind(), torch.no_grad(), pytest.raises(Waited):
        for runner in runners(bk.algorithms.diloco(5, torch.optim.Adagrad, lr=0.1), torch.float32):
            weights(runner, 0)


@pytest.mark.parametrize(
    "stage", [stages.Mean(), stages.CompressedMean(), stages.ErrorFeedback(stages.CompressedMean())]
)
def test_no_sharded_model_waits(stage):
    """As in the hooks of FSDP2: its gradients are scattered, and its weights gathered."""
    runner = HookRunner(0, bk.during_backward(stage), [], Channel(0, Inline(), Two(), Silent()))

    with Blind(), torch.no_grad():
        for step in range(3):
            x, decisions = torch.empty(1 << 12, device="cuda"), Decisions(Joint(), alike=False)
            place = runner.fit(0, x, [])
            runner.take_off(place, step, None, decisions.joint, scatter, torch.empty(1 << 11, device="cuda"))
            runner.arrive(place)
            decisions.begin([runner])
            decisions.settle()
            runner.arrive_all()
            bk.primitives.compressed_all_gather(
                x[: 1 << 11], compressors.MinMaxUInt8(), Two().at(step), out=torch.empty_like(x)
            )


def test_what_the_host_brings_is_pinned():
    with Blind() as blind:
        x = torch.empty(1 << 12, device="cuda")
        tables_of({"p": [x], "g": [torch.empty_like(x)]})
        Flags([1, 0]).begin(x, Two())
        for each in DENSE:
            each.add_(x, torch.empty(2, each.row_bytes(len(x)), dtype=torch.uint8, device="cuda"), [0.5, 0.5])
        assert len(blind.copies.pinned) == 2 + 1 + len(DENSE)


READINGS = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x[0]),
    "if": lambda x: 1 if x[0] > 0 else 0,
    "tolist": lambda x: x.tolist(),
    "to the CPU": lambda x: x.to("cpu"),
    "into a CPU tensor": lambda x: torch.empty(4).copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "a list": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "as_tensor": lambda x: torch.as_tensor([1.0, 2.0], device="cuda"),
    "new_tensor": lambda x: x.new_tensor([1.0, 2.0]),
    "from the CPU": lambda x: torch.ones(4).to(x.device, non_blocking=True),
    "out of a CPU tensor": lambda x: x.copy_(torch.ones(4)),
    "where": lambda x: torch.where(x > 0, x, torch.tensor(0.0)),
}


@pytest.mark.parametrize("name", READINGS)
def test_the_blind_sees_who_waits(name):
    with Blind(), pytest.raises(Waited):
        READINGS[name](torch.empty(4, device="cuda"))


def test_the_blind_lets_pass_what_waits_for_nothing():
    with Blind():
        x = torch.empty(4, device="cuda")
        assert x.is_cuda and x.device == torch.device("cuda", 0) and not torch.ones(1).is_cuda
        torch.where(x > 0, x, 0.0).add_(torch.tensor(2.0))  # a number of the host travels with the launch
        x[1:] = 3.0
        torch.ones(4).pin_memory().to(x.device, non_blocking=True)

"""Delayed gradients when parameters, ranks or rules change, and what is refused with them."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from everything import ALGORITHMS, averages_gradients, made
from pool import ranks
from saying import said
from torch import nn
from training import flat, loss, net, net_and_sgd, run_steps, sgd

import baguakit as bk
from baguakit.rules import Rule

MEAN, FEEDBACK = "Mean()", "ErrorFeedback(CompressedMean(MinMaxUInt8(block=64)))"
BUCKETS = 200


def some_used(att, model, optimizer, steps):
    """Train with a parameter that some ranks use in some steps. Return which gradients were None at each step."""
    none = []
    for step in steps:
        optimizer.zero_grad()
        hidden = model["always"].sum()
        if step in (1, 4) and dist.get_rank() == 1:
            hidden = hidden + (step + 1.0) * model["sometimes"].sum()
        (hidden * (dist.get_rank() + 1.0)).backward()
        none.append([name for name, p in model.named_parameters() if p.grad is None])
        optimizer.step()
    return none


def odd_model():
    """Parameters that are used always, by one rank in some steps, and never."""
    model = nn.ParameterDict({name: torch.zeros(4) for name in ("always", "sometimes", "never")})
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def test_a_gradient_that_no_rank_had_lands_as_none():
    """After the zeros of the first steps. So does one that only a later backward has. A resumed run is the same."""
    rule = "during_backward(Mean(), delay=2)"

    def run(stop):
        model, optimizer = odd_model()
        with bk.attach(model, optimizer, made(rule)) as att:
            none = some_used(att, model, optimizer, range(stop))
            state = att.state_dict()
        with bk.attach(model, optimizer, made(rule)) as att:
            att.load_state_dict(state)
            none += some_used(att, model, optimizer, range(stop, 7))
        return none, {name: p.tolist() for name, p in model.items()}

    both = ["never", "sometimes"]
    wanted = (
        [[], [], both, ["never"], both, both, ["never"]],
        {
            "always": [-7.5] * 4,  # five steps with the mean of 1 and 2
            "sometimes": [-(2 * 2 + 5 * 2) / 2] * 4,
            "never": [0.0] * 4,
        },
    )
    for stop in (1, 3, 5, 7):
        for none, weights in ranks(2, run, stop):
            assert ([sorted(each) for each in none], weights) == wanted, stop


def test_another_number_of_ranks_lands_what_was_in_the_air():
    """A stage that gives each rank a result of its own begins with zeros again."""

    def save(stage):
        model, optimizer = net_and_sgd()
        with bk.attach(model, optimizer, bk.during_backward(made(stage), delay=2), bucket_bytes=BUCKETS) as att:
            run_steps(model, optimizer, range(4))
            return att.state_dict()

    def load(stage, states):
        model = net()
        landed = []
        with bk.attach(model, None, bk.during_backward(made(stage), delay=2)) as att:
            att.load_state_dict(states[dist.get_rank()])
            for step in range(2):
                model.zero_grad()
                loss(model, dist.get_rank(), step).backward()
                landed.append({name: p.grad.clone() for name, p in model.named_parameters()})
        return landed

    for stage, kept in ((MEAN, True), ("NeighborMean(Ring())", False)):
        states = ranks(3, save, stage)
        for landed in ranks(2, load, stage, states):
            for k, grads in enumerate(landed):
                for name, grad in grads.items():
                    saved = states[0]["rules"]["0"]["parameters"][name][f"flight.{k}.result"]
                    assert torch.equal(grad, saved if kept else torch.zeros_like(grad)) and saved.any()


def test_a_parameter_unfrozen_meanwhile_changes_no_other():
    """Its first gradient is averaged exactly and lands at once; zeros follow, and then the delayed ones."""

    def run():
        model = nn.ParameterDict({"known": torch.zeros(4), "new": torch.zeros(3)})
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model["new"].requires_grad_(False)
        at = []
        with bk.attach(model, optimizer, bk.during_backward(bk.stages.Mean(), delay=2)):
            for step in range(8):
                model["new"].requires_grad_(step >= 3)
                optimizer.zero_grad()
                ((step + 1) * (dist.get_rank() + 0.5) * (model["known"].sum() + model["new"].sum())).backward()
                optimizer.step()
                at.append((model["known"][0].item(), model["new"][0].item()))
        return at

    known, new = [0, 0, 1, 3, 6, 10, 15, 21], [0, 0, 0, 4, 4, 4, 9, 15]
    assert ranks(2, run) == [[(-float(a), -float(b)) for a, b in zip(known, new, strict=True)]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", [each for each in ALGORITHMS if averages_gradients(made(each)) and isinstance(made(each), Rule)]
)
def test_every_average_of_gradients_may_be_delayed(algorithm):
    """Replicas stay equal, and a resumed run is the uninterrupted one, bit for bit."""

    def run(stop):
        model, state = net(), None
        optimizer = sgd(model.parameters(), lr=0.005)
        for steps in (range(stop), range(stop, 9)):
            with bk.attach(model, optimizer, replace(made(algorithm), delay=2), bucket_bytes=BUCKETS) as att:
                if state is not None:
                    att.load_state_dict(state)
                run_steps(model, optimizer, steps)
                state = att.state_dict()
        return flat(model)

    whole, *others = ranks(3, run, 9)
    assert all(torch.equal(weights, whole) for weights in [*others, *ranks(3, run, 5)]) and torch.isfinite(whole).all()


def test_at_the_stop_the_last_gradients_are_dropped():
    """A rule without a delay may follow, or come before. So may nothing."""

    def run():
        model, optimizer = net_and_sgd()
        rules = (
            bk.during_backward(made(FEEDBACK), stop=2),
            bk.during_backward(made(FEEDBACK), delay=2, start=2, stop=5),
            bk.during_backward(made(FEEDBACK), start=5),
        )
        landed = []
        with bk.attach(model, optimizer, rules, bucket_bytes=BUCKETS) as att:
            for step in range(7):
                optimizer.zero_grad()
                loss(model, dist.get_rank(), step).backward()
                landed.append(bool(model[0].weight.grad.any()))
                optimizer.step()
            flown = {(row.number, row.flights, row.landed) for row in att.report().rows}
            return landed, att.consensus_distance(), flown

    expected = [True, True, False, False, True, True, True], 0.0, {(0, 2, 2), (1, 3, 3), (2, 2, 2)}
    assert ranks(2, run) == [expected] * 2


def test_a_second_backward_in_a_step_is_told():
    def run():
        model, optimizer = net_and_sgd()
        rule = bk.during_backward(bk.stages.Mean(), delay=1)
        with pytest.raises(RuntimeError) as error, bk.attach(model, optimizer, rule) as att:
            run_steps(model, optimizer, range(2))
            for step in range(2):  # zeroed between: each is a backward of its own
                optimizer.zero_grad(set_to_none=bool(step))
                loss(model, dist.get_rank(), step).backward()
            loss(model, dist.get_rank(), 9).backward()
        return str(error.value), att.step

    sentence = (
        "a second backward has added gradients to what during_backward(Mean(), delay=1) put in place of those of the "
        "first; use att.no_sync() for all but the last backward of a step, or zero_grad() between them; of several "
        "networks, freeze those that this backward is not for, or attach each model with its own optimizer"
    )
    assert ranks(2, run) == [(sentence, 2)] * 2


def test_rules_with_other_delays_are_refused():
    def run():
        model, _ = net_and_sgd()
        some = {k: bk.during_backward(bk.stages.Mean(), delay=k, where=bk.Fragment(k, 2)) for k in (0, 1)}
        return said(lambda: bk.attach(model, None, *some.values()))

    sentence = (
        "ValueError: during_backward(Mean(), where=Fragment(k=0, of=2)) and during_backward(Mean(), delay=1, "
        "where=Fragment(k=1, of=2)) act in the same steps, and one optimizer step takes gradients of one delay; give "
        "both the same delay=, or separate them with start= and stop="
    )
    assert ranks(2, run) == [sentence] * 2


def test_hooks_of_wrappers_refuse_a_delay():
    def run():
        rule = bk.during_backward(bk.stages.Mean(), delay=1)
        return said(lambda: bk.interop.ddp(nn.parallel.DistributedDataParallel(net()), rule))

    sentence = (
        "ValueError: during_backward(Mean(), delay=1) lands gradients in a later backward, and a hook returns those of "
        "its own; use bk.attach, or omit delay="
    )
    assert ranks(2, run) == [sentence] * 2

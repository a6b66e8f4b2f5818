"""Delayed gradients:  x_{t+1} = x_t − γ u(s_{t−d}),  s_t = stage(g_t(x_t)),  s_t = 0 for t < 0."""

import math
import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from everything import ALGORITHMS, averages_gradients, made
from failing import Fails
from pool import ranks
from saying import TIMEOUT, said
from torch import nn
from training import flat, loss, net, net_and_sgd, run_steps, sgd

import baguakit as bk
from baguakit.attach.runners.runner import padded_multiple
from baguakit.buckets import split
from baguakit.rules import Rule

MEAN, FEEDBACK = "Mean()", "ErrorFeedback(CompressedMean(MinMaxUInt8(block=64)))"
ONE_BUCKET, BUCKETS = 25 << 20, 200


def by_hand(stage, d, steps=7, bad=(), micro=1, bucket_bytes=ONE_BUCKET, skipped=()):
    """Train this rank by the equation, with one flight after another. Return the weights.

    In the steps `bad` rank 1 has a gradient that is not finite: nothing of it is kept, and no rank steps with it. After
    the backward passes `skipped` no rank steps.
    """
    model, optimizer = net_and_sgd()
    comm, stage = bk.Comm(), made(stage)
    groups = split(list(model.parameters()), bucket_bytes)
    buckets = [bk.Bucket(group, padded_multiple(stage.multiple_of(comm), group)) for group in groups]
    states = [stage.init(bucket, comm) for bucket in buckets]
    air = [[torch.zeros_like(bucket.flat) for bucket in buckets] for _ in range(d)]
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            loss(model, dist.get_rank(), step + 100 * part).backward()
        flying = [bucket.load("grad").clone() for bucket in buckets]
        if step not in bad:
            flying = [stage(x, state, comm.at(step)) for x, state in zip(flying, states, strict=True)]
        air.append(flying)
        for bucket, landed in zip(buckets, air.pop(0), strict=True):
            bucket.flat.copy_(landed)
            bucket.store("grad")
        if step - d not in bad and step not in skipped:
            optimizer.step()
    return flat(model)


@pytest.mark.parametrize("d", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_delayed_gradients_are_the_equation(d):
    """Bit for bit, with the gradients kept as zeros or dropped before each backward, and accumulated in three parts."""

    def attached(stage, bucket_bytes, to_none, micro):
        model, optimizer = net_and_sgd()
        rule = bk.during_backward(made(stage), delay=d)
        with bk.attach(model, optimizer, rule, bucket_bytes=bucket_bytes) as att:
            for step in range(7):
                optimizer.zero_grad(set_to_none=to_none)
                for part in range(micro - 1):
                    with att.no_sync():
                        loss(model, dist.get_rank(), step + 100 * part).backward()
                loss(model, dist.get_rank(), step + 100 * (micro - 1)).backward()
                optimizer.step()
            return flat(model)

    def run():
        same = []
        for stage in (MEAN, FEEDBACK):
            for bucket_bytes, to_none, micro in ((ONE_BUCKET, True, 1), (BUCKETS, False, 1), (BUCKETS, True, 3)):
                expected = by_hand(stage, d, micro=micro, bucket_bytes=bucket_bytes)
                same.append(torch.equal(attached(stage, bucket_bytes, to_none, micro), expected))
        return same

    assert ranks(3, run) == [[True] * 6] * 3


def test_a_backward_without_a_step_has_a_round_of_its_own():
    """Its gradients land; those that landed with it are lost. In each round the ranks have other peers."""
    stage = "NeighborMean(OnePeerExponential())"

    def run():
        model, optimizer = net_and_sgd()
        with bk.attach(model, optimizer, bk.during_backward(made(stage), delay=1), bucket_bytes=BUCKETS) as att:
            for step in range(7):
                optimizer.zero_grad()
                loss(model, dist.get_rank(), step).backward()
                if step != 3:
                    optimizer.step()
            return att.step, torch.equal(flat(model), by_hand(stage, 1, bucket_bytes=BUCKETS, skipped=(3,)))

    assert ranks(4, run) == [(6, True)] * 4


@pytest.mark.parametrize("d, momentum", [(0, 0.0), (1, 0.0), (2, 0.0), (1, 0.5)])
def test_sgd_is_stable_up_to_the_bound(d, momentum):
    """On x² L / 2 it converges for γ L 2 % below 2 sin(π / (2 (2d + 1))), or 1 − β, and does not 2 % above."""
    bound = 1 - momentum if momentum else 2 * math.sin(math.pi / (2 * (2 * d + 1)))

    def largest(step_size, steps=400):
        """Return the largest |x| in the first steps, and in the latest."""
        x = nn.ParameterList([torch.ones((), dtype=torch.float64)])
        optimizer, at = torch.optim.SGD(x.parameters(), lr=step_size / 3, momentum=momentum), []
        with bk.attach(x, optimizer, bk.during_backward(bk.stages.Mean(), delay=d)):
            for _ in range(steps):
                optimizer.zero_grad()
                (1.5 * x[0].square()).backward()
                optimizer.step()
                at.append(x[0].abs().item())
        return max(at[:20]), max(at[-20:])

    def run():
        return largest(0.98 * bound), largest(1.02 * bound)

    ((first, last), (begun, grown)) = ranks(1, run)[0]
    assert last < first / 3 and grown > 3 * begun


@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("stage", [MEAN, FEEDBACK])
def test_an_overflow_costs_the_step_in_which_it_would_land(stage, d):
    """And leaves no trace. The scale changes while gradients are in the air, and with them nothing."""

    def run():
        model, optimizer = net_and_sgd()
        scaler, skipped, scales = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=2), [], set()
        rule = bk.during_backward(made(stage), delay=d)
        with bk.attach(model, optimizer, rule, scaler=scaler, bucket_bytes=BUCKETS) as att:
            for step in range(9):
                optimizer.zero_grad()
                value = loss(model, dist.get_rank(), step)
                if step in (0, 3) and dist.get_rank() == 1:
                    value = value + model[4].bias[0] * float("inf")  # one value of one bucket
                before = att.step
                scaler.scale(value).backward()
                scaler.step(optimizer)
                scaler.update()
                scales.add(scaler.get_scale())
                if att.step == before:
                    skipped.append(step)
        return skipped, len(scales) > 1, torch.equal(flat(model), by_hand(stage, d, 9, (0, 3), bucket_bytes=BUCKETS))

    assert ranks(2, run) == [([d, d + 3], True, True)] * 2


def test_each_backward_at_a_scale_too_high_costs_one_step():
    """The scale is halved when the first lands, and d more have been launched with it."""

    def run():
        x = nn.ParameterList([torch.zeros(3)])
        optimizer, scaler, steps = torch.optim.SGD(x.parameters(), lr=1.0), torch.amp.GradScaler("cpu", 2.0**127), []
        rule = bk.during_backward(bk.stages.Mean(), delay=2)
        with bk.attach(x, optimizer, rule, scaler=scaler) as att:
            for _ in range(8):
                optimizer.zero_grad()
                scaler.scale(3 * x[0].sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                steps.append(att.step)
        return steps, x[0].tolist()

    # Zeros twice; then three overflows, of backward passes 0, 1 and 2; then the gradients of 3, 4 and 5.
    assert ranks(2, run) == [([1, 2, 2, 2, 2, 3, 4, 5], [-9.0] * 3)] * 2


@pytest.mark.parametrize("stage", [MEAN, FEEDBACK])
def test_the_exchange_overlaps_d_whole_steps(stage):
    """With nothing arriving, d steps end; the decisions on what to keep do not wait, either."""

    def run():
        model, optimizer = net_and_sgd()
        held = threading.Event()
        with bk.attach(model, optimizer, bk.during_backward(made(stage), delay=2), bucket_bytes=BUCKETS) as att:
            att._engine.runners[0].channel.lane.run(held.wait)
            run_steps(model, optimizer, range(2))
            held_up = att.step
            report = att.report()
            landed = {(row.flights, row.landed) for row in report.rows}
            held.set()
            run_steps(model, optimizer, range(2, 5))
            rows = att.report().rows
            timeline = att.timeline()
        here = [flight for flight in timeline.flights if flight.rank == dist.get_rank()]
        steps = {span.step: span for span in timeline.spans if span.rank == dist.get_rank() and span.name == "step"}
        lands = all(steps[f.step + 2].start <= f.landed <= steps[f.step + 2].end for f in here)
        return held_up, landed, {(row.flights, row.landed) for row in rows}, {f.step for f in here}, lands

    assert ranks(2, run) == [(2, {(2, 0)}, {(5, 3)}, {0, 1, 2}, True)] * 2


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
        "first; use att.no_sync() for all but the last backward of a step, or zero_grad() between them"
    )
    assert ranks(2, run) == [(sentence, 2)] * 2


def test_a_failed_backward_is_told_to_all(own_pools):
    def run():
        model, optimizer = net_and_sgd()
        rule = bk.during_backward(bk.stages.Mean(), delay=1)
        with bk.attach(model, optimizer, rule, timeout=TIMEOUT, bucket_bytes=BUCKETS):
            for step in range(5):
                optimizer.zero_grad()
                hidden = model[2](model[1](model[0](torch.ones(2, 6))))
                hidden = Fails.apply(hidden) if step == 2 and dist.get_rank() == 1 else hidden
                try:
                    model[4](model[3](hidden)).sum().backward()
                except MemoryError:
                    continue
                optimizer.step()

    for sentence in own_pools(3).run(said, run):
        assert sentence.startswith("PeerError: a backward failed on rank 1 after "), sentence
        assert sentence.endswith(
            "they step with delayed gradients; let the exception end this rank, and resume from a checkpoint"
        )


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

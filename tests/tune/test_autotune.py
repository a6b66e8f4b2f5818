"""Tuning while training: the same choice on all ranks, saved and resumed, and no result changed."""

import gc
import io
import os
import threading

import pytest
import torch
import torch.distributed as dist
from everything import exact, made, others_slow, runs_free, usual, windows
from pool import ranks
from tiers import slow_after
from training import flat, loss, net, net_and_sgd, run_steps

import baguakit as bk
from baguakit.tune.tuner import Trial, best_of, next_of

SIZES = (1, 300, 1 << 20)  # a bucket for each parameter, some, and one for all


def searched(seconds, start, sizes, flows):
    """Return the trials of a search where a setting takes `seconds(size, flows)`."""
    trials, setting = [], start
    while setting is not None:
        trials.append(Trial(*setting, seconds(*setting)))
        setting = next_of(trials, sizes, flows)
    return trials


def test_the_search_ends_at_a_setting_that_no_neighbour_beats():
    sizes, flows = [1, 2, 4, 8, 16, 32], [1, 2, 4, 8]
    for best in [(1, 1), (8, 4), (32, 8), (16, 1)]:

        def seconds(size, count, best=best):
            return 1 + abs(sizes.index(size) - sizes.index(best[0])) + abs(flows.index(count) - flows.index(best[1]))

        for start in [(4, 2), (32, 1)]:
            trials = searched(seconds, start, sizes, flows)
            assert best_of(trials).setting == best
            assert len({trial.setting for trial in trials}) == len(trials) <= len(sizes) * len(flows)


def trained(algorithm, tune, steps=40, state=None):
    """Train, tuning or not; return the weights, the state of the attachment, the tuner and the sizes of its buckets."""
    model, optimizer = net_and_sgd()
    with bk.attach(model, optimizer, made(algorithm)) as att:
        if state is not None:
            loaded = torch.load(io.BytesIO(state), weights_only=True)
            model.load_state_dict(loaded["model"])
            att.load_state_dict(loaded["att"])
        tuner = bk.tune.autotune(att, bucket_bytes=SIZES, flows=(1, 2), steps=2) if tune else None
        run_steps(model, optimizer, range(steps))
        buffer = io.BytesIO()
        torch.save({"model": model.state_dict(), "att": att.state_dict()}, buffer)
        cut = sorted(len(row) for row in att.state_dict()["rules"]["0"]["cut"])
    return flat(model), buffer.getvalue(), tuner, cut


def log_of(tuner):
    return [sentence.partition(":")[0] for sentence in tuner.log]


MEAN = "gradient_allreduce()"
DELAYED = ("gradient_allreduce(delay=2)", "after_step(Mean(), every=2, delay=1)")
EXACT = [each for each in usual().values() if exact(made(each)) and not runs_free(made(each))]


@pytest.mark.parametrize("algorithm", [*others_slow(EXACT, windows), *slow_after(1, DELAYED)])
def test_tuning_changes_no_result(algorithm):
    """The sum of two numbers does not depend on their place in a bucket: bitwise the run without tuning."""

    def work():
        plain, (tuned, _, tuner, _) = trained(algorithm, False)[0], trained(algorithm, True)
        return plain, tuned, log_of(tuner)

    for plain, tuned, log in ranks(2, work):
        assert torch.equal(plain, tuned)
        assert len(log) > 3 and log[-1].startswith("tuned after ")


def test_all_ranks_choose_the_same_and_a_resumed_run_does_not_tune_again():
    def work():
        _, state, tuner, cut = trained(MEAN, True)
        again = trained(MEAN, True, steps=2, state=state)
        untuned = trained(MEAN, False, steps=2, state=state)
        return tuner.log, tuner.over, tuner.best, cut, (again[2].log, again[3]), untuned[3]

    told = ranks(2, work)
    log, over, best, cut, (resumed, cut_again), cut_untuned = told[0]
    assert all(each[:4] == told[0][:4] for each in told)
    assert over and log[-1].endswith(str(best)) and len(log) == len(set(log))
    assert resumed == ["already tuned, before this state was saved"]
    assert cut == cut_again == cut_untuned  # a state that was tuned cuts the buckets, tuner or not


def test_a_state_that_is_loaded_ends_tuning():
    def work():
        _, state, _, _ = trained(MEAN, True)
        model, optimizer = net_and_sgd()
        with bk.attach(model, optimizer, made(MEAN)) as att:
            tuner = bk.tune.autotune(att, bucket_bytes=SIZES, steps=2)
            att.load_state_dict(torch.load(io.BytesIO(state), weights_only=True)["att"])
            loss(model, dist.get_rank(), 0).backward()
            optimizer.step()
            return tuner.log[-1], tuner.over

    assert ranks(2, work) == [("already tuned, as the state that was loaded says", True)] * 2


def test_buckets_and_flows_are_changed_by_hand_and_nothing_is_left():
    changes = [{}, {"bucket_bytes": 1}, {"flows": 2}, {"bucket_bytes": 1 << 20, "flows": 1}]

    def cycle():
        model, seen = net(), []
        with bk.attach(model, None, bk.algorithms.bytegrad(error_feedback=True)) as att:
            for step, change in enumerate(changes):
                att.recut(**change)
                loss(model, dist.get_rank(), step).backward()
                seen.append((len(att.report().rows), att.report().groups, att.step))
        return seen, [p.grad.sum().item() for p in model.parameters()]

    def work():
        done, held = [], []
        for _ in range(4):
            done.append(cycle())
            gc.collect()
            held.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
        return done, held

    told = ranks(2, work)
    assert told[0][0] == told[1][0] == [told[0][0][0]] * 4  # what was averaged, too
    assert told[0][0][0][0] == [(1, 1, 1), (6, 1, 2), (6, 2, 3), (1, 1, 4)]
    assert all(first >= last for _, held in told for first, last in zip(held[0], held[-1], strict=True)), told


def test_a_plan_is_where_tuning_begins():
    from baguakit.tune.planning import plan_of

    def work():
        link = bk.tune.Link("flat", 1, 2, bk.tune.Line(1e-4, 1e-8), bk.tune.Line(1e-4, 1e-8))
        network = bk.tune.Network(2, 1, "cpu", 1, (link,))
        model, optimizer = net_and_sgd()
        plan = plan_of(model, network, bk.tune.Compute(0.0, 1.0), [bk.algorithms.gradient_allreduce()], [300], [1])
        with bk.attach(model, optimizer, bk.algorithms.gradient_allreduce()) as att:
            tuner = bk.tune.autotune(att, plan)
            return tuner.log, tuner.over, str(tuner)

    for log, over, text in ranks(2, work):
        assert log == ["tuning from buckets of 0.000286102 MiB over 1 flow"]
        assert not over and text == "nothing tried yet"


def test_tuning_waits_for_warm_ups_and_gives_way():
    def work():
        model, optimizer = net_and_sgd()
        with bk.attach(model, optimizer, bk.algorithms.local_sgd(every=2, start=4)) as att:
            tuner, seen = bk.tune.autotune(att, bucket_bytes=SIZES, steps=1), []
            for step in range(9):
                optimizer.zero_grad()
                loss(model, dist.get_rank(), step).backward()
                optimizer.step()
                seen.append(len(tuner.trials))
            att.recut(7)
            loss(model, dist.get_rank(), 9).backward()
            optimizer.step()
            return seen, tuner.log[-1], tuner.over

    for seen, log, over in ranks(2, work):
        # Timed from the end of step 4 on: a period of two to settle, and one that counts.
        assert seen == [0] * 7 + [1] * 2
        assert over and log == "stopped: the buckets have been cut otherwise"


def test_what_cannot_be_tuned_is_refused():
    def work():
        model, optimizer = net_and_sgd()
        found = []
        with bk.attach(model, optimizer, bk.algorithms.async_model_average()) as att:
            for attempt in (lambda: bk.tune.autotune(att), lambda: att.recut(1), lambda: bk.tune.autotune(model)):
                try:
                    attempt()
                except (TypeError, ValueError) as error:
                    found.append(str(error))
        with bk.attach(model, optimizer, bk.algorithms.local_sgd()) as att:
            for options in ({"steps": 0}, {"flows": (0,)}, {"bucket_bytes": (0,)}):
                with pytest.raises(ValueError):
                    bk.tune.autotune(att, **options)
        return found

    for found in ranks(1, work):
        assert "different steps" in found[0] and "different steps" in found[1] and "not Sequential" in found[2]

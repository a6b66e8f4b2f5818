"""Samplers follow a group whose ranks come and go: every sample of an epoch is trained once, whoever is lost."""

import json
import logging
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sampler_groups import lengths
from sampler_regroups import Comm, Training, in_no_queue
from torch.utils.data import DataLoader

from baguakit.data import LoadBalancedBatchSampler, LoadBalancedSampler


def kind(name, n, drop=True):
    """Return a function of a comm that makes a sampler."""
    if name == "samples":
        return lambda comm: LoadBalancedSampler(range(n), lengths(n), drop_last=drop, group=comm)
    limit = {"budget": 1000} if name == "budget" else {"batch_size": 2}
    costs = lengths(n).clip(1, 900)
    return lambda comm: LoadBalancedBatchSampler(range(n), costs, drop_last=drop, group=comm, **limit)


KINDS = st.sampled_from(["samples", "budget", "batches"])
N = st.integers(20, 160)
DEPTHS = st.lists(st.integers(0, 5), min_size=1, max_size=4)  # of what each rank's loader fetches ahead


@pytest.fixture
def left_out():
    """The items that warnings say are left out, by epoch."""
    out, handler, log = {}, logging.Handler(), logging.getLogger("baguakit")
    handler.emit = lambda record: out.update({record.args[1]: record.args[0]})
    log.addHandler(handler)
    yield out
    log.removeHandler(handler)


def disturb(training, draw, failing=False):
    """Make some steps, then lose ranks, in a step or after one, and let others join."""
    training.steps(draw.randint(0, 12))
    lost = draw.sample(training.ranks, min(draw.randint(0, 2), len(training.ranks) - 1))
    joining = [draw.randint(0, 5) for _ in range(draw.randint(0, 2))]
    how = {"order": lambda ranks: draw.sample(ranks, len(ranks))}
    if failing:
        how |= {"gathers": draw.randint(0, 2), "deaf": draw.sample(range(8), draw.randint(0, 4))}
    if lost and draw.random() < 0.7:
        training.lose(lost, joining, late=[rank for rank in training.ranks if draw.random() < 0.3], **how)
    else:
        training.change(lost, joining, **how)


def finish(training):
    """Step until two epochs are over that no change has touched."""
    while min(rank.sampler.epoch for rank in training.ranks) <= max(training.touched) + 2:
        training.steps(1)


@settings(max_examples=25)
@example("samples", 20, True, [0] * 4, 1, 116069)  # the only rank that has heard what was agreed is lost
@example("batches", 20, True, [0, 0], 1, 0)  # a lost rank leaves items in two epochs
@example("batches", 20, False, [4] * 3, 2, 474503)  # the rank that has to warn is lost before it has heard of it
@example("budget", 20, True, [2], 2, 579305)  # the only rank that is left is an epoch behind
@given(name=KINDS, n=N, drop=st.booleans(), depths=DEPTHS, items=st.integers(1, 2), seed=st.integers(0, 10**6))
def test_every_sample_is_trained_once_and_all_end_together(name, n, drop, depths, items, seed):
    """The samples trained are all but those in no queue of the last plan; none is trained twice without a reason."""
    draw, training = random.Random(seed), Training(kind(name, n, drop), depths, items)
    out, log = Counter(), logging.getLogger("baguakit")
    log.addFilter(count := lambda record: not out.update({record.args[1]: record.args[0]}))
    for _ in range(draw.randint(1, 4)):
        failing = draw.random() < 0.3
        disturb(training, draw, failing)
        if failing:  # not all have heard what was agreed: the next change must repair it
            training.change(draw.sample(training.ranks, min(1, len(training.ranks) - 1)))
    finish(training)
    log.removeFilter(count)
    ended = [epoch for epoch in training.trained if any(epoch in rank.left for rank in training.ranks)]
    assert len(ended) >= 2
    for epoch in ended:
        counts, there = training.trained[epoch], [rank for rank in training.ranks if epoch in rank.left]
        missing = set(range(n)) - set(counts)
        if not out[epoch]:
            assert missing == there[0].left[epoch] and (drop or not missing)
        if drop and epoch not in training.repeats:
            assert set(counts.values()) == {1}
        if epoch not in training.uneven:
            assert len({rank.ends[epoch] for rank in there}) == 1


def test_who_has_which_items_after_a_loss_and_a_join():
    """Two ranks train three items each; rank 0 has drawn five. Rank 1 is lost, and another joins."""
    training = Training(kind("samples", 40), [2, 4])
    training.steps(3)
    first, second = training.ranks
    keeps, lost = [each for item in first.loader.ready for each in item], list(second.loader.ready)
    assert (len(keeps), len(lost)) == (2, 4)
    training.change([second], [0], order=lambda ranks: ranks[::-1])
    joined, first = training.ranks
    shares = joined.sampler._shares(joined.sampler._now.stretch)
    queues = [[int(item[0]) for item in shares.queue(rank)] for rank in (0, 1)]
    assert queues == [list(joined.sampler), [*keeps, *first.loader.draws]]
    assert queues[1][:2] == keeps  # a survivor keeps what it has drawn
    assert {each for item in lost for each in item} < set(queues[0] + queues[1])  # the lost rank's are returned
    assert sorted(queues[0] + queues[1]) == sorted(set(range(40)) - set(training.trained[0]))
    assert [len(queue) for queue in queues] == [17, 17] == [len(joined.sampler), len(first.sampler)]
    assert (joined.sampler.rank, first.sampler.rank, first.sampler.num_replicas) == (0, 1, 2)


def test_a_rank_that_joins_when_another_has_drawn_all_begins_with_the_next_epoch(left_out):
    training = Training(kind("samples", 12), [4, 4, 0])
    training.steps(1)
    lost = training.ranks[1]
    training.change([lost], [0])
    assert left_out == {0: 3}
    assert [rank.sampler.epoch for rank in training.ranks] == [0, 0, 1]
    finish(training)
    ends = [[rank.ends[epoch] for rank in training.ranks if epoch in rank.ends] for epoch in range(3)]
    assert ends == [[4, 4], [7, 7, 7], [11, 11, 11]]  # (12 + 3 · 3) / 3 steps: the new rank has made three more
    assert len(training.trained[0]) == 9 and len(training.trained[1]) == 12


@settings(max_examples=15)
@given(name=KINDS, n=N, depths=DEPTHS, seed=st.integers(0, 10**6), others=st.integers(1, 5))
def test_a_state_after_changes_is_equal_on_all_ranks_and_resumes(name, n, depths, seed, others):
    draw, training = random.Random(seed), Training(kind(name, n), depths)
    disturb(training, draw)
    training.steps(draw.randint(0, 3))
    if len({rank.sampler.epoch for rank in training.ranks}) > 1 or training.uneven:
        return  # for a few steps between two epochs, ranks are in different ones
    states = [rank.sampler.state_dict() for rank in training.ranks]
    for rank, state in zip(training.ranks, states, strict=True):
        counted = rank.sampler._now.before + rank.sampler._trained(rank.sampler._now)
        assert state == states[0] == rank.sampler.state_dict(consumed=counted)
    state, epoch = json.loads(json.dumps(states[0])), states[0]["epoch"]
    again = Training(kind(name, n), [0] * len(training.ranks), state=state)
    for rank, old in zip(again.ranks, training.ranks, strict=True):
        place = old.sampler._now
        rest = [old.sampler._item(item) for item in old.sampler._shares(place.stretch).queue(place.rank)]
        assert list(rank.sampler) == rest[old.sampler._trained(place) :]
    fewer = Training(kind(name, n), [0] * others, state=state)
    trained = set(training.trained.get(epoch, ()))
    rest = [i for rank in fewer.ranks for item in rank.sampler for i in (item if isinstance(item, list) else [item])]
    if epoch not in training.repeats:
        assert len(set(rest)) == len(rest) and not trained & set(rest)
    assert trained | set(rest) == set(range(n)) - in_no_queue(fewer.ranks[0].sampler)


def test_a_loader_with_workers_goes_on_in_the_midst_of_a_pass():
    training = Training(kind("batches", 40), [0, 0])
    kept, lost = training.ranks
    loader = DataLoader(range(40), batch_sampler=kept.sampler, num_workers=2, multiprocessing_context="fork")
    seen = []
    for step, batch in enumerate(loader):
        seen += batch.tolist()
        kept.comm.membership.bodies += 1
        if step < 3:
            training.note(*lost.next())
            training.step += 1
            kept.att.step = lost.att.step = training.step
        if step == 2:
            training.change([lost])
    assert sorted([*seen, *training.trained[0]]) == list(range(40))


def test_what_cannot_be_followed_is_refused_in_words():
    training = Training(kind("samples", 20), [0, 0])
    training.steps(2)
    one = training.ranks[0].sampler
    with pytest.raises(ValueError, match=r"call follow\(\) once, before the first item is drawn"):
        one.follow(training.ranks[0].att)
    with pytest.raises(ValueError, match="a pass of epoch 0 has begun before: call set_epoch with a higher number"):
        next(iter(one))
    finish(training)
    training.change(joining=[0])
    joined = training.ranks[2].sampler
    with pytest.raises(ValueError, match=r"epoch is 0 and this rank has joined in epoch 3: begin with sampler.epoch"):
        joined.set_epoch(0)
    with pytest.raises(ValueError, match="load a state before the first change"):
        joined.load_state_dict(joined.state_dict())
    with pytest.raises(ValueError, match=r"a group whose ranks come and go: group=bk.elastic.join\(…\)"):
        LoadBalancedSampler(range(3), [1, 2, 3]).follow(SimpleNamespace())
    with pytest.raises(ValueError, match="items_per_step is a whole number, 1 or more, not 0"):
        LoadBalancedSampler(range(3), [1, 2, 3], group=Comm()).follow(SimpleNamespace(), 0)
    with pytest.raises(ValueError, match="ranks that join later cannot measure the dataset with the others"):
        LoadBalancedSampler(range(3), float, group=Comm())

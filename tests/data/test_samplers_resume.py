"""Samplers go on where they stopped, with as many ranks or others, and work in loaders, trainers and process groups."""

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool import ranks as on_ranks
from sampler_groups import RANKS, batch_samplers, lengths, samplers
from tiers import slow_after
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from baguakit.data import LoadBalancedSampler
from baguakit.data import LoadBalancedSampler as Sampler

# Going on in mid-epoch

KINDS = {
    "samples": lambda n, ranks, **o: samplers(n, ranks, **o),
    "budget": lambda n, ranks, **o: batch_samplers(n, ranks, lengths(n).clip(1, 900), budget=1000, **o),
    "batches": lambda n, ranks, **o: batch_samplers(n, ranks, batch_size=3, **o),
}


def start(sampler, steps):
    it = iter(sampler)
    return [next(it) for _ in range(steps)]


@pytest.mark.parametrize("kind", slow_after(1, KINDS))
@given(n=st.integers(1, 60), ranks=RANKS, part=st.floats(0, 1), shuffle=st.booleans(), drop=st.booleans())
def test_resuming_gives_exactly_the_rest(kind, n, ranks, part, shuffle, drop):
    options = {"shuffle": shuffle, "drop_last": drop, "random_level": 0.5 * shuffle}
    for sampler, fresh in zip(KINDS[kind](n, ranks, **options), KINDS[kind](n, ranks, **options), strict=True):
        sampler.set_epoch(2)
        whole, cut = list(sampler), int(part * len(sampler))
        start(sampler, cut)
        state = sampler.state_dict()
        assert state == sampler.state_dict(consumed=cut)
        fresh.load_state_dict(state)
        fresh.set_epoch(2)  # as loops do at the head of an epoch
        assert len(fresh) == len(whole) and list(fresh) == whole[cut:]
        assert list(fresh) == whole  # the next pass is a whole one


def flat(items):
    return [i for item in items for i in (item if isinstance(item, list) else [item])]


@pytest.mark.parametrize("kind", slow_after(1, KINDS))
@given(n=st.integers(1, 60), before=RANKS, after=RANKS, part=st.floats(0, 1), again=st.floats(0, 1))
def test_another_number_of_ranks_takes_over_what_is_left(kind, n, before, after, part, again):
    """Over three runs every sample is trained; repeated are only those that some run had to repeat."""
    runs, state = [], None
    for size, share in [(before, part), (after, again), (before, 1.0)]:
        group = KINDS[kind](n, size)
        for sampler in group:
            if state is not None:
                sampler.load_state_dict(state)
        steps = round(share * (len(group[0]) - group[0].state_dict()["step"]))
        runs.append([i for sampler in group for i in flat(start(sampler, steps))])
        state = group[0].state_dict()
        assert all(sampler.state_dict() == state for sampler in group)
    trained = list(chain(*runs))
    assert set(trained) == set(range(n))
    if before == after:
        assert sorted(trained) == sorted(flat(item for sampler in KINDS[kind](n, before) for item in sampler))
    else:
        assert sum(len(set(run)) for run in runs) == n


def test_resuming_with_other_data_or_settings_is_refused():
    state = samplers(20, 2)[0].state_dict()
    for other, text in [
        (LoadBalancedSampler(range(21), lengths(21), 2, 0), "length=20 and the sampler has 21"),
        (LoadBalancedSampler(range(20), np.ones(20), 2, 0), "complexity="),
        (LoadBalancedSampler(range(20), lengths(20), 2, 0, seed=1), "seed=0 and the sampler has 1"),
        (batch_samplers(20, 2, batch_size=2)[0], "batch_size=None"),
    ]:
        with pytest.raises(ValueError, match=text):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="consumed is 11 and this pass has 10 items"):
        samplers(20, 2)[0].state_dict(consumed=11)


def test_what_is_no_state_is_refused_in_words():
    sampler = samplers(20, 2)[0]
    state = sampler.state_dict()
    for wrong, text in [
        (None, "state is the result of state_dict\\(\\), not None"),
        ({}, "state has no epoch, done, ranks, step"),
        ({k: v for k, v in state.items() if k != "done"}, "state has no done;"),
        ({**state, "step": -7}, "step in the state is a whole number, 0 or more, not -7"),
        ({**state, "ranks": 0}, "ranks in the state is a whole number, 1 or more, not 0"),
        ({**state, "epoch": "two"}, "epoch in the state is a whole number, 0 or more, not 'two'"),
        ({**state, "done": 5}, r"done in the state is a list, each of it a tuple \(.*\), not 5"),
        ({**state, "done": [[2, 1.5]]}, r"done in the state is a list, .*, not \[\[2, 1.5\]\]"),
        ({**state, "done": [[2, -1]]}, "done in the state is a whole number, 0 or more, not -1"),
        ({**state, "done": [[2, [[1, 1, 0, 0]]]]}, r"taken on 2 ranks, and has \[\(1, 1, 0, 0\)\] for them"),
        ({**state, "behind": [1]}, r"taken on 2 ranks, and has \[1\] for them"),
    ]:
        with pytest.raises((TypeError, ValueError), match=text):
            sampler.load_state_dict(wrong)
    for epoch in (-1, 1.5, "1", None):
        with pytest.raises((TypeError, ValueError), match="epoch is a whole number, 0 or more, not "):
            sampler.set_epoch(epoch)
    for consumed in (-1, 1.5, "1"):
        with pytest.raises((TypeError, ValueError), match="consumed is a whole number, 0 or more, not "):
            sampler.state_dict(consumed=consumed)
    assert sampler.state_dict() == state


# In a loader


@pytest.mark.parametrize("workers, persistent", slow_after(1, [(2, True), (0, False), (2, False)]))
def test_loaders_go_through_an_epoch_and_resume(workers, persistent):
    data = TensorDataset(torch.arange(40))
    sampler, batches = samplers(40, 2)[1], batch_samplers(40, 2, batch_size=4)[1]
    options = {"num_workers": workers, "persistent_workers": persistent}
    if workers:
        options["multiprocessing_context"] = "fork"
    by_sample = DataLoader(data, batch_size=4, sampler=sampler, **options)
    by_batch = DataLoader(data, batch_sampler=batches, **options)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches.set_epoch(epoch)
        assert [i for (x,) in by_sample for i in x.tolist()] == list(sampler)
        seen = [x.tolist() for (x,) in by_batch]
        assert seen == list(batches) and len(seen) == len(by_batch)
    batches.load_state_dict(batches.state_dict(consumed=2))
    assert [x.tolist() for (x,) in by_batch] == seen[2:]


def test_trainers_find_a_distributed_sampler_and_set_epoch():
    assert isinstance(samplers(4, 2)[0], DistributedSampler)
    batches = batch_samplers(4, 2, batch_size=1)[0]
    DataLoader(range(4), batch_sampler=batches).batch_sampler.sampler.set_epoch(3)
    assert batches.epoch == 3


def test_ranks_come_from_the_process_group():
    def taken():
        sampler = Sampler(range(10), list(range(10)))
        return sampler.rank, sampler.num_replicas, list(sampler)

    answers = on_ranks(2, taken)
    assert [a[:2] for a in answers] == [(0, 2), (1, 2)]
    assert sorted(answers[0][2] + answers[1][2]) == list(range(10))

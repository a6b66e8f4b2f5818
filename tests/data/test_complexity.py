"""Costs of samples: given, or measured once by all ranks."""

import logging

import numpy as np
import pytest
import torch
from pool import ranks as on_ranks

from baguakit.data import LoadBalancedSampler
from baguakit.data import LoadBalancedSampler as Sampler


class Counted:
    """Sample i is i; `reads` counts."""

    def __init__(self, n):
        self.n, self.reads = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.reads.append(i)
        return i


def costs(*args, **options):
    return LoadBalancedSampler(*args, **options).costs


@pytest.mark.parametrize(
    "given",
    [[3, 1, 2], (3.0, 1.0, 2.0), np.array([3, 1, 2]), torch.tensor([3, 1, 2]), torch.tensor([3, 1, 2]).bfloat16()],
    ids=str,
)
def test_numbers_are_taken_as_they_are_and_no_sample_is_read(given):
    data = Counted(3)
    assert costs(data, given).tolist() == [3, 1, 2] and not data.reads


def test_a_function_is_measured_once_and_the_log_says_so(caplog):
    data = Counted(5)
    with caplog.at_level(logging.WARNING, "baguakit"):
        assert costs(data, lambda x: x * 2).tolist() == [0, 2, 4, 6, 8]
    assert data.reads == [0, 1, 2, 3, 4] and "measuring the complexity of 5 samples on 1 ranks" in caplog.text


@pytest.mark.parametrize(
    "given, error, text",
    [
        ([1, 2], ValueError, r"shape \(2,\) and the dataset 3 samples"),
        ([1, -2, 3], ValueError, "of sample 1 is -2.0"),
        ([1, 2, float("nan")], ValueError, "of sample 2 is nan"),
        (torch.ones(3, 1), ValueError, "shape"),
        (["a", "b", "c"], TypeError, "holds list"),
        (None, ValueError, "complexity has shape"),
        ("costs.npy", TypeError, "holds str, not one number per sample"),
        (lambda x: 1 / 0, ValueError, "^complexity=.* of sample 0 raised ZeroDiv"),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_costs_are_refused_in_words(given, error, text):
    with pytest.raises(error, match=text):
        LoadBalancedSampler(Counted(3), given)


@pytest.mark.parametrize(
    "given", [["1", "2", "3"], np.array([1j, 2, 3]), torch.ones(3).to_sparse(), torch.ones(3, device="meta"), {}]
)
def test_what_holds_no_numbers_is_refused_in_words(given):
    with pytest.raises((TypeError, ValueError), match=r"complexity (holds .*, not one number per sample|has shape)"):
        LoadBalancedSampler(Counted(3), given)


def test_measured_costs_are_finite():
    with pytest.raises(ValueError, match="complexity of sample 2 is nan"):
        costs(Counted(3), lambda x: float("nan") if x == 2 else 1.0)


@pytest.mark.parametrize("n", [9, 1, 0])
def test_ranks_share_the_pass(n):
    def measured():
        data = Counted(n)
        return data.reads, costs(data, lambda x: x * x).tolist()

    answers = on_ranks(2, measured)
    assert sorted(answers[0][0] + answers[1][0]) == list(range(n))
    assert [a[1] for a in answers] == [[i * i for i in range(n)]] * 2


def test_a_failure_on_one_rank_is_raised_on_all():
    def failing():
        try:
            Sampler(Counted(4), lambda x: 1 / (3 - x))
        except ValueError as error:
            return str(error)

    first, second = on_ranks(2, failing)
    assert first == f"rank 1 could not determine the complexity of the dataset: ValueError: {second}"
    assert second.endswith(" of sample 3 raised ZeroDivisionError: division by zero")


def test_alone_in_its_group_a_rank_may_play_any_other():
    def played():
        return sorted(i for rank in range(4) for i in Sampler(range(8), float, num_replicas=4, rank=rank))

    assert on_ranks(1, played) == [list(range(8))]


def test_ranks_numbered_by_hand_cannot_share_a_pass():
    def by_hand():
        assert len(Sampler(range(4), [1, 2, 3, 4], num_replicas=4, rank=3)) == 1
        try:
            Sampler(Counted(4), float, num_replicas=4, rank=3)
        except ValueError as error:
            return str(error)

    assert all("that divide the pass over the dataset are unknown" in text for text in on_ranks(2, by_hand))

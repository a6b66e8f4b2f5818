"""Costs of samples: given, kept in a file, or measured once by all ranks."""

import logging
import os
import sys

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


def test_a_file_of_numbers(tmp_path):
    np.save(tmp_path / "costs.npy", np.array([3, 1, 2]))
    for path in (tmp_path / "costs.npy", str(tmp_path / "costs.npy")):
        assert costs(Counted(3), path).tolist() == [3, 1, 2]


def test_a_function_is_measured_once_under_a_progress_bar_and_kept(tmp_path, capsys):
    pytest.importorskip("tqdm")
    data, file = Counted(5), tmp_path / "new" / "costs.npy"
    assert costs(data, lambda x: x * 2, complexity_file=file).tolist() == [0, 2, 4, 6, 8]
    assert data.reads == [0, 1, 2, 3, 4]
    assert "measuring the complexity of 5 samples on each of 1 ranks: 100%" in capsys.readouterr().err
    assert costs(data, lambda x: 1 / 0, complexity_file=file).tolist() == [0, 2, 4, 6, 8]
    assert len(data.reads) == 5 and os.listdir(file.parent) == ["costs.npy"]


def test_without_tqdm_the_log_says_what_takes_so_long(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with caplog.at_level(logging.WARNING, "baguakit"):
        costs(Counted(5), float)
    assert "measuring the complexity of 5 samples" in caplog.text and "baguakit[data]" in caplog.text


@pytest.mark.parametrize(
    "given, error, text",
    [
        ([1, 2], ValueError, r"shape \(2,\) and the dataset 3 samples"),
        ([1, -2, 3], ValueError, "of sample 1 is -2.0"),
        ([1, 2, float("nan")], ValueError, "of sample 2 is nan"),
        (torch.ones(3, 1), ValueError, "shape"),
        (["a", "b", "c"], TypeError, "holds list"),
        (None, ValueError, "complexity has shape"),
        ("nowhere.npy", ValueError, "complexity file 'nowhere.npy' does not exist"),
        (__file__, ValueError, "not an .npy array of numbers"),
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


def test_a_stale_file_is_named_and_what_to_do_about_it(tmp_path):
    """By all ranks, which do not share its folder's reader."""

    def resumed(path, n):
        try:
            return len(Sampler(Counted(n), float, complexity_file=path))
        except ValueError as error:
            return str(error)

    path = tmp_path / "costs.npy"
    assert on_ranks(2, resumed, path, 6) == [3, 3]
    for text in on_ranks(2, resumed, path, 7):
        assert text == (
            f"the complexity file {str(path)!r} has shape (6,) and the dataset 7 samples; it is of another"
            " dataset: delete it to measure again, or pass another complexity_file"
        )


def test_costs_that_cannot_be_are_not_kept(tmp_path):
    path = tmp_path / "costs.npy"
    with pytest.raises(ValueError, match="complexity of sample 2 is nan"):
        costs(Counted(3), lambda x: float("nan") if x == 2 else 1.0, complexity_file=path)
    assert costs(Counted(3), float, complexity_file=path).tolist() == [0, 1, 2]


@pytest.mark.parametrize("n", [9, 1, 0])
def test_ranks_share_the_pass_and_one_writes_the_file(tmp_path, n):
    def measured(path):
        data = Counted(n)
        first = Sampler(data, lambda x: x * x, complexity_file=path)
        return (
            data.reads,
            first.costs.tolist(),
            Sampler(Counted(n), float, complexity_file=path).costs.sum(),
        )

    answers = on_ranks(2, measured, tmp_path / "costs.npy")
    assert sorted(answers[0][0] + answers[1][0]) == list(range(n))
    assert [a[1] for a in answers] == [[i * i for i in range(n)]] * 2
    assert [a[2] for a in answers] == [sum(i * i for i in range(n))] * 2


def test_a_failure_on_one_rank_is_raised_on_all():
    def failing():
        try:
            Sampler(Counted(4), lambda x: 1 / (3 - x))
        except ValueError as error:
            return str(error)

    first, second = on_ranks(2, failing)
    assert first == f"rank 1 could not determine the complexity of the dataset: ValueError: {second}"
    assert second.endswith(" of sample 3 raised ZeroDivisionError: division by zero")


def test_a_file_for_numbers_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"complexity_file=.* stores the results of a function"):
        LoadBalancedSampler(range(2), [1, 2], complexity_file=tmp_path / "x.npy")


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

"""The demo: the split is as it says, the ranks train and are shown, and the algorithms learn what it says."""

import argparse
import sys

import pytest
import torch

import baguakit as bk
from baguakit.command import main
from baguakit.command.demo import ALONE, BASE, FIRST, chosen, row, run
from baguakit.compare.digits import TRAINED, Digits
from baguakit.compare.names import algorithm


@pytest.mark.parametrize("ranks", [1, 3, 4, 10])
def test_split_gives_each_rank_its_digits_and_every_image_to_one(ranks):
    shares = [Digits(rank, ranks) for rank in range(ranks)]
    for rank, share in enumerate(shares):
        images, labels = share.train
        assert images.shape == (len(labels), 64)
        assert set(labels.tolist()) == {d for d in range(10) if d % ranks == rank}
        assert torch.equal(share.test[0], shares[0].test[0]) and torch.equal(share.test[1], shares[0].test[1])
    assert sum(len(share.train[1]) for share in shares) == TRAINED


def test_contenders_are_chosen_by_name():
    every = chosen(None, True)
    assert [c.name for c in every[:2]] == [ALONE, BASE] and all(algorithm(each.algorithm) for each in every)
    assert {c.name.split(",")[0] for c in every[1:]} == {
        name for name in bk.algorithms.__all__ if not name.startswith("async_")
    }
    assert [c.name for c in chosen(None, False)] == [*FIRST] and len(FIRST) == 7
    for name in ("choco, one peer", "choco", "top_k(ratio=0.05)"):
        assert [c.name for c in chosen(name, False)] == [ALONE, BASE, name]
    assert max(len(each.name) for each in every) <= 27  # the column of the table


def test_a_row_compares_with_all_reduce():
    scores, alone = {"test loss": 0.1, "accuracy": 0.99}, {"test loss": 2.0, "accuracy": 0.25}
    base = {"bytes": 100e3, "step": 0.11, "scores": scores, "alone": alone}
    assert row("bytegrad", base | {"bytes": 25e3, "step": 0.035}, base) == [
        *("bytegrad", "99.0%", "25.0 kB", "0.250", "35.0 ms", "3.1 ×")
    ]
    assert row(ALONE, base | {"bytes": 0.0}, None) == ["no communication", "25.0%", "0.0 kB", "", "110.0 ms", ""]


@pytest.mark.slow  # 150 steps with each algorithm
@pytest.mark.timeout(600)
def test_every_algorithm_learns_what_no_rank_could_alone(capsys):
    options = {"rate": None, "ranks": 4, "steps": 150, "seed": 0, "algorithm": None, "all": True, "out": None}
    assert run(argparse.Namespace(**options)) == 0
    table = capsys.readouterr().out.split("------\n")[-1].split("\n\n")[0]
    cells = [line.split("  ") for line in table.splitlines()]
    found = {name: [part.strip() for part in rest if part] for name, *rest in cells}
    read = {name: float(rest[0].rstrip("%")) for name, rest in found.items()}
    assert len(read) == len(chosen(None, True))
    assert read.pop(ALONE) <= 40  # a rank has at most three of ten digits; one tenth is added for luck
    assert read[BASE] >= 97 and min(read.values()) >= 90, read
    assert float(found["bytegrad"][2]) <= 0.27


@pytest.mark.skipif(sys.platform != "linux", reason="the pacing of sockets needs Linux")
def test_the_demo_trains_at_a_rate_prints_and_draws(tmp_path, capsys):
    """Without a rate it runs in test_tuning.py, on the ranks of torchrun."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "loss.png"
    options = ["--rate", "200mbit", "--ranks", "2", "--steps", "4", "--algorithm", "diloco", "--out", str(picture)]
    assert main(["demo", *options]) == 0
    said = capsys.readouterr().out
    assert "2 ranks over gloo at 200 Mb/s; 4 steps with each algorithm" in said
    names = [line.split("  ")[0] for line in said.splitlines() if "%" in line]
    assert names == ["no communication", "gradient_allreduce", "diloco"]
    assert max(map(len, said.replace(str(picture), "").splitlines())) <= 80
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "options, sentence",
    [
        (
            ["--algorithm", "nonsense"],
            "there is no algorithm called 'nonsense'; name one of ddp, ",
        ),
        (["--algorithm", "ddp"], "the demo counts the bytes of attached algorithms; compare, not demo, runs ddp"),
        (["--ranks", "11"], "--ranks is a whole number, 2 to 10, not 11"),
        (["--steps", "0"], "--steps is a whole number, 1 or more, not 0"),
        (["--seed", "-1"], "--seed is a whole number, 0 or more, not -1"),
        (["--rate", "fast"], 'a rate is 8kbit or more, such as "500mbit" or "1gbit"; not \'fast\''),
        (["--out", "nowhere/x.png"], "--out is a .png file in a folder that exists, not nowhere/x.png"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(options, sentence, capsys):
    assert main(["demo", *options]) == 2
    said, errors = capsys.readouterr()
    assert said == "" and sentence in errors and errors.count("\n") == 1

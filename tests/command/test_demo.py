"""The demo: the split is as it says, the ranks train and are shown, and it claims nothing that is not so."""

import sys
from dataclasses import replace

import pytest
import torch

import baguakit as bk
from baguakit.command import main
from baguakit.command.demo import (
    ALONE,
    BASE,
    CONTENDERS,
    TRAINED,
    Digits,
    Result,
    broken_claims,
    chosen,
    columns,
    over,
    row,
)


@pytest.mark.parametrize("ranks", [1, 3, 4, 10])
def test_split_gives_each_rank_its_digits_and_every_image_to_one(ranks):
    shares = [Digits(rank, ranks) for rank in range(ranks)]
    for rank, share in enumerate(shares):
        images, labels = share.train
        assert images.shape == (len(labels), 64)
        assert set(labels.tolist()) == {d for d in range(10) if d % ranks == rank}
        assert torch.equal(share.test[0], shares[0].test[0]) and torch.equal(share.test[1], shares[0].test[1])
    assert sum(len(share.train[1]) for share in shares) == TRAINED


def test_every_algorithm_is_a_contender_but_the_free_running_one():
    assert CONTENDERS[0] is ALONE and CONTENDERS[1] is BASE
    assert {c.family for c in CONTENDERS[1:]} == set(bk.algorithms.__all__) - {"async_model_average"}
    assert sum(c.telling for c in CONTENDERS) == 6


def test_contenders_are_chosen_by_name():
    assert chosen(None, True, 4) == [*CONTENDERS]
    assert [c.name for c in chosen(None, True, 3)] == [c.name for c in CONTENDERS if not c.needs_nodes]
    assert [c.name for c in chosen(None, False, 4) if not c.telling] == ["no communication"]
    assert [c.name for c in chosen("choco", False, 2)] == [ALONE.name, BASE.name, "choco", "choco, one peer"]
    assert [c.name for c in chosen("choco, one peer", False, 2)] == [ALONE.name, BASE.name, "choco, one peer"]


def result(contender):
    sent = {"bytegrad": 25e3, ALONE.name: 0.0}.get(contender.name, 100e3)
    accuracy = 0.25 if contender is ALONE else 0.99
    return Result(contender.name, accuracy, accuracy, sent, 0.0, 0.01, ((sent, 0.01, 0.1),))


RESULTS = [result(contender) for contender in CONTENDERS]


def test_a_step_is_computed_from_bytes_and_compared():
    alone, base, other = (over(each, 8e6) for each in RESULTS[:3])
    assert base.seconds == 0.01 + 0.1 and base.curve == ((100e3, 0.01 + 0.1, 0.1),)
    assert row(other, base) == ["bytegrad", "99.0%", "25.0 kB", "0.250", "35.0 ms", "3.1 ×"]
    assert row(alone, None) == ["no communication", "25.0%", "0.0 kB", "", "10.0 ms", ""]
    widths = [int(each[1:]) for each in columns("100 Mb/s", "measured").values()]
    assert sum(widths) + 2 * 5 <= 80 and widths[0] == max(len(each.name) for each in CONTENDERS)


@pytest.mark.parametrize("ranks, most", [(2, 0.6), (3, 0.5), (4, 0.4), (8, 0.3)])
def test_a_rank_may_reach_alone_only_what_its_digits_give(ranks, most):
    lucky = replace(RESULTS[0], alone=most + 0.01)
    assert broken_claims([replace(lucky, alone=most)], ranks, False) == []
    assert f"more than {most:.0%}" in broken_claims([lucky], ranks, False)[0]


def test_claims_that_are_not_borne_out_are_told():
    def broken(name, complete=True, **changes):
        return broken_claims([replace(r, **changes) if r.contender == name else r for r in RESULTS], 4, complete)

    assert broken("") == []
    assert "41.0%" in broken(ALONE.name, complete=False, alone=0.41)[0]
    assert broken(BASE.name, merged=0.969) == ["gradient_allreduce reads 96.9% of the images and should read 97%"]
    assert broken("local_sgd", merged=0.5, complete=False) == []
    assert broken("bytegrad", sent=28e3) == ["bytegrad sends 28.0% of the bytes of gradient_allreduce, more than 27%"]


@pytest.mark.skipif(sys.platform != "linux", reason="the pacing of sockets needs Linux")
def test_the_demo_trains_at_a_rate_prints_and_draws(tmp_path, capsys):
    """Without a rate it runs in test_tuning.py, on the ranks of torchrun."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "loss.png"
    options = ["--rate", "200mbit", "--ranks", "2", "--steps", "2", "--algorithm", "diloco", "--out", str(picture)]
    assert main(["demo", *options]) == 0
    said = capsys.readouterr().out
    assert "2 ranks, on the CPU, over gloo; 2 steps with each algorithm\nasked for 200 Mb/s; measured" in said
    names = [line.split("  ")[0] for line in said.splitlines() if "%" in line]
    assert names == ["no communication", "gradient_allreduce", "diloco"]
    assert "A step at 200 Mb/s is measured, with every rank kept below 200 Mb/s." in said
    assert max(map(len, said.replace(str(picture), "").splitlines())) <= 80
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "options, sentence",
    [
        (
            ["--algorithm", "nonsense"],
            "no algorithm called 'nonsense' for 4 ranks; choose one of: gradient_allreduce, ",
        ),
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

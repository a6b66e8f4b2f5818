"""The demo: the split is as it says, the ranks train and are shown, and it claims nothing that is not so."""

import copy
import sys

import pytest
import torch

import baguakit as bk
from baguakit.command import main
from baguakit.command.demo import (
    ALONE,
    BASE,
    BY_NODE,
    CONTENDERS,
    REACHES,
    TELLING,
    TRAINED,
    Digits,
    broken_claims,
    chosen,
    columns,
    family,
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
    assert [c.name for c in CONTENDERS[:2]] == [ALONE, BASE]
    assert {family(c.name) for c in CONTENDERS[1:]} == set(bk.algorithms.__all__) - {"async_model_average"}
    assert set(TELLING) | REACHES.keys() <= {c.name for c in CONTENDERS} and len(TELLING) == 6
    assert all(each.rules() for each in CONTENDERS)


def test_contenders_are_chosen_by_name():
    assert chosen(None, True, 4) == [*CONTENDERS]
    assert [c.name for c in chosen(None, True, 3)] == [c.name for c in CONTENDERS if c.name != BY_NODE]
    assert {c.name for c in chosen(None, False, 4)} == {ALONE, *TELLING}
    assert [c.name for c in chosen("choco", False, 2)] == [ALONE, BASE, "choco", "choco, one peer"]
    assert [c.name for c in chosen("choco, one peer", False, 2)] == [ALONE, BASE, "choco, one peer"]
    assert [c.name for c in chosen("top_k(ratio=0.05)", False, 2)] == [ALONE, BASE, "top_k(ratio=0.05)"]


def result(name):
    sent = {"bytegrad": 25e3, ALONE: 0.0}.get(name, 100e3)
    scores = {"loss": 0.1, "accuracy": 0.25 if name == ALONE else 0.99}
    course = ((sent, 0.01),)
    return {"bytes": sent, "step": 0.01, "scores": scores, "alone": scores, "between": 0.0, "course": course}


RESULTS = {contender.name: result(contender.name) for contender in CONTENDERS}


def test_a_step_is_computed_from_bytes_and_compared():
    alone, base, other = (over(RESULTS[name], 8e6) for name in (ALONE, BASE, "bytegrad"))
    assert base["step"] == 0.01 + 0.1 and base["course"] == [(100e3, 0.01 + 0.1)]
    assert row("bytegrad", other, base) == ["bytegrad", "99.0%", "25.0 kB", "0.250", "35.0 ms", "3.1 ×"]
    assert row(ALONE, alone, None) == ["no communication", "25.0%", "0.0 kB", "", "10.0 ms", ""]
    widths = [int(each[1:]) for each in columns("100 Mb/s", "measured").values()]
    assert sum(widths) + 2 * 5 <= 80 and widths[0] == max(len(each.name) for each in CONTENDERS)


def broken(name, complete=True, ranks=4, sent=None, **accuracies):
    """Return the claims that the results contradict, with other bytes or accuracies of a contender."""
    found = copy.deepcopy(RESULTS)
    found[name] |= {kind: {"accuracy": accuracy} for kind, accuracy in accuracies.items()}
    found[name]["bytes"] = sent or found[name]["bytes"]
    return broken_claims(found, ranks, complete)


@pytest.mark.parametrize("ranks, most", [(2, 0.6), (3, 0.5), (4, 0.4), (8, 0.3)])
def test_a_rank_may_reach_alone_only_what_its_digits_give(ranks, most):
    assert broken(ALONE, complete=False, ranks=ranks, alone=most) == []
    assert f"more than {most:.0%}" in broken(ALONE, complete=False, ranks=ranks, alone=most + 0.01)[0]


def test_claims_that_are_not_borne_out_are_told():
    assert broken(BASE) == []
    assert "41.0%" in broken(ALONE, complete=False, alone=0.41)[0]
    assert broken(BASE, scores=0.969) == ["gradient_allreduce reads 96.9% of the images and should read 97%"]
    assert broken("local_sgd", scores=0.5, complete=False) == []
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
            "there is no algorithm called 'nonsense'; name one of ddp, ",
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

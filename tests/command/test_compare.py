"""`baguakit compare`: algorithms and a task of a user, results that add up, and sentences for all that goes wrong."""

import json
import sys

import pytest

from baguakit.command import compare, main
from baguakit.compare.table import Table

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the pacing of sockets needs Linux")

TASK = """
import torch


def task(seed, rank, ranks):
    torch.manual_seed(seed)
    x = torch.randn(64, 8)
    y = x @ torch.randn(8, 4)
    mine = slice(rank, None, ranks)
    mse = torch.nn.functional.mse_loss
    model = torch.nn.Linear(8, 4)
    return model, lambda model, step: mse(model(x[mine]), y[mine]), lambda model: float(mse(model(x), y))


def no_task(seed, rank, ranks):
    return 3
"""
MINE = """
from dataclasses import dataclass

import baguakit as bk


@dataclass(frozen=True, repr=False)
class Raises(bk.stages.Stage):
    def __call__(self, x, state, comm):
        raise RuntimeError("not finished yet")


rule = bk.during_backward(bk.stages.Mean())
raises = bk.during_backward(Raises())
"""
NAMES = ("task_of_a_user", "mine_of_a_user")
TINY = [
    "--task",
    "task_of_a_user:task",
    "--hosts=2",
    "--steps=6",
    "--trials=1",
    "--rate=1gbit",
    "--out=out",
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of a user, from which the command is started."""
    for name, text in zip(NAMES, (TASK, MINE), strict=True):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    for name in NAMES:
        sys.modules.pop(name, None)


def results(folder):
    """Return (contender, seed, steps) of each line of the results, in order."""
    cells = [json.loads(line)["cell"] for line in (folder / "out" / "results.jsonl").read_text().splitlines()]
    return [(cell["contender"], cell["seed"], cell["steps"]) for cell in cells]


@pytest.mark.slow  # ranks of its own
def test_it_compares_a_user_s_algorithm_names_one_that_raises_and_a_second_run_adds(folder, capsys):
    assert main(["compare", "mine_of_a_user:rule", "mine_of_a_user:raises", *TINY, "--against="]) == 1
    jobs = [2, 6, 20], [2, 9, 20]  # steps of a trial, of the training and of the timing
    first = [("DDP", 1, steps) for steps in jobs[0]] + [("mine_of_a_user:rule", 1, steps) for steps in jobs[1]]
    first.append(("mine_of_a_user:raises", 1, 2))
    assert results(folder) == first
    table = Table(folder / "out" / "results.jsonl")
    losses = {cell["contender"]: result["losses"] for cell, result in table if cell["steps"] in (6, 9)}
    assert losses["DDP"] == losses["mine_of_a_user:rule"][:6]  # a mean by either is the same mean
    sent = {cell["contender"]: result["sent"] for cell, result in table if "sent" in result}
    assert len(sent) == 2 and all(36 * 4 <= each < 3000 for each in sent.values())  # 36 values, and small messages
    said = " ".join(capsys.readouterr().out.split())
    assert "2 ranks at 1gbit; task task_of_a_user:task (source " in said and ", warm-up of 1 steps, validated" in said
    assert "0%: DDP, lr 0.0005, 2 steps" in said and "Seconds and MB to a loss are composed of both." in said
    assert "DDP: " in said and " s to DDP's loss of " in said and "1.00 ×" in said
    assert "mine_of_a_user:raises failed: baguakit.PeerError: during_backward(Raises()), bucket 0, round 0" in said
    assert "not finished yet" in said
    page = (folder / "out" / "table.md").read_text()
    assert "| mine_of_a_user:rule | 0.0005 | " in page and "each paced at 1 Gb/s" in page

    assert main(["compare", "mine_of_a_user:rule", *TINY, "--against=bytegrad", "--seeds=2"]) == 0
    added = [("bytegrad", 1, 2), ("bytegrad", 1, 9), ("bytegrad", 1, 20)]
    added += [("DDP", 2, 6), ("mine_of_a_user:rule", 2, 9), ("bytegrad", 2, 9)]
    assert results(folder) == first + added
    assert "| bytegrad | " in (folder / "out" / "table.md").read_text()


def test_an_interrupt_keeps_what_is_there(folder, capsys, monkeypatch):
    def interrupt(job):
        if job.timed:
            raise SystemExit(130)

    monkeypatch.setattr(compare, "progress", lambda *_: interrupt)
    with pytest.raises(SystemExit, match="130"):
        main(["compare", *TINY, "--against="])
    said = " ".join(capsys.readouterr().out.split())
    assert "Interrupted. The results so far are kept in out; the same command goes on from there." in said
    assert "DDP is not complete; missing: timing." in said and results(folder) == [("DDP", 1, 2), ("DDP", 1, 6)]


def test_what_does_not_fit_into_the_minutes_is_named(folder, capsys):
    assert main(["compare", *TINY, "--against=bytegrad", "--minutes=1e-9"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    for name in ("DDP", "bytegrad"):
        assert f"{name} is not complete; missing: trials, trainings, timing." in said
    assert "out/table.md" in said


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["nonsense"], "there is no algorithm called 'nonsense'; name one of ddp, "),
        (["mine_of_a_user:nothing"], "cannot import mine_of_a_user:nothing in this folder: AttributeError: "),
        (["--task=nowhere:task"], "cannot import nowhere:task in this folder: ModuleNotFoundError: No module named "),
        (["--task=mine_of_a_user:rule"], "mine_of_a_user:rule is not a function; a task is a function of (seed, rank,"),
        (["--hosts=1"], "hosts is a whole number, 2 or more, not 1"),
        (["--steps=3"], "steps is a whole number, 4 or more, not 3"),
        (["--rate=fast"], 'a rate is 8kbit or more, such as "500mbit" or "1gbit"; not \'fast\''),
        (["--minutes=0"], "--minutes is "),
    ],
)
def test_wrong_words_are_refused_in_one_sentence(words, sentence, folder, capsys):
    assert main(["compare", "--out=out", *words]) == 2
    said, errors = capsys.readouterr()
    assert said == "" and errors.startswith(f"baguakit: {sentence}") and errors.count("\n") == 1


@pytest.mark.slow  # ranks of its own
def test_a_task_that_is_none_is_named(folder, capsys):
    assert main(["compare", *TINY, "--against=", "--task=task_of_a_user:no_task"]) == 1
    assert "task_of_a_user:no_task returns a tuple (model, loss, validate), not int" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.slow  # ranks of its own
def test_free_running_ranks_are_paced_from_beginning_to_end(folder, capsys):
    assert main(["compare", *TINY, "--against=async_model_average", "--steps=40"]) == 0
    rows = [json.loads(line) for line in (folder / "out" / "results.jsonl").read_text().splitlines()]
    free = [row["cell"] for row in rows if row["cell"]["contender"] == "async_model_average"]
    assert len(free) == 2 and all(cell["rate"] == "1gbit" for cell in free)
    assert "| async_model_average | " in (folder / "out" / "table.md").read_text()


@pytest.mark.timeout(600)
@pytest.mark.slow  # the GPT
def test_pictures_show_the_language_model(folder, capsys):
    pytest.importorskip("matplotlib")
    assert main(["compare", "--hosts=2", "--steps=4", "--trials=1", "--rate=1gbit", "--against=", "--out=out"]) == 0
    assert (folder / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "out" / "loss.svg").read_text()
    assert "; task baguakit.compare.language:gpt (text " in " ".join(capsys.readouterr().out.split())

"""examples/language_model.py: it learns, holds out the same files everywhere, and resumes as if never interrupted."""

import importlib.util
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from pool import ranks

import baguakit as bk

pytest.importorskip("tqdm")

PROGRAM = Path(__file__).parents[1] / "examples" / "language_model.py"
TINY = ["--layers=1", "--width=32", "--heads=2", "--context=16", "--batch=8", "--lr=0.01"]
HELD_OUT = {"1.py", "7.py"}  # of 0.py to 39.py


def program():
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("language_model", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of forty small files, each with a letter of its own, and of files that are not read."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        (folder / f"{i}.py").write_text(f"def function_{chr(256 + i)}(x):\n    return x + {i}\n" * 10)
    for name in ("tests/test_x.py", "site-packages/x.py", "x.so"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("is not read")
    return folder


def files_in(windows):
    """Return the files whose letters are in windows."""
    text = bytes(windows[:, 0].tolist()).decode(errors="replace")
    return {f"{i}.py" for i in range(40) if chr(256 + i) in text}


def options_of(module, *words):
    """Return the options of a command line under torchrun."""
    with mock.patch.dict(os.environ, RANK="0"):
        return module.arguments([str(word) for word in words])


def trained(*words):
    """Train on this rank; return all weights, the validations, and the seeds of the batches."""
    module = program()
    with mock.patch.object(module, "drawn", side_effect=module.drawn) as drawn:
        try:
            model, losses = module.train(options_of(module, *TINY, *words), bk.Comm(), torch.device("cpu"))
        except SystemExit as error:
            return str(error)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return weights, losses, [call.args[2:] for call in drawn.call_args_list]


def without_times(losses):
    return [(step, bits) for step, _, bits in losses]


def resumes(text, folder, *words):
    """Train in one piece and in two, to the same weights and losses, which fall; return the losses."""
    words = ("--text", text, "--every=10", *words)
    whole = ranks(2, trained, "--steps=30", *words)
    ranks(2, trained, "--steps=20", "--folder", folder, *words)
    resumed = ranks(2, trained, "--steps=30", "--folder", folder, *words)
    assert sorted(path.name for path in folder.iterdir()) == ["00000030-0.pt", "00000030-1.pt"]
    weights, losses, _ = whole[0]
    assert all(torch.equal(weights, other) for other, *_ in [*whole, *resumed])
    assert all(without_times(other) == without_times(losses) for _, other, _ in [*whole, *resumed])
    for found, begin in ((whole, 1), (resumed, 21)):  # each rank has batches of its own
        assert [seeds for *_, seeds in found] == [[(1, step, rank) for step in range(begin, 31)] for rank in (0, 1)]
    steps, bits = zip(*without_times(losses), strict=True)
    assert steps == (10, 20, 30) and 8 > bits[0] > bits[1] > bits[2]
    return bits


def test_files_held_out_are_the_same_everywhere_and_in_no_batch(folder, tmp_path):
    module = program()
    train, held_out, digest = module.read(folder, 16)
    assert files_in(held_out) == HELD_OUT and files_in(train) == {f"{i}.py" for i in range(40)} - HELD_OUT
    assert module.read(folder, 16)[2] == digest
    for i in (3, 7):  # with no others beside them, they are where they were
        (tmp_path / f"{i}.py").write_bytes((folder / f"{i}.py").read_bytes())
    train, held_out, other = module.read(tmp_path, 16)
    assert (files_in(train), files_in(held_out)) == ({"3.py"}, {"7.py"}) and other != digest
    with pytest.raises(ValueError, match=r"too little text: 0 bytes, and 0 held out"):
        module.read(tmp_path / "absent", 16)


def test_a_batch_belongs_to_its_seed_step_and_rank(folder):
    module = program()
    windows = module.read(folder, 16)[0]
    first = module.drawn(windows, 4, 1, 2, 0)
    assert first.shape == (4, 17) and torch.equal(first, module.drawn(windows, 4, 1, 2, 0))
    for other in ((1, 2, 1), (1, 3, 0), (2, 2, 0)):
        assert not torch.equal(first, module.drawn(windows, 4, *other))


def test_it_learns_and_resumes(folder, tmp_path):
    """Checkpoints of other runs are refused, and so are those that some rank lacks."""
    assert resumes(folder, tmp_path, "--algorithm=bytegrad(error_feedback=True)")[-1] < 4
    again = ("--text", folder, "--folder", tmp_path, "--algorithm=bytegrad(error_feedback=True)")
    said = ranks(2, trained, *again, "--seed=2")
    assert all("holds checkpoints of another run" in each and "'seed': '1'" in each for each in said)
    (tmp_path / "00000030-1.pt").unlink()
    assert all("holds checkpoints of another run, None" in each for each in ranks(2, trained, *again))


def test_ranks_with_different_texts_are_told_so(folder, tmp_path):
    (tmp_path / "7.py").write_bytes((folder / "7.py").read_bytes())
    (tmp_path / "3.py").write_bytes((folder / "3.py").read_bytes())

    def train():
        return trained("--text", tmp_path if bk.Comm().rank else folder)

    assert all(said.startswith("the ranks have different texts: ") for said in ranks(2, train))


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--algorithm mine", "mine is no algorithm: name 'mine' is not defined"),
        ("--algorithm byte()", "byte() is no algorithm: name 'byte' is not defined"),
        ("--algorithm bytegrad(3)", "bytegrad(3) is no algorithm: compressor is "),
        ("--batch 0", "--batch is greater than 0, not 0"),
        ("--lr nan", "--lr is greater than 0, not nan"),
        ("--width 30 --heads 4", "--width is a multiple of twice --heads, not 30 for 4"),
    ],
)
def test_errors_of_arguments_are_sentences(words, sentence, capsys):
    with pytest.raises(SystemExit):
        options_of(program(), *words.split())
    assert sentence in capsys.readouterr().err


@pytest.mark.slow  # each trains three times
@pytest.mark.parametrize(
    "words",
    [
        ("--optimizer=muon",),
        ("--optimizer=muon", "--algorithm=bytegrad(UInt4(), error_feedback=True)"),
        ("--algorithm=diloco(every=4, lr=1.0, momentum=0.5)",),
        ("--algorithm=diloco(every=4, fragments=2, delay=1, lr=1.0, momentum=0.5)",),
        ("--algorithm=decentralized(Ring())",),
        ("--algorithm=during_backward(Mean(), stop=5) + after_step(NeighborMean(Ring()), start=5)",),
        ("--algorithm=qadam(warmup_steps=5)", "--optimizer=sgd"),
    ],
    ids=" ".join,
)
def test_other_algorithms_and_optimizers_resume(words, folder, tmp_path):
    """Among them those that keep flights in the air from one step to the next, and those with weights of each rank."""
    resumes(folder, tmp_path, *words)


@pytest.mark.slow  # trains
def test_free_running_ranks_learn_and_validate_together(folder):
    """Ranks exchange when both are ready, so that runs differ; validations are those of one mean."""
    words = ("--text", folder, "--steps=60", "--every=30", "--algorithm=async_model_average()")
    (_, losses, _), (_, other, _) = ranks(2, trained, *words)
    assert losses == other and len(losses) == 2 and all(bits < 6 for _, _, bits in losses)

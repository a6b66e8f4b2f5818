"""examples/digits.py: the split is what it says, the program runs, and it refuses to claim what is not so."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import baguakit as bk

for needed in ("sklearn", "matplotlib", "tqdm"):
    pytest.importorskip(needed)

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "examples" / "digits.py"


@pytest.fixture(scope="module")
def digits():
    spec = importlib.util.spec_from_file_location("digits", PROGRAM)
    module = sys.modules["digits"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["digits"]


def torchrun(ranks, *arguments):
    """What the program printed and wrote to stderr, and its exit status."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", PROGRAM]
    # The package as it lies here, installed or not; and the CPU, whatever the machine has.
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=100)
    return done.stdout, done.stderr, done.returncode


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 10])
def test_split_gives_each_rank_its_digits_and_every_image_to_one(digits, ranks):
    shares = [digits.Digits(rank, ranks) for rank in range(ranks)]
    for rank, share in enumerate(shares):
        images, labels = share.train
        assert images.shape == (len(labels), 1, 8, 8)
        assert set(labels.tolist()) == {d for d in range(10) if d % ranks == rank}
        assert torch.equal(share.test[0], shares[0].test[0])
        assert torch.equal(share.test[1], shares[0].test[1])
    images = torch.cat([share.train[0] for share in shares] + [shares[0].test[0]]).flatten(1)
    everything = torch.tensor(digits.load_digits().data, dtype=torch.float32) / 16
    assert sorted(images.tolist()) == sorted(everything.tolist())
    assert set(shares[0].test[1].tolist()) == set(range(10))


def test_batches_are_drawn_from_what_the_rank_holds_and_repeat(digits):
    share = digits.Digits(1, 4)
    labels = [labels for _, labels in share.batches(3, seed=5)]
    assert set(torch.cat(labels).tolist()) == {1, 5, 9}
    assert all(map(torch.equal, labels, [labels for _, labels in share.batches(3, seed=5)]))
    assert not torch.equal(labels[0], next(share.batches(1, seed=6))[1])


def test_contenders_are_called_as_in_algorithms(digits):
    assert digits.CONTENDERS[0].name == "no communication"
    assert {c.family for c in digits.CONTENDERS[1:]} <= set(bk.algorithms.__all__)


def test_what_a_rank_may_reach_alone(digits):
    most = {ranks: digits.most_without_communication(ranks) for ranks in (1, 2, 3, 4, 8)}
    assert most == {1: 1.1, 2: 0.6, 3: 0.5, 4: 0.4, 8: 0.3}


def test_claims_that_are_not_borne_out_are_told(digits):
    def result(contender):
        sent = {"bytegrad": 25.0, "no communication": 0.0}.get(contender.name, 100.0)
        accuracy = 0.25 if contender.name == "no communication" else 0.99
        return digits.Result(contender, accuracy, accuracy, sent, 0.0, 0.0, 1.0, [(sent, 0.1)])

    def broken(name, every=True, **changes):
        changed = [replace(r, **changes) if r.contender.name == name else r for r in results]
        return digits.broken_claims(changed, 4, every)

    results = [result(contender) for contender in digits.CONTENDERS]
    assert broken("") == []
    assert "41.0%" in broken("no communication", merged=0.41)[0]
    assert "41.0%" in broken("no communication", every=False, alone=0.41)[0]
    assert broken("gradient_allreduce", merged=0.979) == [
        "gradient_allreduce reads 97.9% of the images and should read 98%"
    ]
    assert broken("local_sgd", merged=0.949) == ["local_sgd reads 94.9% of the images and should read 95%"]
    assert broken("local_sgd", merged=0.949, every=False) == []
    assert "28.0%" in broken("bytegrad", bytes_per_step=28.0)[0]


def test_program_trains_prints_and_draws(digits, tmp_path):
    picture = tmp_path / "loss.png"
    said, complaints, status = torchrun(2, "--algorithm", "decentralized", "--steps", "3", "--out", str(picture))
    assert status == 0, complaints
    assert "2 ranks, on the CPU, over gloo" in said
    rows = [line for line in said.splitlines() if line.startswith("decentralized")]
    contenders = [c for c in digits.CONTENDERS if c.family == "decentralized"]
    for line, contender in zip(rows, contenders, strict=True):
        assert line.startswith(contender.name + " ") and line.endswith(repr(contender.algorithm))
    assert f"The picture is {picture}" in said
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_program_refuses_an_unknown_name_in_one_sentence():
    said, complaints, status = torchrun(2, "--algorithm", "nonsense")
    assert status != 0 and said == ""
    assert (
        complaints.count(
            "no contender called 'nonsense' for 2 ranks; choose one of: no communication, gradient_allreduce"
        )
        == 1
    )

"""docs/elastic.md: its program trains on two ranks that meet at a store."""

import os
import subprocess
import sys

import pytest
from commands import ROOT, blocks_of

[PROGRAM] = blocks_of(ROOT / "docs" / "elastic.md")
# The names that the page leaves to its reader.
BEFORE = """
import torch


def build():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), iter(lambda: torch.randn(4, 3), None)


def loss(model, batch):
    return model(batch).square().mean()
"""
AFTER = """
print(f"rank {comm.rank} of {comm.size}, step {att.step}", [p.tolist() for p in model.parameters()])
"""


@pytest.mark.slow  # three processes import torch
@pytest.mark.timeout(240)
def test_the_program_of_the_page_trains(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    serve = [sys.executable, "-u", "-m", "baguakit.store", "--bind", "127.0.0.1:0"]
    store = subprocess.Popen(serve, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        endpoint = store.stdout.readline().split()[-1].removesuffix(".")
        program = PROGRAM.replace("10.0.0.1:29400", endpoint).replace("10_000", "3")
        assert endpoint in program and "att.step < 3" in program
        (tmp_path / "train.py").write_text(BEFORE + program + AFTER)
        words, pipes = [sys.executable, tmp_path / "train.py"], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks = [subprocess.Popen(words, env=environment, text=True, **pipes) for _ in range(2)]
        ended = [rank.communicate(timeout=200) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], ended
        said = sorted(out.splitlines()[-1] for out, _ in ended)
        assert [line.split(" [")[0] for line in said] == ["rank 0 of 2, step 3", "rank 1 of 2, step 3"]
        assert said[0].split(" [", 1)[1] == said[1].split(" [", 1)[1]  # equal weights
    finally:
        store.terminate()
        store.wait()
        store.stdout.close()

"""docs/trainers/nanochat.md: its program, and the collectives of the optimizers of nanochat and modded-nanogpt."""

import os
import subprocess
import sys
import warnings

import pytest
import sharded_steps
import torch
import torch.distributed as dist
from pool import pickle, ranks
from programs import ROOT, program_of
from torch.nn import functional

import baguakit as bk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
if hasattr(pickle, "register_pickle_by_value"):
    pickle.register_pickle_by_value(sharded_steps)

GRADIENTS = ("all_reduce", "reduce_scatter", "all_to_all")
EXACT = bk.backend.Policy(None)
UINT8 = bk.backend.Policy(operations=GRADIENTS, least=4096)
WIDTH = 64


def nanochat(group, lr=0.02, steps=6):
    """Train five square layers between an embedding and a gain; return the losses and the weights."""
    torch.manual_seed(0)
    table = torch.nn.Parameter(torch.randn(48, WIDTH))
    layers = [torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(5)]
    gain = torch.nn.Parameter(torch.ones(WIDTH))
    groups = [
        {"params": [table, gain], "kind": "adam", "lr": lr},
        {"params": layers, "kind": "muon", "lr": lr},
    ]
    optimizer, losses = sharded_steps.Stacked(groups, group), []
    for step in range(steps):
        tokens = torch.randint(48, (32,), generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        x = table[tokens]
        for layer in layers:
            x = functional.relu(x @ layer.T) + x
        loss = functional.cross_entropy(x * gain @ table.T / WIDTH, (tokens + 1) % 48)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([p.detach().flatten() for p in (table, gain, *layers)])


def modded(group, steps=6):
    """Train a bank of matrices and an embedding; return the losses, the weights, and the lower bits of this rank."""
    torch.manual_seed(0)
    bank = torch.nn.Parameter((torch.randn(6, WIDTH, WIDTH) / 8).bfloat16())
    table = torch.nn.Parameter(torch.randn(96, WIDTH))
    optimizer, losses = sharded_steps.Banked(bank, table, group), []
    for step in range(steps):
        tokens = torch.randint(96, (32,), generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        x = table[tokens].bfloat16()
        for layer in bank:
            x = functional.relu(x @ layer) + x
        loss = functional.cross_entropy(x.float() @ table.T / WIDTH, (tokens + 1) % 96)
        bank.grad = table.grad = None
        loss.backward()
        before = optimizer.exact().clone()
        optimizer.step(tokens)
        assert not torch.equal(optimizer.exact(), before)
        losses.append(loss.item())
    return losses, torch.cat([bank.detach().float().flatten(), table.detach().flatten()])


def over(policy, train, *given):
    """Train in a group of the backend, or with no policy of gloo; return what it returns, and the report's rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames the calls that these programs make
        if policy is None:
            return train(dist.group.WORLD, *given), {}
        bk.backend.register(policy)
        group = dist.new_group(backend="bagua")
        before = {(r.operation, r.format, r.reason): (r.calls, r.bytes) for r in bk.backend.report().rows}
        try:
            found = train(group, *given)
        finally:
            dist.destroy_process_group(group)
        rows = {}
        for r in bk.backend.report().rows:
            calls, sent = before.get((r.operation, r.format, r.reason), (0, 0))
            if r.calls > calls:
                rows[r.operation, r.format] = (r.calls - calls, r.bytes - sent)
        return found, rows


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("train", [nanochat, modded])
def test_an_exact_policy_is_gloo_and_8_bits_keep_replicas_equal(train, n):
    def run():
        (plain, weights), _ = over(None, train)
        (losses, same), _ = over(EXACT, train)
        (near, rounded), _ = over(UINT8, train)
        return plain, weights, losses, same, near, rounded

    results = ranks(n, run)
    for plain, weights, losses, same, near, rounded in results:
        assert losses == plain and torch.equal(same, weights)
        assert torch.equal(rounded, results[0][5]) and not torch.equal(rounded, weights)
        assert near[0] == plain[0] and near[-1] < plain[0]
        assert all(map(torch.isfinite, rounded))


@pytest.mark.parametrize("n", [2, 3])
def test_gradients_are_sent_in_8_bits_and_weights_as_they_are(n):
    """Each rank sends every other one its part: of a stack of 5 or 6 matrices, and of the embedding's rows."""
    steps, row_bytes = 6, bk.compressors.MinMaxUInt8().row_bytes
    for _, rows in ranks(n, over, UINT8, nanochat):
        parts = [-(-5 // n) * WIDTH * WIDTH, 48 // n * WIDTH]
        assert rows["reduce_scatter", "MinMaxUInt8()"] == (2 * steps, steps * (n - 1) * sum(map(row_bytes, parts)))
        assert rows["all_gather", "exact"] == (2 * steps, steps * (n - 1) * sum(4 * each for each in parts))
        assert rows["all_reduce", "exact"][0] == steps  # of the gain: 256 bytes


def test_compressed_weights_lose_small_updates():
    """With all-gathers in the policy, three small steps of the layers are lost in rounding: the page warns of it."""
    weights, layers = bk.backend.Policy(operations=("all_gather",), least=4096), slice(-5 * WIDTH * WIDTH, None)

    def moved(policy):
        """From the third step to the sixth."""
        third, sixth = (over(policy, nanochat, 1e-5, steps)[0][1][layers] for steps in (3, 6))
        return sixth - third

    def run():
        wanted = moved(EXACT)
        return (moved(weights) - wanted).norm() / wanted.norm()

    assert all(lost > 0.8 for lost in ranks(2, run))


def test_the_page_runs(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(program_of("nanochat"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    flew = {line.split()[0]: line for line in done.stdout.splitlines()[1:] if line}
    assert "MinMaxUInt8()" in flew["reduce_scatter"] and "exact" in flew["all_gather"]

"""docs/trainers/torchtitan.md: its programs run in torchtitan's trainer, on CPUs, as FSDP2 and DiLoCo do."""

import json
import os
import subprocess
import sys

import pytest
import torch
from programs import ROOT, needs, program_of

import baguakit as bk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STAGE = "    handle = bk.interop.fsdp(trainer.model_parts[0], bk.stages.CompressedMean())\n"
REPORT = "    print(handle.report())\n    handle.detach()\n"


def run(folder, programs, ranks, groups):
    """Return what each program found, by rank."""
    page = folder / "programs.json"
    page.write_text(json.dumps(programs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [str(ROOT / "tests" / "trainers" / "titan.py"), str(folder), str(page), str(groups)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"programs.json.{rank}").read_text()) for rank in range(ranks)]


def test_a_stage_in_fsdp_is_torchtitans_own_sum(tmp_path):
    needs("torchtitan")
    program = program_of("torchtitan")
    assert STAGE in program and REPORT in program
    plain = program.replace(STAGE, "").replace(REPORT, "").replace("import baguakit as bk\n", "")
    programs = {
        "plain": plain,
        "exact": program.replace("CompressedMean()", "Mean()"),
        "8 bits": program,
        "feedback": program.replace(
            "bk.stages.CompressedMean()", "bk.stages.ErrorFeedback(bk.stages.CompressedMean())"
        ),
    }
    found = run(tmp_path, programs, ranks=2, groups=1)
    assert found[0] == found[1]
    found = found[0]
    assert found["exact"]["losses"] == pytest.approx(found["plain"]["losses"], rel=1e-4)
    torch.testing.assert_close(*(torch.tensor(found[name]["last"]) for name in ("exact", "plain")), rtol=0, atol=1e-4)
    row_bytes = bk.compressors.MinMaxUInt8().row_bytes
    for name, sent in (("exact", lambda n: 4 * n), ("8 bits", row_bytes), ("feedback", lambda n: row_bytes(n) + 4)):
        assert found[name]["losses"][-1] < found[name]["losses"][0]
        for values, flights, bytes_sent, _ in found[name]["rows"]:  # half for the other rank, and whether all is finite
            assert flights == 5 and bytes_sent == flights * sent(values // 2)


def by_hand(first, rates):
    """Train two groups of two ranks in one process; average the groups after every second step, as DiLoCo does."""
    from titan import ARGS, batches
    from torchtitan.models.llama3 import Transformer

    groups = []
    for group in range(2):
        model = Transformer(ARGS)
        with torch.no_grad():
            model.init_weights(buffer_device=torch.device("cpu"))
        torch.nn.utils.vector_to_parameters(first.clone(), model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        groups.append((model, optimizer, [batches(2 * group + rank) for rank in range(2)]))
    anchor, momentum, mu = first.clone(), torch.zeros_like(first), 0.43  # 1 − 0.8/√2
    for step, rate in enumerate(rates, 1):
        for model, optimizer, streams in groups:
            optimizer.zero_grad()
            for stream in streams:
                inputs, labels = next(stream)
                logits = model(inputs["input"]).flatten(0, 1).float()
                (
                    torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / (2 * labels.numel())
                ).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        if step % 2 == 0:
            vectors = [torch.nn.utils.parameters_to_vector(model.parameters()).detach() for model, _, _ in groups]
            difference = anchor - sum(vectors) / 2
            momentum = mu * momentum + difference
            anchor = anchor - 0.8 * (difference + mu * momentum)
            for model, _, _ in groups:
                torch.nn.utils.vector_to_parameters(anchor.clone(), model.parameters())
    return [torch.nn.utils.parameters_to_vector(model.parameters()).detach() for model, _, _ in groups]


def test_diloco_between_groups_is_its_equation(tmp_path):
    needs("torchtitan")
    found = run(tmp_path, {"groups": program_of("torchtitan", 1)}, ranks=4, groups=2)
    weights = [torch.tensor(each["groups"]["last"]) for each in found]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[2], weights[3])
    assert not torch.equal(weights[0], weights[2])  # the fifth step is each group's own
    wanted = by_hand(torch.tensor(found[0]["groups"]["first"]), found[0]["groups"]["rates"])
    for mine, other in zip(weights[::2], wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-4)

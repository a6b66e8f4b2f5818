"""docs/trainers/timm.md: its program runs on two ranks as in DDP, and with other algorithms."""

import pytest
from programs import FOUND, REPORTED, instead, needs, on_two_ranks, program_of, theorems, without

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
# On the package index torchvision is built for CUDA only, and does not import beside a torch for CPUs. The program uses
# nothing of it, and gets a stand-in.
STAND_IN = """
import sys
import torch
from unittest.mock import MagicMock
if torch.version.cuda is None and "torchvision" not in sys.modules:
    for part in ("", ".datasets", ".models", ".models.feature_extraction", ".ops", ".ops.misc"):
        sys.modules["torchvision" + part] = MagicMock()
    for part in ("", ".functional"):
        sys.modules["torchvision.transforms" + part] = MagicMock()
    sys.modules["torchvision.ops.misc"].FrozenBatchNorm2d = type("FrozenBatchNorm2d", (torch.nn.Module,), {})
"""


def with_scaler(program: str) -> str:
    """Return the program as `train.py` is with fp16: `NativeScaler` runs backward, clips and steps."""
    program = program.replace("bfloat16", "float16").replace("            optimizer.step()\n", "")
    program = program.replace("            dispatch_clip_grad(task.get_clip_parameters(), 1.0)\n", "")
    given = "clip_grad=1.0, parameters=task.get_clip_parameters(), need_update=update"
    program = program.replace("loss.backward()", f"scaler(loss, optimizer, {given})")
    program = program.replace("losses = []", 'losses = []\nscaler = NativeScaler(device="cpu")')
    program = program.replace("bytegrad())", "bytegrad(), scaler=scaler._scaler)")
    return program.replace("timm.utils import", "timm.utils import NativeScaler,")


def test_the_page_holds(tmp_path):
    needs("timm")
    program = STAND_IN + program_of("timm")
    averaged = "bk.primitives.mean_(list(task.get_trainable_module(ema=True).parameters()), bk.Comm())\n    att.merge()"
    local = instead(program, "bk.algorithms.diloco(every=2)").replace(
        "distribute_bn(", f"{averaged}\n    distribute_bn("
    )
    smooth = "losses += sum([p.flatten().tolist() for p in task.get_trainable_module(ema=True).parameters()], [])"
    found = theorems(tmp_path, program, smooth, programs={"diloco": local})
    assert {each["steps"] for runs in found.values() for each in runs if "steps" in each} == {6}
    for name, (one, other) in found.items():  # the moving averages of weights, after 12 losses
        assert len(one["losses"]) > 12 and one["losses"][12:] == other["losses"][12:], name


def test_native_scaler_is_that_of_ddp(tmp_path):
    """The first scale overflows: every rank skips these updates, and none is misread."""
    needs("timm")
    program = with_scaler(STAND_IN + program_of("timm"))
    scale = "\nfound['scale'] = scaler._scaler.get_scale()\n"
    programs = {
        "ddp": without(program) + FOUND + scale,
        "exact": instead(program, "bk.algorithms.gradient_allreduce()") + FOUND + scale + REPORTED,
        "bytegrad": program + FOUND + scale + REPORTED,
    }
    found = on_two_ranks(tmp_path, programs)
    for key in ("losses", "weights"):
        assert found["exact"][0][key] == pytest.approx(found["ddp"][0][key], rel=1e-3, abs=1e-5)
    assert found["bytegrad"][0]["weights"] == found["bytegrad"][1]["weights"]
    assert len({each["scale"] for runs in found.values() for each in runs}) == 1

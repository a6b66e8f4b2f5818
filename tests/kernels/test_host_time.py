"""A flight on a GPU costs the host a few calls, however long the bucket is. No GPU is needed; see `recording.py`."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from formats import FORMATS, NAMES, sample
from torch.utils._python_dispatch import TorchDispatchMode

import baguakit as bk
from baguakit.kernels import operators

HERE = Path(__file__).parent
CASES = ("bytegrad", "bytegrad, error feedback", "bytegrad, 100 MiB", "bytegrad, no whole tiles")
CASES += ("bytegrad, in one kernel", "bytegrad, error feedback, in one kernel")
CASES += ("five exchanges of rows, in one kernel each", "five exchanges of rows in four bits, in one kernel each")
NOTHING = ("new_empty", "split_with_sizes", "to", "lift_fresh", "detach_")
CASES += ("power_sgd, 1 layer", "power_sgd, 3 layers")
every = pytest.mark.parametrize("name", NAMES)


@functools.cache
def recorded():
    """Return the facts that `recording.py` prints, by case. Most of the time goes into importing torch again."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run([sys.executable, HERE / "recording.py", *CASES], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return {facts["case"]: facts for facts in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["bytegrad", "bytegrad, error feedback"])
def test_a_bucket_of_25_mib_is_three_launches_and_two_collectives(case):
    """4 ranks: shards of 1,638,400 values, in tiles of 1024 to compress and of 2048 to decompress."""
    facts = recorded()[case]
    assert facts["launches"] == [["compress_kernel", 6400], ["reduce_kernel", 1600], ["decompress_kernel", 3200]]
    assert len(facts["collectives"]) == 2 and facts["collectives"][0] == "all_to_all_single"
    assert facts["custom_ops"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", ["bytegrad, in one kernel", "bytegrad, error feedback, in one kernel"])
def test_within_a_node_a_bucket_is_one_launch_and_no_collective(case):
    facts = recorded()[case]
    assert (facts["launches"], facts["collectives"]) == ([["mean_kernel", 16]], [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["five exchanges of rows, in one kernel each", "five exchanges of rows in four bits, in one kernel each"]
)
def test_within_a_node_an_exchange_of_rows_is_one_launch_and_no_collective(case):
    """Beside it torch only makes and views tensors, and a table of splits, which may be others in each call."""
    facts = recorded()[case]
    assert (facts["launches"], facts["collectives"]) == ([["rows_kernel", 16]] * 5, [])
    assert {*facts["ops"]} <= {f"aten::{name}" for name in NOTHING}, facts["ops"]


@pytest.mark.slow
def test_what_no_tile_divides_takes_a_second_launch_each():
    facts = recorded()["bytegrad, no whole tiles"]
    kernels = ["compress_kernel", "reduce_kernel", "decompress_kernel"]
    assert [name for name, _ in facts["launches"]] == [name for name in kernels for _ in range(2)]
    assert [programs for _, programs in facts["launches"]] == [6400, 4, 1600, 1, 3200, 4]
    assert len(facts["collectives"]) == 2


@pytest.mark.slow
def test_the_host_does_the_same_for_a_bucket_four_times_as_long():
    short, long = recorded()["bytegrad"], recorded()["bytegrad, 100 MiB"]
    assert (short["calls"], short["ops"], len(short["launches"])) == (long["calls"], long["ops"], len(long["launches"]))


@pytest.mark.slow
def test_power_sgd_factors_the_matrices_of_one_shape_in_one_call():
    one, three = recorded()["power_sgd, 1 layer"]["ops"], recorded()["power_sgd, 3 layers"]["ops"]
    assert one["aten::linalg_qr"] == three["aten::linalg_qr"] == 3
    assert one["aten::linalg_vector_norm"] == three["aten::linalg_vector_norm"]


# The facts that the tests above rely on.


@pytest.fixture
def on_gpu(monkeypatch):
    """Tensors say that they are on a GPU, and so take the kernels."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


class Seen(TorchDispatchMode):
    """The operators called within it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def calls(name):
    """The results of all operations on rows of values, by what they are seen as."""
    form, block, _ = FORMATS[name]
    x = sample(2, 3 * block)
    packed, out = operators.compress(x, form.name, block, None, None), torch.empty_like(x)
    operators.decompress_(out, form.name, packed, block, None)
    operators.add_(out[0], form.name, packed, torch.ones(2), block)
    operators.mix_(out[0], [x[1]], [0.5, 0.5])
    operators.land_(out[0], x[0], x[1], None)
    mean = operators.reduce(packed, form.name, x.shape[1], block, None, None, None)
    return packed, out, mean, *operators.select(x, 64, 3, 0, None)


@every
def test_who_records_sees_operators_and_nobody_else_pays_for_them(name):
    with Seen() as mode:
        seen = calls(name)
    kinds = "compress", "decompress_", "add_", "reduce", "mix_", "land_", "topk_select"
    wanted = {f"baguakit.{kind}.default" for kind in kinds}
    assert wanted <= set(mode.names)
    with torch.autograd.profiler.profile(use_cpu=True) as profile:
        direct = calls(name)
    assert not [event.name for event in profile.function_events if event.name.startswith("baguakit::")]
    assert all(torch.equal(a, b) for a, b in zip(seen, direct, strict=True))


def test_what_kernels_overwrite_is_counted(on_gpu, device):
    """Autograd asks for it; a kernel that no operator stands for writes unseen."""
    x, out, residual = sample(2, 1024).to(device), *(torch.zeros(2, 1024, device=device) for _ in range(2))
    c = bk.compressors.MinMaxUInt8()

    def counted(written, work):
        before = written._version
        work()
        return written._version > before

    assert counted(residual, lambda: c.compress(x, residual))
    assert counted(out, lambda: c.decompress(c.compress(x), 1024, out=out))
    assert counted(out, lambda: c.add_(out[0], c.compress(x), [1.0, 1.0]))
    assert counted(residual, lambda: c.reduce(c.compress(x), 1024, residual[0]))
    largest = bk.compressors.TopK(0.01)
    assert counted(residual, lambda: largest.compress(x, residual))
    assert counted(out, lambda: largest.add_(out[0], largest.compress(x), [1.0, 1.0]))
    assert counted(x, lambda: operators.mix_(x, [out], [0.5, 0.5]))
    assert counted(x, lambda: operators.land_(x, out, residual, None))

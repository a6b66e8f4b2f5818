"""The default dtype of torch is the user's, and changes nothing."""

import ast
import contextlib
from pathlib import Path

import pytest
import torch
from everything import COMPRESSORS, made, others_slow, runs_free, scaler, windows
from pool import ranks
from training import flat, net, run_steps, sgd

import baguakit as bk

OTHERS = (torch.float64, torch.bfloat16)
PACKAGE = Path(bk.__file__).parent
FACTORIES = {"empty", "zeros", "ones", "full", "rand", "randn", "eye", "linspace", "empty_strided", "scalar_tensor"}


@contextlib.contextmanager
def default(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def weights(algorithm, dtype):
    """Train in fp32 with a default dtype; scaled, saved and resumed on the way."""
    model = net()
    optimizer = sgd(model.parameters())
    with default(dtype):
        scaling = None if runs_free(made(algorithm)) else scaler(made(algorithm), init_scale=4.0)
        with bk.attach(model, optimizer, made(algorithm), scaler=scaling) as att:
            run_steps(model, optimizer, range(3))
            att.load_state_dict(att.state_dict())
            run_steps(model, optimizer, range(3, 6))
            att.consensus_distance(), att.compression_error(), att.merge()
            att.log(None, consensus=True, compression=True), att.timeline()
        return flat(model)


@pytest.mark.parametrize("algorithm", others_slow(kind_of=windows))
def test_an_algorithm_takes_the_same_steps(algorithm):
    def run():
        usual = weights(algorithm, torch.float32)
        return usual, [weights(algorithm, dtype) for dtype in OTHERS]

    for usual, others in ranks(2, run):
        for other in others:
            assert other.dtype == torch.float32
            assert runs_free(made(algorithm)) or torch.equal(usual, other)


def packed(compressor, x):
    """All that a compressor makes of rows of values."""
    lost, summed = torch.zeros(x.shape, dtype=torch.float32), torch.zeros(x.shape[1], dtype=torch.float32)
    sent = compressor.compress(x, residual=lost if x.dtype == torch.float32 else None, key=3)
    out = compressor.decompress(sent, x.shape[1], x.dtype)
    mean = compressor.reduce(sent, x.shape[1]) if compressor.dense else sent
    return [sent, lost, out, compressor.add_(summed, sent, [0.5, 0.25, 1.0]), mean]


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_a_compressor_sends_the_same_bytes(compressor):
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(3, 700, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
        usual = packed(made(compressor), x)
        for other in OTHERS:
            with default(other):
                found = packed(made(compressor), x)
            for a, b in zip(usual, found, strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b)


def test_every_new_tensor_says_its_dtype():
    """Read from the source, which has the launchers of kernels as well."""
    silent = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES:
                of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
                if of_torch and "dtype" not in {keyword.arg for keyword in node.keywords}:
                    silent.append(f"{path.relative_to(PACKAGE)}:{node.lineno} torch.{node.func.attr}")
    assert not silent, silent

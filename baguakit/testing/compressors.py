"""Checks of compressors: bytes, errors, draws, and values that are not finite."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..compressors import Compressor
from .blind import Blind
from .checking import Checks, differences, drawn, expression

COMPRESSORS = Checks()
COMPRESSORS.add("its repr is an expression that evaluates to an equal compressor")(expression)
SHAPES = ((1, 0), (2, 1), (3, 65), (5, 1000))
CASES = [(d, *s) for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64) for s in SHAPES]
DRAWS, SIGMAS = 256, 6  # keys of which the mean is taken, and standard errors that it may be off


def stochastic(c: Compressor) -> bool:
    """Return whether a compressor says that it rounds without bias."""
    return bool(getattr(c, "stochastic", False))


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32)


@COMPRESSORS.add("compress makes rows of row_bytes(n) bytes, and leaves the values as they were")
def row_bytes(c: Compressor) -> Iterator[str]:
    for dtype, rows, n in CASES:
        x = drawn(rows, n).to(dtype)
        before, packed = x.clone(), c.compress(x)
        if packed.dtype != torch.uint8 or packed.shape != (rows, c.row_bytes(n)) or not packed.is_contiguous():
            yield f"of {rows} rows of {n} values in {dtype} it makes a tensor {tuple(packed.shape)} of {packed.dtype}"
        elif not torch.equal(x, before):
            yield f"it overwrites {rows} rows of {n} values in {dtype}"


@COMPRESSORS.add("the residual, decompress, add_ and reduce agree about the decompressed values")
def operations(c: Compressor) -> Iterator[str]:
    for dtype, rows, n in CASES:
        x, residual, weights = drawn(rows, n).to(dtype), zeros(rows, n) + float("nan"), drawn(rows, seed=1).abs()
        packed = c.compress(x, residual, key=7)
        values = c.decompress(packed, n)
        out, total, kept, mean = torch.empty_like(x), drawn(n).to(dtype), drawn(n), zeros(1, n)
        summed = total.float().clone()
        c.decompress(packed, n, dtype, out=out), c.add_(total, packed, weights.tolist())
        for value, weight in zip(values, weights, strict=True):
            summed, mean = summed + value * weight, mean + value
        found = {"the residual": residual, "decompress": c.decompress(packed, n, dtype), "its out": out, "add_": total}
        wanted = {"the residual": x.float() - values, "decompress": values.to(dtype), "its out": values.to(dtype)}
        wanted["add_"] = summed.to(dtype)
        if c.dense:
            mean, lost = mean / float(rows), zeros(1, n)
            found |= {"reduce": c.reduce(packed, n, kept, key=9), "the residual of reduce": kept}
            wanted |= {"reduce": c.compress(mean, lost, key=9), "the residual of reduce": drawn(n) + lost[0] * rows}
        loose = [] if c.dense else ["add_"]  # what is sparse may be added in the dtype of out
        if getattr(c, "rotate", False):  # rows are added rotated, which rounds in another order
            loose = ["add_", "the residual of reduce"]
            wanted["the residual of reduce"] = drawn(n) + (mean - c.decompress(found["reduce"], n))[0] * rows
            found["reduce"] = wanted["reduce"]
        for name in loose:
            if torch.allclose(found[name], wanted[name], rtol=3 * torch.finfo(dtype).eps + 1e-5, atol=1e-5):
                found[name] = wanted[name]
        yield from (f"of {rows} rows of {n} values in {dtype} {said}" for said in differences(found, wanted))


@COMPRESSORS.add("a row is packed alike whatever the other rows are")
def rows(c: Compressor) -> Iterator[str]:
    x = drawn(3, 300)
    packed = c.compress(x, key=3)
    for other in (1000.0, 0.0, float("inf")):
        changed = torch.full_like(x, other)
        changed[1] = x[1]
        if not torch.equal(c.compress(changed, key=3)[1], packed[1]):
            yield f"its bytes are others when the values of the other rows are {other}"


@COMPRESSORS.add("equal values and keys make equal bytes, and other keys make other bytes only if it is stochastic")
def determinism(c: Compressor) -> Iterator[str]:
    x = drawn(2, 1000)
    packed = c.compress(x, key=3)
    for key in (3, 2**63, -1):
        if not torch.equal(c.compress(x, key=key), c.compress(x, key=key)):
            yield f"two calls with key={key} make different bytes; draw from the key, and keep no memory"
    if hasattr(c, "stochastic") and torch.equal(c.compress(x, key=4), packed) == stochastic(c):
        yield f"stochastic={c.stochastic}, and another key makes {'the same' if c.stochastic else 'other'} bytes"


@COMPRESSORS.add("with `stochastic` the mean over many keys is the value", applies=stochastic)
def unbiased(c: Compressor) -> Iterator[str]:
    x = drawn(1, 200)
    values = torch.cat([c.decompress(c.compress(x, key=key), 200) for key in range(DRAWS)]).double()
    mean, most = values.mean(0), SIGMAS * float(values.std(0).max()) / DRAWS**0.5
    i = int((mean - x[0]).abs().argmax())
    if abs(mean[i] - x[0, i]) > most or abs((mean - x[0]).mean()) > most / 200**0.5:
        yield f"that of {DRAWS} keys for {float(x[0, i]):.4f} is {float(mean[i]):.4f}"


@COMPRESSORS.add(
    "the error is no larger than the values, so that error feedback stays bounded", applies=lambda c: not stochastic(c)
)
def bounds(c: Compressor) -> Iterator[str]:
    for scale in (1e-3, 1.0, 1e3):
        x = scale * drawn(2, 1000)
        error, size = float((c.decompress(c.compress(x), 1000) - x).norm()), float(x.norm())
        if not error <= size:
            yield f"that of values with the norm {size:.4g} has the norm {error:.4g}"


@COMPRESSORS.add("a NaN or an infinity is passed on")
def not_finite(c: Compressor) -> Iterator[str]:
    for value in (float("nan"), float("inf"), -float("inf")):
        x = drawn(3, 100)
        x[1, 50] = value
        packed = c.compress(x)
        came = {"decompress": c.decompress(packed, 100)[1], "add_": c.add_(zeros(100), packed, [1, 1, 1])}
        if c.dense:
            came["reduce"] = c.decompress(c.reduce(packed, 100), 100)[0]
        yield from (f"{name} makes {float(y[50])} of {value}" for name, y in came.items() if y[50].isfinite())


@COMPRESSORS.add("the host never waits for a GPU")
def host_sync(c: Compressor) -> Iterator[str]:
    for copies in (False, True):  # what is made once may be copied
        with Blind(copies):
            packed = c.compress(torch.empty(3, 700, dtype=torch.float32, device="cuda"))
            c.decompress(packed, 700)
    yield from ()

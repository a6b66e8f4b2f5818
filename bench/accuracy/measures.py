"""Error, bias and kurtosis of each format on each source."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baguakit.compressors import Compressor, Uniform

from .formats import Format
from .sources import Source

PARTS = 32  # of the values, whose spread gives the standard error of a bias
DRAWS, DRAWN = 1000, 1 << 14  # roundings, and values of each
FOUR = {"four bits": Uniform(4, rotate=False), "four bits, rotated": Uniform(4, rotate=True)}
BLOCK = 256
LEAST = 4096  # values of a group of parameters


class Bias(NamedTuple):
    """The bias of drawn roundings, its standard error, and the vNMSE of one of them."""

    ratio: float
    error: float
    vnmse: float


def vnmse(read: Tensor, x: Tensor) -> float:
    """Return  Σ (Q(x) − x)² / Σ x²  of the values (n,) that x (n,) reads as."""
    x = x.double()
    return float((read.double() - x).square().sum() / x.square().sum())


def bias(compressor: Compressor, x: Tensor, draws: int) -> Bias:
    """Return  draws · Σ (m − x)² / Σ s²  for m the mean of so many drawn roundings of x, and s² their variance.

    It is 1 but for its standard error if roundings are unbiased, since the mean of `draws` values has 1 / draws of
    their variance; a bias of b adds draws · Σ b² / Σ s².
    """
    exact = x.double()
    total, squares = torch.zeros_like(exact), torch.zeros_like(exact)
    for key in range(draws):
        off = compressor.decompress(compressor.compress(x[None], key=key), len(x))[0].double() - exact
        total += off
        squares += off * off
    mean = total / draws
    variance = (squares - draws * mean * mean) / (draws - 1)
    excess = (draws * mean * mean - variance).view(PARTS, -1).sum(1)
    whole = variance.sum()
    error = (PARTS * excess.var() / whole**2).sqrt()
    return Bias(float(1 + excess.sum() / whole), float(error), float(squares.sum() / draws / exact.square().sum()))


def kurtosis(x: Tensor) -> float:
    """Return  n Σ x⁴ / (Σ x²)²,  which is 3 of normal values about zero, and more of heavy tails."""
    squares = x.double().square()
    return float(len(x) * squares.square().sum() / squares.sum() ** 2)


def span(x: Tensor) -> float:
    """Return the mean over blocks of (max x − min x) / (2 max |x|): 1 if both ends are as far from zero.

    Blocks are those of four bits, without those of zeros.
    """
    blocks = x[: len(x) // BLOCK * BLOCK].view(-1, BLOCK)
    top = blocks.abs().amax(1)
    return float(((blocks.amax(1) - blocks.amin(1)) / (2 * top))[top > 0].mean())


def of_source(source: Source, formats: Sequence[Format], draws: int = DRAWS) -> dict[str, Any]:
    """Return what is measured of a source: vNMSE and bias by format, and its groups of parameters.

    Biases are measured on DRAWN values in a row, those whose sum of squares is the median of all such rows.
    """
    x = source.values
    rows = x[: len(x) // DRAWN * DRAWN].view(-1, DRAWN)
    some = rows[rows.square().sum(1).median(0).indices]
    drawing = {each.name: each.drawing for each in formats if each.drawing and source.draws}
    return {
        "name": source.name,
        "values": len(x),
        **shape(x),
        "vnmse": {each.name: vnmse(each.read(x), x) for each in formats},
        "bias": {name: bias(each, some, draws) for name, each in drawing.items()},
        "groups": {name: of_group(part) for name, part in source.groups().items() if len(part) >= LEAST},
    }


def shape(x: Tensor) -> dict[str, float]:
    """Return figures of a distribution: its kurtosis, its share of zeros, and the span of its blocks."""
    return {"kurtosis": kurtosis(x), "zeros": float((x == 0).double().mean()), "span": span(x)}


def of_group(x: Tensor) -> dict[str, float]:
    """Return the kurtosis of a group of parameters, and its vNMSE in four bits."""
    read = {name: each.decompress(each.compress(x[None]), len(x))[0] for name, each in FOUR.items()}
    return {"values": len(x), "kurtosis": kurtosis(x)} | {name: vnmse(each, x) for name, each in read.items()}

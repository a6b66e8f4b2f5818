"""The wire formats, and values to try them on."""

import functools
from typing import Any

import torch

from baguakit import compressors
from baguakit.compressors.formats import Blockwise
from baguakit.kernels.blockwise import cpu as blockwise_cpu
from baguakit.kernels.blockwise import definition as blockwise
from baguakit.kernels.blockwise.uniform import GRIDS

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KEY = 0x123456789ABCDEF
MINMAX = GRIDS[8, False]
KINDS = [kind for kind in map(vars(compressors).get, compressors.__all__) if issubclass(kind, Blockwise)]
BLOCKWISE = [kind() for kind in KINDS if kind is not compressors.Uniform]
SELDOM = [  # tried where time does not matter
    *(compressors.Uniform(bits) for bits in (1, 3, 4, 5, 6, 7, 8)),
    *(compressors.Uniform(bits, rotate=False) for bits in (2, 3, 6)),
]
FORMATS = {  # of every compressor in blocks, with two lengths of blocks: the usual one, and the least
    each.form.name: (each.form, each.block, 64) for each in (*BLOCKWISE, compressors.Float8("e5m2"), *SELDOM)
}
NAMES = [name for name in FORMATS if name not in {each.form.name for each in SELDOM}]


class Bound:
    """The functions of a module, definition or kernels, for one format."""

    def __init__(self, module, format):
        self.module, self.format = module, format

    def __getattr__(self, name):
        return functools.partial(getattr(self.module, name), self.format)


def definition(form):
    return Bound(blockwise, form)


def compiled(form):
    return Bound(blockwise_cpu, form)


def kernels(form):
    from baguakit.kernels.blockwise import gpu as blockwise_launch

    return Bound(blockwise_launch, form)


def sample(rows: int, n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Values of many scales, with zeros of both signs and a run of equal values."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, n, generator=source) * 10 ** torch.randn(rows, max(n, 1), generator=source)[:, :n]
    x[:, n // 2 : n // 2 + 70] = 3.3
    x[:, ::7] = 0
    x[:, 3::14] = -0.0
    return x.to(dtype)


def of_any_scale(largest: float) -> Any:
    """A strategy of Hypothesis: lists of fp32 values up to `largest`, wild ones or all of one scale."""
    from hypothesis import strategies as st

    wild = st.floats(min_value=-largest, max_value=largest, width=32, allow_subnormal=True)
    scales = st.sampled_from([1e-45, 1e-42, 1e-38, 1e-36, 1e-30, 1.0, 1e30, largest])
    unit = st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=130)
    return st.lists(wild, min_size=1, max_size=130) | st.builds(lambda xs, scale: [x * scale for x in xs], unit, scales)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def without_nan(x: torch.Tensor) -> torch.Tensor:
    """NaN has many bit patterns; 7 is no value that a test uses."""
    return torch.where(x.isnan(), 7.0, x)


def round_trip(form, x: torch.Tensor, block: int, key: int | None = None) -> torch.Tensor:
    codec = definition(form)
    out = torch.empty_like(x, dtype=torch.float32)
    codec.decompress_(out, codec.compress(x, block, None, key), block)
    return out

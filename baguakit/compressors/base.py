"""The base class of all compressors, and checks of the arguments of their methods."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor, float32

from ..arguments import Doors, instance, integer, message, real, several, tensor
from ..expressions import expression
from ..kernels.cpu import DTYPES
from ..tensors import uploaded

MOST = 1 << 48  # upper bound on the values of a row: larger numbers are mistakes
PROBE = (1 << 16) + 16  # values in each of five rows: enough for every compiled path, whole blocks and a rest


class Checks:
    """Methods that check the arguments of the compressor's methods with the same names, and return these arguments."""

    def row_bytes(self: Any, n: int) -> tuple[Any, ...]:
        return (integer("n", n, 0, MOST),)

    def compress(self: Any, x: Tensor, residual: Tensor | None = None, key: int = 0) -> tuple[Any, ...]:
        check_dtype("x", tensor("x", x).dtype)
        integer("key", key)
        if x.dim() != 2:
            raise ValueError(message("x", "values in rows, of shape (rows, n)", x) + "; use x.view(rows, -1)")
        x = x.detach().contiguous()
        return x, residual_of(residual, x.shape, x), key

    def decompress(
        self: Any, packed: Tensor, n: int, dtype: torch.dtype = float32, out: Tensor | None = None
    ) -> tuple[Any, ...]:
        packed = packed_of(packed, self, n := integer("n", n, 0))
        check_dtype("dtype", dtype)
        if out is not None:
            check_dtype("out", instance("out", out, Tensor, "a tensor").dtype)
            out = written("out", out, (len(packed), n), packed)
        return packed, n, dtype, out

    def add_(self: Any, out: Tensor, packed: Tensor, weights: Sequence[float] | Tensor) -> tuple[Any, ...]:
        check_dtype("out", instance("out", out, Tensor, "a tensor").dtype)
        if out.dim() != 1:
            raise ValueError(message("out", "one row, of shape (n,)", out) + "; use out.view(-1)")
        written("out", out, out.shape, tensor("packed", packed))
        packed = packed_of(packed, self, len(out))
        if isinstance(weights, Tensor):
            given = tensor("weights", weights)
        else:
            listed = [real("weights", w) for w in several("weights", weights, "a list of numbers")]
            given = torch.tensor(listed, dtype=float32)
        if given.shape != (len(packed),) or given.is_complex():
            raise ValueError(message("weights", f"as many numbers as there are packed rows, {len(packed)}", weights))
        return out, packed, uploaded(given.to(float32), packed.device).contiguous()

    def reduce(self: Any, packed: Tensor, n: int, residual: Tensor | None = None, key: int = 0) -> tuple[Any, ...]:
        packed = packed_of(packed, self, n := integer("n", n, 0))
        integer("key", key)
        if not len(packed):
            raise ValueError(message("packed", "one row or more, to take the mean of", packed))
        return packed, n, residual_of(residual, (n,), packed), key


class Compressor(Doors):
    """A format that packs values (rows, n) into bytes (rows, row_bytes(n)), a contiguous uint8 tensor.

    All arithmetic is fp32, whatever the dtype of the values. A NaN or an infinity is passed on: every value that
    depends on it decompresses to a value that is not finite. Values are float32, bfloat16, float16 or float64. Another
    dtype raises a TypeError, and a wrong shape a ValueError.

    Your own compressor implements `row_bytes`, `compress` and `decompress`, and perhaps faster forms of the others,
    without checks: each call checks its arguments first. The methods get contiguous tensors of the documented shapes.

    Attributes:
        dense: whether packed rows hold all values, so that `reduce` can average packed rows.
    """

    dense: ClassVar[bool] = True
    doors: ClassVar[frozenset[str]] = frozenset({"row_bytes", "compress", "decompress", "add_", "reduce"})

    def row_bytes(self, n: int) -> int:
        """Return the number of bytes of a packed row of `n` values."""
        raise NotImplementedError

    def compress(self, x: Tensor, residual: Tensor | None = None, key: int = 0) -> Tensor:
        """Return the packed rows of `x` (rows, n).

        `residual` (fp32, shape of `x`) receives the error: `x` minus the decompressed values, rounded to fp32. This
        rounding changes only the errors of values that are far smaller than their error. For all other values, `x`
        equals the decompressed value plus the residual. `key` is the seed of compressors that round at random.
        """
        raise NotImplementedError

    def decompress(self, packed: Tensor, n: int, dtype: torch.dtype = float32, out: Tensor | None = None) -> Tensor:
        """Return the values (rows, n) of packed rows, written into `out` if given."""
        raise NotImplementedError

    def add_(self, out: Tensor, packed: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
        """Add the values of each packed row, times the weight of the row, to `out` (n,), row after row, in fp32."""
        total = out.float()
        for row, weight in zip(packed, weights, strict=True):
            total = total + self._unchecked_decompress(row.unsqueeze(0), len(out), float32, None)[0] * weight
        return out.copy_(total)

    def reduce(self, packed: Tensor, n: int, residual: Tensor | None = None, key: int = 0) -> Tensor:
        """Return one packed row: the mean of the packed rows, which are summed in their order in fp32.

        Add the error of this second compression, times the number of rows, to `residual` (fp32, (n,)).
        """
        check_dense("compressor", self)
        mean = torch.zeros(1, n, dtype=float32, device=packed.device)
        for row in packed:
            mean += self._unchecked_decompress(row.unsqueeze(0), n, float32, None)
        mean = mean / mean.new_full((1,), len(packed))
        lost = None if residual is None else torch.empty_like(mean)
        sent = self._unchecked_compress(mean, lost, key)
        if residual is not None and lost is not None:
            residual += lost[0] * len(packed)
        return sent

    def _mean_of(self, packed: Tensor, out: Tensor) -> None:
        """Overwrite `out` (n,) with the mean of packed rows, which are added one after another."""
        weights = torch.full((len(packed),), 1 / len(packed), dtype=torch.float32, device=out.device)
        self._unchecked_add(out.zero_(), packed, weights)

    # These are the methods above without the checks of arguments. Primitives call them.
    _unchecked_row_bytes: Callable[[int], int]
    _unchecked_compress: Callable[[Tensor, Tensor | None, int], Tensor]
    _unchecked_decompress: Callable[[Tensor, int, torch.dtype, Tensor | None], Tensor]
    _unchecked_add: Callable[[Tensor, Tensor, Tensor], Tensor]
    _unchecked_reduce: Callable[[Tensor, int, Tensor | None, int], Tensor]

    @classmethod
    def _door(cls, name: str, written: Callable[..., Any]) -> Callable[..., Any]:
        check = getattr(Checks, name)
        return wraps(written)(torch.no_grad()(lambda self, *a, **named: written(self, *check(self, *a, **named))))

    def warm_up(self, device: torch.device | str, dtype: torch.dtype = float32, values: int = PROBE) -> None:
        """Compile the code of this compressor before the first step, for tensors of `values` values on a device.

        Compile for `dtype`, and for float32, which residuals and replicas have. On a CPU the code is compiled once for
        all dtypes, lengths and processes of a machine.
        """
        n = probed(device, dtype, values)
        with torch.no_grad():
            for each in dict.fromkeys((float32, dtype)) if n else ():
                self._use_once(torch.zeros(5, n, dtype=each, device=device))

    def _use_once(self, x: Tensor) -> None:
        """Use every kernel for rows `x`, which may be overwritten."""
        if x.is_cpu:  # only formats in C have something to compile, and do so
            return
        n, residual = x.shape[1], torch.zeros_like(x, dtype=float32)
        packed = self.compress(x, residual)
        self.compress(x[:1])
        self.decompress(packed, n, x.dtype, out=x)
        self.add_(x[0], packed, [0.2] * 5)
        self.reduce(packed, n, residual[0])
        self.reduce(packed, n)

    def __repr__(self) -> str:
        return expression(self)


def check_dense(name: str, compressor: Any) -> None:
    if not isinstance(compressor, Compressor):
        raise TypeError(message(name, "a compressor such as MinMaxUInt8()", compressor))
    if not compressor.dense:
        raise TypeError(f"{name} {compressor!r} keeps other places on each rank; use SparseMean(…) or sparse_mean_")


def probed(device: Any, dtype: Any, values: Any) -> int:
    """Return how many values a warm-up needs. Raise if no compressor takes these arguments."""
    check_dtype("dtype", dtype)
    integer("values", values, 0)
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError, ValueError):
        raise TypeError(message("device", "a torch.device, or the name of one", device)) from None
    if kind == "meta":
        raise ValueError(message("device", "one that holds values", device))
    return values and (1 if kind == "cpu" else PROBE)


def check_dtype(name: str, dtype: Any) -> None:
    """Raise a TypeError unless compressors take values of this dtype."""
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise TypeError(message(name, "float32, bfloat16, float16 or float64", dtype) + "; convert it by .float()")


def packed_of(packed: Tensor, compressor: Compressor, n: int) -> Tensor:
    """Check packed rows of `n` values, and return them contiguous."""
    if tensor("packed", packed).dtype != torch.uint8:
        raise TypeError(message("packed", "rows in uint8, as compress returned them", packed))
    size = compressor.row_bytes(n)
    if packed.dim() != 2 or packed.shape[1] != size:
        raise ValueError(message("packed", f"rows of {size} bytes, as {compressor!r} packs n={n} values", packed))
    return packed.contiguous()


def residual_of(residual: Tensor | None, shape: Sequence[int], beside: Tensor) -> Tensor | None:
    """Return the residual after checks of its shape, dtype and device. Return None if `residual` is None."""
    if residual is None:
        return None
    if instance("residual", residual, Tensor, "a tensor").dtype != float32:
        raise TypeError(f"a residual is float32 whatever the values are; {residual.dtype} would lose it again")
    return written("residual", residual, shape, beside)


def written(name: str, x: Tensor, shape: Sequence[int], beside: Tensor) -> Tensor:
    """Return the tensor that a method writes to, detached, after checks of its shape and device."""
    if x.shape != torch.Size(shape) or not x.is_contiguous():
        gaps = "" if x.is_contiguous() else " with gaps"
        raise ValueError(f"{name} is contiguous, here of shape {tuple(shape)}, not {tuple(x.shape)}{gaps}")
    if x.device != beside.device:
        raise ValueError(f"{name} is on {x.device} and what it belongs to on {beside.device}; move one to the other")
    return x.detach()

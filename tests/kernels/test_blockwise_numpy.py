"""NumPy's code for few values equals the definition, bit for bit."""

import threading

import numpy as np
import pytest
import torch
from formats import DTYPES, KEY, MINMAX, Bound, bits, definition, sample, without_nan

from baguakit.compressors import MinMaxUInt8
from baguakit.kernels.blockwise import uniform_numpy
from baguakit.kernels.inductor import units

numpy_codec = Bound(uniform_numpy, MINMAX)
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-40, 2.0**-126, 1e-36, 0.1, 3e38, -3.4e38]
BROKEN = [float("nan"), -float("nan"), float("inf"), -float("inf")]


def everything(codec: Bound, x: torch.Tensor, block: int) -> list[torch.Tensor]:
    """Return the results of all four operations, and what they write."""
    (rows, n), weights = x.shape, torch.linspace(-1, 2, len(x))
    residual, mean_residual = torch.full((rows, n), torch.nan), torch.linspace(-3, 3, n)
    packed = codec.compress(x, block, residual)
    values, total = torch.full_like(x, 7), sample(1, n, x.dtype, seed=1)[0]
    codec.decompress_(values, packed, block)
    codec.add_(total, packed, weights, block)
    sent = codec.reduce(packed, n, block, mean_residual)
    return [packed, sent, *map(without_nan, (residual, values, total, mean_residual))]


def same(x: torch.Tensor, block: int) -> bool:
    with units.eager():
        expected = everything(definition(MINMAX), x, block)
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(everything(numpy_codec, x, block), expected, strict=True))


@pytest.mark.parametrize("block", [64, 512, 8192])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 63, 64, 65, 512, 1300])
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_numpy_gives_the_bits_of_the_definition(rows, n, dtype, block):
    assert same(sample(rows, n, dtype), block)


@pytest.mark.parametrize("values", [[value] for value in [*SPECIAL, *BROKEN]] + [SPECIAL, BROKEN, [1.0, *BROKEN]])
def test_and_of_blocks_that_are_equal_or_broken_or_as_large_and_small_as_can_be(values):
    x = sample(3, 300)
    x[1, 100 : 100 + len(values)] = torch.tensor(values)
    x[2, :200] = torch.tensor(values).repeat(200)[:200]
    with np.errstate(all="raise"):  # what the user asks of NumPy is not asked of this
        assert same(x, 64)


def test_rows_may_lie_apart():
    """A view of columns, and its own dimensions the other way round."""
    wide = sample(400, 400)
    assert same(wide[:3, 50:351], 64) and same(wide.t()[:3, :300], 64)


@pytest.fixture
def asked(monkeypatch):
    """The operations that NumPy did."""
    found = []
    for name in ("compress", "decompress_", "add_", "reduce"):
        real = getattr(uniform_numpy, name)
        monkeypatch.setattr(uniform_numpy, name, lambda *a, name=name, real=real: found.append(name) or real(*a))
    return found


def use(compressor: MinMaxUInt8, n: int, key: int = 0) -> None:
    packed = compressor.compress(torch.randn(2, n), key=key)
    compressor.decompress(packed, n)
    compressor.add_(torch.zeros(n), packed, [0.5, 0.5])
    compressor.reduce(packed, n, key=key)


def test_few_values_go_there(asked):
    use(MinMaxUInt8(), 100)
    assert asked == ["compress", "decompress_", "add_", "reduce"]


def test_draws_do_not(asked):
    use(MinMaxUInt8(stochastic=True), 100, KEY)
    assert asked == ["decompress_", "add_"]


def test_threads_keep_what_they_ask_of_numpy():
    x, kept = torch.full((3, 100), torch.inf), []

    def work(how):
        with np.errstate(all=how):
            for _ in range(100):
                MinMaxUInt8().compress(x)
            kept.append(set(np.geterr().values()) == {how})

    threads = [threading.Thread(target=work, args=(how,)) for how in ("raise", "warn", "ignore", "raise")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept == [True] * 4


def test_what_is_written_is_counted_and_gradients_are_not_in_the_way():
    x, out, weights = torch.randn(1, 100, requires_grad=True), torch.zeros(1, 100), torch.ones(1, requires_grad=True)
    versions, packed = [out._version], MinMaxUInt8().compress(x)
    MinMaxUInt8().decompress(packed, 100, out=out)
    versions.append(out._version)
    MinMaxUInt8().add_(out[0], packed, weights)
    assert versions[0] < versions[1] < out._version
    assert torch.equal(out[0], 2 * MinMaxUInt8().decompress(packed, 100)[0])

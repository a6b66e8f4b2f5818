"""`apply_(old, changes(new, old))` is `new` bit for bit, for every dtype and shape; what is damaged is refused."""

import pytest
import torch

import baguakit as bk

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128),
]
SHAPES = [(0,), (), (1,), (7, 3), (4096,), (5, 1000), (3, 0, 2), (2, 3, 4, 500)]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8) if x.dim() else x.reshape(1).view(torch.uint8)


def drawn(dtype: torch.dtype, shape: tuple[int, ...], source: torch.Generator) -> torch.Tensor:
    """Values of any bits: NaNs with payloads, zeros of both signs, infinities, subnormals."""
    n = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=source).bool()
    return torch.randint(-128, 128, (n * dtype.itemsize,), generator=source, dtype=torch.int8).view(dtype).view(shape)


def changed(x: torch.Tensor, share: float, source: torch.Generator) -> torch.Tensor:
    moved = torch.rand(x.shape, generator=source) < share
    return torch.where(moved, drawn(x.dtype, tuple(x.shape), source), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_gives_the_new_values_back(dtype):
    source = torch.Generator().manual_seed(0)
    for i, shape in enumerate(SHAPES * 3):
        old = drawn(dtype, shape, source)
        new = changed(old, (0.0, 0.02, 0.5, 1.0)[i % 4], source)
        copy, x = old.clone(), old.clone()
        packed = bk.sync.changes(new, copy)
        assert packed.dtype == torch.uint8
        assert len(packed) <= new.nbytes * 1.002 + 64
        assert torch.equal(bits(copy), bits(new))
        assert bk.sync.apply_(x, packed) is x
        assert torch.equal(bits(x), bits(new))


def test_strides_of_both_sides_are_their_own():
    old = torch.arange(6000.0).view(60, 100)
    new = old.t().contiguous().t() + (torch.arange(100) % 7 == 0)
    assert not new.is_contiguous()
    packed = bk.sync.changes(new, old.clone())

    def laid_out():
        return old.clone(), old.t().contiguous().t(), torch.empty(60, 300)[:, ::3].copy_(old)

    for x in laid_out():
        assert torch.equal(bk.sync.apply_(x, packed), new)
    for x in laid_out():
        assert torch.equal(bk.sync.changes(new, x), packed)
        assert torch.equal(x, new)
    weight = torch.nn.Parameter(old.clone())
    assert torch.equal(bk.sync.apply_(weight, packed), new)


def test_conjugates_that_torch_has_not_computed_yet_are_what_they_stand_for():
    z = torch.randn(50, dtype=torch.complex64)
    for new in (z.conj(), z.conj().imag):
        old = torch.zeros_like(new, memory_format=torch.contiguous_format)
        assert torch.equal(bk.sync.apply_(torch.zeros(50, dtype=new.dtype), bk.sync.changes(new, old)), new)


def test_tensors_that_are_conjugates_take_changes(tmp_path):
    new, old = torch.randn(2, 50, dtype=torch.complex64)
    x = old.conj().resolve_conj().conj()  # the values of `old`
    assert x.is_conj() and torch.equal(bk.sync.apply_(x, bk.sync.changes(new, old.clone())), new)
    publisher, x = bk.sync.Publisher({"x": old}, tmp_path), torch.zeros_like(old).conj()
    subscriber = bk.sync.Subscriber({"x": x}, tmp_path)
    for values in (old.clone(), new):
        old.copy_(values)
        publisher.publish()
        subscriber.update()
        assert x.is_conj() and torch.equal(x, values)


def test_zeros_of_both_signs_and_nans_of_all_payloads_are_told_apart():
    new, old = torch.tensor([-0.0, 0.0, torch.nan]), torch.tensor([0.0, 0.0, torch.nan])
    new.view(torch.int32)[2] += 1
    packed = bk.sync.changes(new, old.clone())
    assert torch.equal(bits(bk.sync.apply_(old, packed)), bits(new))
    assert len(bk.sync.changes(new, old)) == 32 + 4  # nothing has changed since: a bit


def test_each_flipped_byte_is_refused_and_nothing_is_applied():
    new, old = torch.arange(300.0), torch.arange(300.0)
    new[::50] += 1
    packed = bk.sync.changes(new, old.clone())
    for at in range(len(packed)):
        damaged = packed.clone()
        damaged[at] ^= 1 + at % 255
        with pytest.raises(ValueError, match="damaged"):
            bk.sync.apply_(old, damaged)
    for cut in (packed[:-1], packed[:31], packed[:0], torch.cat([packed, packed[:1]])):
        with pytest.raises(ValueError, match="damaged"):
            bk.sync.apply_(old, cut)
    assert torch.equal(old, torch.arange(300.0))
    assert torch.equal(bk.sync.apply_(old, packed), new)


def test_tensors_that_are_unlike_are_refused():
    packed = bk.sync.changes(torch.ones(5), torch.zeros(5))
    for x in (torch.zeros(6), torch.zeros(5, dtype=torch.float16), torch.zeros(5, dtype=torch.float64)):
        with pytest.raises(ValueError, match="packed has the changes of 5 values of 4 bytes"):
            bk.sync.apply_(x, packed)
    for old in (torch.zeros(6), torch.zeros(5, dtype=torch.float16), torch.zeros(5, device="meta")):
        with pytest.raises(ValueError, match="old is a tensor"):
            bk.sync.changes(torch.ones(5), old)
    with pytest.raises(TypeError, match=r"packed is a tensor of torch\.uint8"):
        bk.sync.apply_(torch.zeros(5), packed.float())


def test_values_that_share_memory_cannot_be_written():
    new, packed = torch.ones(3, 4), bk.sync.changes(torch.ones(3, 4), torch.zeros(3, 4))
    for x in (torch.zeros(4).expand(3, 4), torch.zeros(8).as_strided((3, 4), (2, 1))):
        with pytest.raises(ValueError, match="values of 'old' share memory"):
            bk.sync.changes(new, x)
        with pytest.raises(ValueError, match="values of 'x' share memory"):
            bk.sync.apply_(x, packed)
        assert not x.any()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor")
def test_tensors_whose_values_are_not_in_one_place_are_refused():
    x = torch.ones(3)
    others = {
        "quantized": torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([x, x[:2]]),
        "layout torch.sparse_coo": x.to_sparse(),
    }
    for kind, other in others.items():
        for pair in ((x, other), (other, x)):
            with pytest.raises(TypeError, match=f"is a dense tensor, not .*{kind}"):
                bk.sync.changes(*pair)
        with pytest.raises(TypeError, match=rf"tensors\['x'\] is a dense tensor, not .*{kind}"):
            bk.sync.Publisher({"x": other}, "nowhere")

"""Parameters as one flat tensor, and back."""

import pytest
import torch
from torch import nn

import baguakit as bk
from baguakit import Bucket
from baguakit.buckets import split
from baguakit.costs import sizes_of
from baguakit.flights.runner import padded_multiple
from baguakit.tensors import sharing


def params():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (5,), (), (2, 3, 2))]


def test_load_and_store_are_inverse():
    ps = params()
    bucket = Bucket(ps, multiple_of=16)
    before = [p.detach().clone() for p in ps]
    flat = bucket.load("data")
    assert flat.shape == (32,) and torch.equal(flat[:30], torch.cat([p.flatten() for p in before]))
    assert not flat[30:].any()
    flat.mul_(2)
    bucket.store("data")
    assert all(torch.equal(p, 2 * old) for p, old in zip(ps, before, strict=True))


def test_gradients_become_views_and_are_not_copied_again():
    ps = params()
    bucket = Bucket(ps, multiple_of=7)
    ps[0].grad = torch.ones(3, 4)
    flat = bucket.load("grad")
    assert flat.sum() == 12
    flat.fill_(5)
    bucket.store("grad", only=[True, False, True, True])
    assert ps[1].grad is None and ps[0].grad.data_ptr() == flat.data_ptr()
    ps[0].grad.add_(1)  # as autograd accumulates
    assert torch.equal(bucket.load("grad")[:12], torch.full((12,), 6.0)) and not bucket.padding.any()


def test_padding_is_zero_at_every_load():
    bucket = Bucket(params(), multiple_of=64)
    bucket.flat.fill_(float("nan"))
    assert torch.isfinite(bucket.load("data")).all()
    bucket.flat.fill_(float("nan"))
    assert torch.isfinite(bucket.load("grad")).all()


def test_layouts_are_kept():
    p = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    q = nn.Parameter(torch.randn(4, 6)[:, ::2])  # dense in no order
    bucket = Bucket([p, q])
    p.grad, q.grad = torch.randn_like(p), torch.randn_like(q)
    expected = [p.grad.clone(), q.grad.clone()]
    bucket.load("grad")
    bucket.store("grad")
    assert p.grad.stride() == p.stride() and bucket.views[0].stride() == p.stride()
    assert torch.equal(p.grad, expected[0]) and torch.equal(q.grad, expected[1])


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="sparse=False"):
        Bucket(embedding.parameters()).load("grad")


@pytest.mark.parametrize("bucket_bytes", [1, 40, 100, 1 << 20])
def test_split_keeps_everything_in_backward_order(bucket_bytes):
    ps = [*params(), nn.Parameter(torch.zeros(4, dtype=torch.float64)), *params()]
    cut = split(ps, bucket_bytes)
    for dtype in (torch.float32, torch.float64):
        inside = [p for bucket in cut for p in bucket if p.dtype == dtype]
        assert [id(p) for p in inside] == [id(p) for p in reversed(ps) if p.dtype == dtype]
    assert all(len({p.dtype for p in bucket}) == 1 for bucket in cut)
    assert all(len(bucket) == 1 or sum(p.nbytes for p in bucket) <= bucket_bytes for bucket in cut)


def layers_of(mib, count):
    return [nn.Parameter(torch.empty(int(mib * (1 << 18)), device="meta")) for _ in range(count)]


def default_buckets(ps, algorithm):
    """Return the sizes of the default buckets of gradients, in MiB."""
    rules = algorithm.rules
    return [
        sum(p.nbytes for p in bucket) / (1 << 20) for bucket in split(ps, *sizes_of([(rules[0], ps)], None)["grad"])
    ]


@pytest.mark.parametrize(
    "mib, count, expected",
    [
        (1 / 64, 60, [60 / 64]),  # of less than 1 MiB there is one
        (1 / 4, 8, [1, 1]),
        (1 / 4, 50, [1.75, 3, 3, 2.5, 2.25]),
        (1, 400, [13, *[25] * 14, 19, 18]),
        (40, 3, [40, 40, 40]),
    ],
)
def test_the_default_is_a_quarter_and_the_first_and_the_last_buckets_are_smaller(mib, count, expected):
    assert default_buckets(layers_of(mib, count), bk.algorithms.gradient_allreduce()) == expected


def test_the_default_is_more_for_those_that_send_little():
    """A bucket sends 512 KiB, if there are as many."""
    ps = [nn.Parameter(torch.empty(256, 256, device="meta")) for _ in range(50)]  # 12.5 MiB
    assert default_buckets(ps, bk.algorithms.bytegrad()) == [1.75, 3, 3, 2.5, 2.25]  # 1.3 MiB send them
    assert default_buckets(ps, bk.algorithms.bytegrad(bk.compressors.UInt4())) == [2.75, 3.75, 3, 3]  # 2.6 MiB
    assert default_buckets(ps, bk.algorithms.signum()) == [6.75, 5.75]  # 6.7 MiB
    for few in (bk.algorithms.top_k(), bk.algorithms.power_sgd()):
        assert default_buckets(ps, few) == [12.5]


def test_a_small_first_bucket_takes_the_large_parameter_behind_it():
    ps = [*layers_of(1 / 4, 1), *layers_of(16, 1), *layers_of(1 / 4, 1)]
    assert default_buckets(ps, bk.algorithms.gradient_allreduce()) == [16.25, 0.25]


@pytest.mark.parametrize("mib", [0.25, 0.7, 3])
@pytest.mark.parametrize("size", [1, 1 << 20, 4 << 20, 25 << 20])
def test_tapered_buckets_keep_everything_in_order_and_are_not_larger(mib, size):
    ps = layers_of(mib, 40)
    cut = split(ps, *sizes_of([], size)["grad"])
    assert [id(p) for bucket in cut for p in bucket] == [id(p) for p in reversed(ps)]
    assert all(len(bucket) == 1 or sum(p.nbytes for p in bucket) <= size for bucket in cut)
    if size <= 1 << 20:
        assert list(map(len, cut)) == list(map(len, split(ps, size)))


@pytest.mark.parametrize("multiple", [1, 2, 64, 256, 448])
@pytest.mark.parametrize("values", [1, 6_400, 12_801, 300_000, 4_000_000])
def test_room_for_whole_blocks_is_less_than_a_hundredth_of_a_bucket(multiple, values):
    found = padded_multiple(multiple, [nn.Parameter(torch.empty(values, device="meta"))])
    times = found // multiple
    assert found == times * multiple and times in (1, 2, 4, 8, 16, 32, 64, 128)
    assert times == 1 or 100 * found < values
    assert times == 128 or multiple == 1 or 200 * found >= values  # it is the largest


@pytest.mark.parametrize("ranks", [2, 64, 1000, 10_007, 16_384, 1 << 20])
@pytest.mark.parametrize("values", [0, 1, 155, 5000, 1 << 20, 6_553_600])
def test_padding_of_many_ranks_is_no_more_than_an_eighth(ranks, values):
    """A bucket of few values would otherwise have 64 for each rank."""
    padded = -values % padded_multiple(64 * ranks, [nn.Parameter(torch.empty(values, device="meta"))])
    assert padded < max(4096, values / 8)
    if 64 * ranks <= 4096:
        assert padded_multiple(64 * ranks, [nn.Parameter(torch.empty(values, device="meta"))]) % (64 * ranks) == 0


def test_tensors_whose_memory_overlaps_are_in_one_group():
    x, y = torch.zeros(10, dtype=torch.float32), torch.zeros(2, 3, dtype=torch.float64)
    groups = sharing([x[:4], x[6:], x[3:7], y.t(), x[:0], x[5:6], y[1]])  # x[:0] is empty
    assert sorted(map(sorted, groups)) == [[0, 1, 2, 5], [3, 6]]
    assert sharing([x[5:], x[:5]]) == [[1], [0]]  # side by side
    assert sharing([x[::2], x[1::2]]) == [[0, 1]]  # ranges, though no value is shared

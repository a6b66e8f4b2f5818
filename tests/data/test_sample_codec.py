"""Samples as bytes: equal after the trip, and nothing runs on the way back."""

import json
import pickle
import struct
from collections import OrderedDict, namedtuple
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from baguakit.data import Pickle, Plain
from baguakit.data.codec import PLAIN, Corrupt, _framed

DTYPES = npst.scalar_dtypes() | npst.unicode_string_dtypes()
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=20)
    | st.complex_numbers()
    | npst.arrays(DTYPES, npst.array_shapes(min_dims=0, min_side=0))
)
HASHABLE = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
SAMPLES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(HASHABLE, inner, max_size=4)
        | st.sets(HASHABLE, max_size=4)
        | st.frozensets(HASHABLE, max_size=4)
    ),
    max_leaves=12,
)


def same(a, b):
    """Equal in type and value all the way down; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and repr(a) == repr(b)
    if isinstance(a, (float, complex)):
        return repr(a) == repr(b)
    return a == b


@given(SAMPLES)
def test_samples_come_back_as_they_were(sample):
    assert same(Plain().decode(Plain().encode(sample)), sample)


TENSORS = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]


@pytest.mark.filterwarnings("ignore:(ComplexHalf|BComplex32)")
@pytest.mark.parametrize("dtype", sorted({str(d) for d in TENSORS}))
def test_tensors_of_every_dtype_come_back_or_are_refused(dtype):
    dtype = getattr(torch, dtype.removeprefix("torch."))
    try:
        x = torch.arange(24, dtype=torch.uint8).view(dtype)
    except RuntimeError:
        return  # nobody can make one
    for tensor in (x, x[::2], x[:0], x[0], x.reshape(-1, 1)):
        try:
            stored = Plain().encode(tensor)
        except TypeError:
            return  # refused in words: torch itself cannot copy it
        back = Plain().decode(stored)
        assert back.dtype == dtype and back.shape == tensor.shape
        assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8))


def test_views_come_back_by_value():
    z = torch.complex(torch.arange(4.0), torch.ones(4))
    for x in (z.conj(), z.conj().imag, torch.arange(6.0).reshape(2, 3).T, torch.ones(1).expand(3)):
        assert torch.equal(Plain().decode(Plain().encode(x)), x)


def test_what_comes_back_is_writable_and_our_own():
    stored = Plain().encode({"t": torch.zeros(3), "a": np.zeros(3), "b": bytearray(3)})
    first = Plain().decode(stored)
    first["t"] += 1
    first["a"] += 1
    first["b"][0] = 1
    second = Plain().decode(stored)
    assert second["t"].sum() == 0 and second["a"].sum() == 0 and second["b"] == bytearray(3)


class Evil:
    def __reduce__(self):
        return pytest.fail, ("a pickle was opened",)


CYCLE = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    "sample, text",
    [
        ({"image": Evil()}, r"the sample\['image'\] is a test_sample_codec.Evil"),
        ([1, (2, OrderedDict())], r"the sample\[1\]\[1\] is a collections.OrderedDict"),
        (namedtuple("Pair", "a b")(1, 2), "Pair"),
        (np.array([None, 1]), "a numpy ndarray of dtype object"),
        (np.zeros(2, [("x", "f4")]), "a numpy ndarray of dtype .*'x'"),
        (torch.nn.Parameter(torch.ones(1)), "Parameter"),
        (torch.ones(1, requires_grad=True), "requires grad"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.ones(1, device="meta"), "tensor on meta"),
        (CYCLE, "holds itself"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_is_not_stored_is_refused_with_its_place(sample, text):
    with pytest.raises(TypeError, match=text):
        Plain().encode(sample)


@given(st.data())
def test_damage_is_found(data):
    stored = Plain().encode({"x": torch.arange(10), "y": [1, "two", None]})
    at, bit = data.draw(st.integers(0, len(stored) - 1)), data.draw(st.integers(0, 7))
    flipped = stored[:at] + bytes([stored[at] ^ 1 << bit]) + stored[at + 1 :]
    for damaged in (flipped, stored[:at], stored + b"x", b""):
        for codec in (Plain(), Pickle()):
            with pytest.raises(Corrupt):
                codec.decode(damaged)


JSON = st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x))
FORGED = [
    [["tensor", 0, "Tensor", [9]], [0]],
    [["tensor", 0, "float32", [1 << 40]], [0]],
    [["array", 0, "|O", [1]], [8]],
    [["array", 0, "<f8", [1 << 40]], [0]],
    [["array", 0, [["x", "<f8"]], [0]], [0]],
    [["eval", "1"], []],
    [{}, []],
]


def forge(header, *buffers):
    text = json.dumps(header).encode()
    return _framed(PLAIN, struct.pack("<Q", len(text)), text, *buffers)


@pytest.mark.parametrize("dtype", ["|O", "O,"])
def test_bytes_are_never_pointers_to_objects(dtype):
    with pytest.raises(Corrupt):
        Plain().decode(forge([["array", 0, dtype, [1]], [8]], bytes(8)))


@pytest.mark.parametrize("header", FORGED, ids=str)
def test_a_forged_header_is_damage(header):
    with pytest.raises(Corrupt):
        Plain().decode(forge(header))


@settings(max_examples=30)
@given(JSON)
def test_any_header_is_a_plain_sample_or_damage(tree):
    with suppress(Corrupt):
        Plain().encode(Plain().decode(forge([tree, []])))


def test_pickles_are_opened_on_request_only():
    stored = Pickle().encode(Evil())
    with pytest.raises(Corrupt):
        Plain().decode(stored)
    with pytest.raises(Corrupt):
        Plain().decode(pickle.dumps(Evil()))
    assert Pickle().decode(Pickle().encode(OrderedDict(a=1))) == OrderedDict(a=1)
    with pytest.raises(TypeError, match="cannot be pickled"):
        Pickle().encode(lambda: 0)

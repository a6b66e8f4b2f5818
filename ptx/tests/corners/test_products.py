"""Products of matrices, asynchronous copies, and approximations."""

import numpy as np
import pytest

from ptx.faults import DivergenceFault, MemoryFault, Unknown
from ptx.memory import Region
from ptx.numbers.types import double_to_halves, halves_to_double
from ptx.tests.corners.harness import result, run

WARP = 32
SOURCE = np.random.default_rng(11)


def fragments(matrix, kind):
    """The registers of a matrix, by the manual's figures: each the raw bits of 32 lanes, row g first."""
    width = 1 if kind == "tf32" else 2
    rows, columns = matrix.shape
    registers = []
    for start in range(0, columns, 4 * width):
        for group in range(0, rows, 8):
            words = []
            for lane in range(WARP):
                g, t = divmod(lane, 4)
                values = matrix[group + g, start + width * t : start + width * (t + 1)]
                raw = values.astype(np.float32).view(np.uint32) if width == 1 else double_to_halves(values, kind)
                words.append(sum(int(each) << (16 * k) for k, each in enumerate(raw)))
            registers.append(words)
    return registers


@pytest.mark.parametrize("kind, k", [("f16", 16), ("bf16", 16), ("f16", 8), ("bf16", 8), ("tf32", 8), ("tf32", 4)])
def test_a_product_is_that_of_the_matrices(kind, k):
    a, b = SOURCE.standard_normal((16, k)), SOURCE.standard_normal((8, k))
    c = SOURCE.standard_normal((16, 8)).astype(np.float32)
    if kind == "tf32":
        a, b = ((x.astype(np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32).astype(float) for x in (a, b))
    else:
        a, b = (halves_to_double(double_to_halves(x, kind), kind) for x in (a, b))
    given = {f"a{i}": ("b32", x) for i, x in enumerate(fragments(a, kind))}
    given |= {f"b{i}": ("b32", x) for i, x in enumerate(fragments(b, kind))}
    places = [(row, column) for row in (0, 8) for column in (0, 1)]
    for i, (row, column) in enumerate(places):
        held = [c[row + lane // 4, 2 * (lane % 4) + column] for lane in range(WARP)]
        given[f"c{i}"] = ("f32", np.array(held, np.float32).view(np.uint32).tolist())
    given |= {f"d{i}": ("f32", None) for i in range(4)}
    named = ("{" + ", ".join(f"%{each}" for each in given if each[0] == letter) + "}" for letter in "dabc")
    frame = run(f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 {', '.join(named)};", WARP, given)
    expected = (a @ b.T + c.astype(float)).astype(np.float32)
    for i, (row, column) in enumerate(places):
        found = frame.registers[f"%d{i}"].view(np.float32)
        np.testing.assert_allclose(
            found, [expected[row + lane // 4, 2 * (lane % 4) + column] for lane in range(WARP)], rtol=1e-6, atol=1e-7
        )


def test_the_last_bits_of_tf32_are_not_read():
    one = {"d": "b32", "a": ("b32", [0x3F801FFF] * WARP), "b": ("b32", [0x3F800000] * WARP)}
    given = {"d": ("f32", None), "z": ("f32", [0] * WARP), "a": one["a"], "b": one["b"]}
    line = "mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%d, _, _, _}, {%a, %a}, {%b}, {%z, %z, %z, %z};"
    assert run(line, WARP, given).registers["%d"].view(np.float32).tolist() == [4.0] * WARP


def test_a_product_that_some_threads_never_come_to():
    given = {"a": ("b32", [0] * WARP), "d": ("f32", None), "p": ("pred", [True] + [False] * 31)}
    line = "mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%d, _, _, _}, {%a, %a}, {%a}, {%d, %d, %d, %d};"
    with pytest.raises(DivergenceFault, match=r"mma\.sync.* waits for other threads, which never come"):
        run(f"@%p ret;\n{line}", WARP, given)


@pytest.mark.parametrize("shape, types", [("m16n8k16", "f32.tf32.tf32.f32"), ("m16n8k8", "f16.f16.f16.f16")])
def test_an_unknown_product_is_named(shape, types):
    given = {"a": ("b32", [0] * WARP), "d": ("b32", None)}
    with pytest.raises(Unknown, match=rf"`mma\.sync\.aligned\.{shape}.*the executor knows no such product"):
        run(f"mma.sync.aligned.{shape}.row.col.{types} {{%d, %d}}, {{%a, %a}}, {{%a}}, {{%d, %d}};", WARP, given)


def copied(line, values, **given):
    """Copy from memory to shared memory, and load 16 bytes from there."""
    memory = np.array(values, np.uint32)
    begin = memory.ctypes.data
    registers = {"x": ("b64", [begin]), "to": ("b32", [0])} | dict.fromkeys("abcd", ("b32", None)) | given
    lines = f"{line};\ncp.async.commit_group;\ncp.async.wait_group 0;\nld.shared.v4.b32 {{%a, %b, %c, %d}}, [%to];"
    frame = run(lines, 1, registers, shared=16, regions=[Region(begin, begin + memory.nbytes, "x")])
    return [int(frame.registers[f"%{name}"][0]) for name in "abcd"]


def test_copies_to_shared_memory():
    assert copied("cp.async.cg.shared.global [%to], [%x], 16", [1, 2, 3, 4]) == [1, 2, 3, 4]
    length = {"n": ("b32", [0])}
    assert copied("cp.async.cg.shared.global [%to], [%x + 4096], 16, %n", [1, 2, 3, 4], **length) == [0] * 4
    length = {"n": ("b32", [16])}
    assert copied("cp.async.cg.shared.global [%to], [%x], 0x10, %n", [1, 2, 3, 4], **length) == [1, 2, 3, 4]


def test_copies_that_cannot_be():
    with pytest.raises(MemoryFault, match="outside every tensor"):
        copied("cp.async.cg.shared.global [%to], [%x + 4096], 16", [1, 2, 3, 4])
    with pytest.raises(Unknown, match="a part of the 16 bytes"):
        copied("cp.async.cg.shared.global [%to], [%x], 16, %n", [1, 2, 3, 4], n=("b32", [8]))
    with pytest.raises(Unknown, match="knows no such copy"):
        copied("cp.async.cg.shared.global [%to], [%x], 12", [1, 2, 3, 4])


@pytest.mark.parametrize(
    "name, x, expected",
    [("ex2.approx", 3.0, 8.0), ("lg2.approx", 8.0, 3.0), ("rcp.approx.ftz", 4.0, 0.25), ("rsqrt.approx", 4.0, 0.5)],
)
def test_approximations_are_the_exact_value_rounded(name, x, expected):
    (raw,) = result(f"{name}.f32 %d, %a", "f32", a=("f32", [int(np.float32(x).view(np.uint32))]))
    assert np.uint32(raw).view(np.float32) == expected


def test_division_of_the_full_range():
    bits = [[int(np.float32(each).view(np.uint32)) for each in pair] for pair in ((1.0, 3e38), (3.0, 2.0))]
    got = result("div.full.f32 %d, %a, %b", "f32", a=("f32", bits[0]), b=("f32", bits[1]))
    expected = np.array([1.0, 3e38], np.float32) / np.array([3.0, 2.0], np.float32)
    assert np.array(got, np.uint32).view(np.float32).tolist() == expected.tolist()

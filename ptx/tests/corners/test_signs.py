"""Signs are bits, and the least and the greatest know them: of zeros, too, and pass over NaN or not."""

from . import exact
from .harness import table

ONE, LEAST, NAN, MINUS = 0x3F800000, 0x00800000, 0x7FC00000, 0x80000000


def test_signs_are_bits():
    rows = [(0, 0), (MINUS, 0), (ONE | MINUS, ONE), (1 | MINUS, 1), (0xFF800000, 0x7F800000), (NAN | MINUS, 0x7FFFFFFF)]
    got, expected = table("abs.f32 %d, %a", "b32", "b32", rows)
    assert got == expected
    got, expected = table("abs.ftz.f32 %d, %a", "b32", "b32", [(1 | MINUS, 0), (LEAST | MINUS, LEAST)])
    assert got == expected
    got, expected = table(
        "neg.f32 %d, %a", "b32", "b32", [(0, MINUS), (MINUS, 0), (ONE, ONE | MINUS), (NAN, 0x7FFFFFFF)]
    )
    assert got == expected
    got, expected = table("abs.bf16x2 %d, %a", "b32", "b32", [(0x8000BF80, 0x3F80), (0xFF81FFC1, 0x7F817FC1)])
    assert got == expected
    got, expected = table("neg.f16x2 %d, %a", "b32", "b32", [(0x00003C00, 0x8000BC00)])
    assert got == expected
    got, expected = table("abs.f64 %d, %a", "b64", "b64", [(1 << 63, 0), (0xFFF0000000000001, 0x7FF0000000000001)])
    assert got == expected
    got, expected = table("copysign.f32 %d, %a, %b", "b32", "b32", [(MINUS, ONE, ONE | MINUS), (0, ONE | MINUS, ONE)])
    assert got == expected


EXTREMES = [  # a, b, min, max
    (0, MINUS, MINUS, 0), (MINUS, 0, MINUS, 0), (MINUS, MINUS, MINUS, MINUS), (ONE, NAN, ONE, ONE),
    (0x7F800001, ONE | MINUS, ONE | MINUS, ONE | MINUS), (NAN, 0x7FC12345, 0x7FFFFFFF, 0x7FFFFFFF),
    (0xFF800000, NAN, 0xFF800000, 0xFF800000), (1, 2, 1, 2), (1 | MINUS, 0, 1 | MINUS, 0),
    (0x7F800000, ONE, ONE, 0x7F800000),
]  # fmt: skip


def test_the_least_and_the_greatest_pass_over_nan_and_know_the_sign_of_zero():
    for column, name in ((2, "min"), (3, "max")):
        rows = [(a, b, (low, high)[column - 2]) for a, b, low, high in EXTREMES]
        got, expected = table(f"{name}.f32 %d, %a, %b", "b32", "b32", rows)
        assert got == expected
        strict = [(a, b, 0x7FFFFFFF if exact.is_nan(a, "f32") or exact.is_nan(b, "f32") else c) for a, b, c in rows]
        got, expected = table(f"{name}.NaN.f32 %d, %a, %b", "b32", "b32", strict)
        assert got == expected


def test_the_least_and_the_greatest_of_three():
    minus, nan = ONE | MINUS, NAN
    rows = [(ONE, minus, 0, minus, ONE), (nan, nan, ONE, ONE, ONE), (nan, nan, nan, 0x7FFFFFFF, 0x7FFFFFFF),
            (0, MINUS, 0, MINUS, 0), (minus, nan, MINUS, minus, MINUS)]  # fmt: skip
    got, expected = table("min.f32 %d, %a, %b, %c", "b32", "b32", [(*row[:3], row[3]) for row in rows])
    assert got == expected
    got, expected = table("max.f32 %d, %a, %b, %c", "b32", "b32", [(*row[:3], row[4]) for row in rows])
    assert got == expected
    got, expected = table("min.NaN.f32 %d, %a, %b, %c", "b32", "b32", [(ONE, ONE, nan, 0x7FFFFFFF)])
    assert got == expected


def test_extremes_of_flushed_and_halves_and_fp64():
    got, expected = table("max.ftz.f32 %d, %a, %b", "b32", "b32", [(1, 2, 0), (1 | MINUS, MINUS, MINUS)])
    assert got == expected
    got, expected = table("max.bf16x2 %d, %a, %b", "b32", "b32", [(0x3F808000, 0x7FC00000, 0x3F800000)])
    assert got == expected
    nan = 0x7FF8000000000000
    rows = [(1 << 63, 0, 1 << 63), (nan, 5, 5), (nan, nan, 0x7FFFFFFFFFFFFFFF)]
    got, expected = table("min.f64 %d, %a, %b", "b64", "b64", rows)
    assert got == expected

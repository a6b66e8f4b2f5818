"""The page of accuracies: encodings of others are those of their documents, and each word follows from the results."""

import json

import pytest
import torch

import baguakit as bk
from bench.accuracy import claims, measures, page, references
from bench.accuracy.formats import ELEMENTS, compressors, formats
from bench.accuracy.references import INT8, Element, mx, nvfp4
from bench.accuracy.sources import distributions
from bench.network.table import RESULTS, Table

FOUND = json.loads((RESULTS / f"{page.NAME}.json").read_text())
FLOATS = [element for element in ELEMENTS.values() if element is not INT8]
each_float = pytest.mark.parametrize("element", FLOATS, ids=str)
each_mx = pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
POWERS = torch.exp2(torch.arange(-20.0, 20, 5))


def numbers(element: Element) -> torch.Tensor:
    """The numbers of a format that are not negative, in the order of their codes: subnormals first."""
    codes = torch.arange(1 << (element.bits - 1))
    field, mantissa = codes >> element.m, codes & ((1 << element.m) - 1)
    steps = torch.where(field == 0, mantissa, mantissa + (1 << element.m))
    read = steps * torch.exp2((field.clamp(min=1) - 1 + element.low - element.m).float())
    return read[read <= element.largest]  # codes above are infinities and NaN


def drawn(n=1 << 12, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@each_float
def test_each_number_is_read_as_itself(element):
    every = numbers(element)
    assert every[-1] == element.largest and len(every) > (1 << (element.bits - 1)) - 6
    assert torch.equal(element.nearest(every), every) and torch.equal(element.nearest(-every), -every)


@each_float
def test_between_two_numbers_the_nearer_is_read_and_of_two_as_near_the_one_with_an_even_code(element):
    every = numbers(element)
    below, above = every[:-1], every[1:]
    middle = (below + above) / 2
    even = torch.where(torch.arange(len(below)) % 2 == 0, below, above)
    assert torch.equal(element.nearest(middle), even)
    assert torch.equal(element.nearest(middle * (1 - 2**-20)), below)
    assert torch.equal(element.nearest(middle * (1 + 2**-20)), above)


@pytest.mark.parametrize(
    "element, dtype", [(references.E4M3, torch.float8_e4m3fn), (references.E5M2, torch.float8_e5m2)]
)
def test_float8_is_that_of_torch(element, dtype):
    x = torch.cat([drawn() * power for power in POWERS])
    assert torch.equal(element.nearest(x), x.clamp(-element.largest, element.largest).to(dtype).float())


@each_mx
def test_in_mx_a_block_of_elements_times_a_power_of_two_is_exact(element):
    for power in POWERS:
        some = element.nearest(drawn(31) * element.largest / 4)
        block = torch.cat([some, torch.tensor([element.largest])]) * power
        assert torch.equal(mx(element, block), block)


def test_in_mxfp4_the_scale_follows_the_largest_value_and_seven_reads_as_six():
    """⌊log2 7⌋ − 2 = 0: the scale is 1. Of 8 it is 2."""
    block = torch.zeros(32)
    block[:4] = torch.tensor([7.0, 0.25, 0.3, -5.0])
    assert mx(references.E2M1, block)[:4].tolist() == [6.0, 0.0, 0.5, -4.0]  # 0.25 and 5 to even
    block[0] = 8
    assert mx(references.E2M1, block)[:4].tolist() == [8.0, 0.0, 0.0, -4.0]


@pytest.mark.parametrize("name", [*ELEMENTS, "NVFP4"])
def test_formats_of_others_scale_with_powers_of_two_and_keep_zero_blocks_and_a_rest(name):
    read = nvfp4 if name == "NVFP4" else lambda x: mx(ELEMENTS[name], x)
    x = torch.cat([drawn(40), torch.zeros(56), drawn(33, seed=1)])
    assert torch.equal(read(x)[48:96], torch.zeros(48)) and torch.equal(read(torch.zeros(50)), torch.zeros(50))
    assert torch.equal(read(x), read(torch.cat([x, torch.zeros(31)]))[: len(x)])
    for power in POWERS:
        assert torch.equal(read(x * power), read(x) * power)


def test_in_nvfp4_elements_times_scales_are_exact_and_a_scale_too_small_for_e4m3_is_zero():
    elements = torch.cat([numbers(references.E2M1), -numbers(references.E2M1)])
    scales = torch.tensor([448.0, 416.0, 1.0, 2.0**-6, 2.0**-9])
    x = (scales[:, None] * elements).flatten()  # their largest is 6 · 448: g is 1
    assert torch.equal(nvfp4(x), x)
    lost = torch.cat([x, elements * 2.0**-11])
    assert torch.equal(nvfp4(lost), torch.cat([x, torch.zeros(16)]))


def test_every_dense_compressor_is_on_the_page():
    x = drawn()[None]
    written = [each.compress(x) for each in compressors()]
    for name in set(bk.compressors.__all__) - {"Compressor", "TopK"}:
        packed = getattr(bk.compressors, name)().compress(x)
        assert any(torch.equal(packed, each) for each in written), name
    assert FOUND["formats"] == [
        {"name": each.name, "bits": each.bits, "ours": each.compressor is not None} for each in formats()
    ]


@pytest.mark.parametrize("name", ["BFloat16()", "MXFP4", "MXINT8", "NVFP4"])
def test_results_are_those_of_the_program(name):
    (source,) = (each for each in distributions() if each.name == "normal")
    (format,) = (each for each in formats() if each.name == name)
    assert measures.vnmse(format.read(source.values), source.values) == pytest.approx(
        FOUND["sources"][0]["vnmse"][name], rel=1e-6
    )


def test_no_code_is_better_than_rate_and_distortion_allow():
    normal = FOUND["sources"][0]
    assert normal["name"] == "normal"
    for format in FOUND["formats"]:
        assert normal["vnmse"][format["name"]] > claims.bound(format["bits"])


def test_every_training_has_a_result_of_each_seed():
    ways = page.ways
    trained = Table(RESULTS / ways.PATH.name)
    for name in ways.TASKS:
        assert all(set(claims.losses(trained, name, way)) == set(ways.SEEDS) for way in ways.ways()), name


def test_the_bits_of_an_asked_error_keep_it_and_all_ranks_the_same_weights():
    wanted, asked = Table(RESULTS / page.asked.PATH.name), page.asked
    assert all(cell in wanted for cell, _, _ in asked.cells())
    for cell, result in wanted:
        assert result["equal"] and result["over"] <= 0.001 and result["median"] <= cell["error"]
        assert result["range"] > 100 or cell["task"] == "embeddings"
        beside = result["fixed"][claims.fixed(result)]
        assert result["bytes"] <= 1.03 * beside["bytes"]  # what it sends in 8 bits until the first choice


def test_the_page_is_what_the_results_give():
    trained, wanted = (Table(RESULTS / each.PATH.name) for each in (page.ways, page.asked))
    assert page.text(FOUND, trained, wanted, "../results") == page.PAGE.read_text()

"""The page of accuracies: each word follows from the results, and they are those of the program."""

import json

import pytest
import torch

import baguakit as bk
from bench.accuracy import claims, measures, page
from bench.accuracy.formats import compressors, formats
from bench.accuracy.sources import distributions
from bench.network.table import RESULTS, Table

FOUND = json.loads((RESULTS / f"{page.NAME}.json").read_text())


def drawn(n=1 << 12):
    return torch.randn(n, generator=torch.Generator().manual_seed(0))


def test_every_dense_compressor_is_on_the_page():
    x = drawn()[None]
    written = [each.compress(x) for each in compressors()]
    for name in set(bk.compressors.__all__) - {"Compressor", "TopK"}:
        packed = getattr(bk.compressors, name)().compress(x)
        assert any(torch.equal(packed, each) for each in written), f"add {name} to bench/accuracy/formats.py"
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

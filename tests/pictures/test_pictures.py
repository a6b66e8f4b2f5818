"""Pictures show the numbers that they were given. What cannot be tested here is whether they look well."""

import math

import pytest
import torch

from baguakit.compressors import BFloat16, MinMaxUInt8, TopK
from baguakit.pictures import ALGORITHMS, OTHERS, consensus_decay, error_histogram, style_of
from baguakit.topology import OnePeerExact, RandomMatching, Ring

pytest.importorskip("matplotlib")


def lines(axes):
    return {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_consensus_is_drawn_as_measured_beside_what_the_gap_promises():
    measured = {Ring(): [1.0, 0.7, 0.5], OnePeerExact(): [1.0, 0.6, 0.0], RandomMatching(): [1.0, 0.8, 0.7]}
    axes = consensus_decay(measured, 4).axes[0]
    drawn = list(lines(axes).values())
    rho = 1 - Ring().spectral_gap(4)
    assert drawn[0] == [[t, rho**t] for t in range(3)]
    assert drawn[1] == [[0, 1.0], [1, 0.7], [2, 0.5]]
    assert drawn[2][:2] == [[0, 1.0], [1, 0.6]] and math.isnan(drawn[2][2][1])  # 0 has no point
    assert drawn[3] == [[1, 0.6], [2, axes.get_ylim()[0]]]  # a line falls to the bottom instead
    assert drawn[4] == [[0, 1.0], [1, 0.8], [2, 0.7]] and len(drawn) == 5
    assert legend(axes.figure) == [
        f"Ring(): ρ = {rho:.3f}",
        "OnePeerExact(): exact after 2",
        "RandomMatching(): no bound for a round",
    ]


def test_every_error_is_in_the_histogram_or_beyond_three_deviations():
    torch.manual_seed(0)
    x = torch.randn(20_000)
    figure = error_histogram(x, MinMaxUInt8(), BFloat16(), TopK(0.1), MinMaxUInt8())
    panels = [axes for axes in figure.axes if axes.patches]
    assert len(panels) == 4
    for axes in panels:
        assert 0.97 * len(x) < sum(bar.get_height() for bar in axes.patches) <= len(x)
    assert panels[1].get_title().startswith("BFloat16()\n16 bits a value, error 0.1")
    kept = [bar for bar in panels[2].patches if bar.get_x() < 0 < bar.get_x() + bar.get_width()]
    assert kept[0].get_height() >= 0.1 * len(x)  # what top-k keeps, it keeps exactly


def test_refusals_are_sentences():
    for wrong in ({}, {Ring(): []}, {Ring(): [1.0, -1.0]}, {Ring(): [float("nan")]}):
        with pytest.raises(ValueError, match=r"distances (has numbers, 0 or more|is a finite number)"):
            consensus_decay(wrong, 4)
    for x, compressors in ((torch.ones(4), ()), (torch.zeros(4), (BFloat16(),)), (torch.ones(0), (BFloat16(),))):
        with pytest.raises(ValueError, match="x has values, not all of them 0, and compressors names one or more"):
            error_histogram(x, *compressors)


def test_an_algorithm_has_one_colour_in_all_pictures_and_its_variants_have_dashes():
    assert style_of("bytegrad") == style_of("bytegrad()") == {"color": "#0072B2", "linestyle": "-"}
    variants = [style_of(f"bytegrad, {bits} bits") for bits in (4, 2)]
    assert {style["color"] for style in variants} == {"#0072B2"} and variants[0] != variants[1]
    assert style_of("gradient_allreduce") == style_of("ddp") == style_of("DDP")
    assert style_of("a_user's") == style_of("a_user's") and style_of("a_user's")["color"] in OTHERS
    assert len({*ALGORITHMS.values(), *OTHERS}) == len(ALGORITHMS) + len(OTHERS)

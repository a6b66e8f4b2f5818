"""Lines: those that times come from are found again; a network prints, travels, and names what it lacks."""

import random

import pytest

from baguakit.tune import Codec, Line, Link, Network
from baguakit.tune.probing import fit

SIZES = [1 << power for power in range(10, 25, 2)]


@pytest.mark.parametrize("alpha", [0.0, 1e-6, 3e-4, 0.2])
@pytest.mark.parametrize("beta", [0.0, 1e-11, 8e-10, 1e-7])
def test_the_line_of_exact_times_is_found(alpha, beta):
    if alpha or beta:
        line = fit({b: [alpha + beta * b] * 3 for b in SIZES})
        assert (line.alpha, line.beta) == pytest.approx((alpha, beta), rel=1e-9, abs=1e-18)


def test_two_sizes_are_enough():
    assert fit({1000: [1.5e-3], 2000: [2.5e-3]}).beta == pytest.approx(1e-6, rel=1e-12)


def test_the_line_is_found_within_the_noise_and_past_what_comes_late():
    """Each time is off by at most 5 %, and of each size a minority comes ten times too late."""
    for seed in range(50):
        draw = random.Random(seed)
        times = {b: [(2e-4 + 8e-9 * b) * draw.uniform(0.95, 1.05) for _ in range(5)] for b in SIZES}
        for each in times.values():
            each[0] *= 10
        line = fit(times)
        assert line.alpha == pytest.approx(2e-4, rel=0.1) and line.beta == pytest.approx(8e-9, rel=0.1)


def test_what_a_burst_lets_through_does_not_bend_the_line():
    """A link that lets 50 kB pass at once, and then 12.5 MB/s: small messages tell α, large ones β."""
    burst, beta = 50_000, 8e-8
    line = fit({b: [2e-4 + beta * max(0, b - burst)] for b in SIZES})
    assert line.alpha <= 1e-3 and line.beta == pytest.approx(beta, rel=0.1)


NETWORK = Network(
    4,
    2,
    "cpu",
    1,
    (
        Link("flat", 1, 4, Line(1e-4, 1e-8, 2e-9), Line(2e-4, 1.1e-8)),
        Link("inter", 2, 2, Line(1e-4, 1e-8), Line(2e-4, 1e-8)),
    ),
    (Codec("MinMaxUInt8()", 1e-9, 5e-10, 6e-10),),
    copy=2e-10,
    launch=3e-5,
    crowding=0.5,
)


def test_a_network_travels_as_json_and_prints():
    assert Network.from_json(NETWORK.to_json()) == NETWORK
    lines = str(NETWORK).splitlines()
    assert lines[0] == "4 ranks, 2 a node, cpu, 1 threads"
    rows = [line.split() for line in lines[2:]]
    assert rows[0] == ["flat", "1", "4", "message", "100", "µs", "100.0", "MB/s", "20%"]
    assert rows[1] == ["all-reduce", "200", "µs", "90.9", "MB/s", "0%"]
    assert rows[2] == ["all-to-all", *rows[0][4:]]  # which is not measured: as messages
    assert lines[-2].split() == ["MinMaxUInt8()", "4.00", "GB/s", "8.00", "GB/s", "6.67", "GB/s"]
    assert lines[-1] == "copying 5.00 GB/s, launching 30 µs, a second thread takes 50% of the first"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"links": 3, "codecs": []}', '{"links": [], "codecs": [], "beta": 1}']
)
def test_what_is_no_network_is_refused(text):
    with pytest.raises(ValueError, match=r"Network\.to_json never wrote"):
        Network.from_json(text)


def test_what_was_not_measured_is_named():
    from baguakit.compressors import UInt4

    with pytest.raises(ValueError, match="'flat' network over 8 flows, only of flat over 1, inter over 2"):
        NETWORK.link("flat", 8)
    with pytest.raises(ValueError, match=r"speed of UInt4\(\); probe it with compressors="):
        NETWORK.codec(UInt4())
    assert NETWORK.flows() == (1, 2)

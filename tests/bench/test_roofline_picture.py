"""The picture of the roofline shows the rows it was given, and sets apart calls that were disturbed."""

import pytest

from bench.roofline_picture import KEY, roofline

pytest.importorskip("matplotlib")

ROWS = [
    {"family": family, "name": name, "values": values, "bytes": 5 * values, "seconds": values * 1e-9, "share": 0.5}
    for family in ("MinMaxUInt8()", "mixing")
    for name in ("compress", "decompress")
    for values in (1024, 4096)
]
MEASURED = {"machine": {"device": "CPU", "processor": "some", "date": "2026-11-21"}, "rows": ROWS}


def curves(axes):
    return [line.get_xydata().tolist() for line in axes.get_lines()]


def test_families_have_rows_of_panels_and_operations_have_lines():
    figure = roofline(MEASURED)
    assert len(figure.axes) == 4
    assert curves(figure.axes[0])[0] == [[1024, 0.5], [4096, 0.5]]
    assert curves(figure.axes[1])[0] == [[1024, pytest.approx(1.024)], [4096, pytest.approx(4.096)]]
    assert KEY not in figure.get_suptitle()
    assert len(roofline(MEASURED, ["mixing"]).axes) == 2


def test_a_call_that_took_longer_than_one_on_more_values_is_a_cross():
    rows = [{**row, "seconds": 1.0} if row["values"] == 1024 and row["name"] == "compress" else row for row in ROWS]
    figure = roofline(MEASURED | {"rows": rows}, ["mixing"])
    assert curves(figure.axes[1])[:2] == [[[4096, pytest.approx(4.096)]], [[1024, 1e6]]]
    assert figure.get_suptitle().endswith(KEY)


def test_a_family_without_rows_is_refused():
    with pytest.raises(ValueError, match=r"no rows of families \['top-k'\]; it has MinMaxUInt8\(\), mixing"):
        roofline(MEASURED, ["top-k"])

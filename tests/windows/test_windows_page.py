"""The code of the page on windows runs, from the first block to the last."""

from commands import ROOT, blocks_of
from pool import ranks

PAGE = ROOT / "docs" / "windows.md"


def run(blocks):
    names = {}
    for code in blocks:
        exec(compile(code, "windows.md", "exec"), names)
    return names["mean"]


def test_the_page_s_code_runs():
    assert all(0 < mean.mean() < 3 for mean in ranks(4, run, list(blocks_of(PAGE))))

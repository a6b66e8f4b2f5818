"""The code of the page on windows runs, from the first block to the last."""

import torch
from commands import ROOT, blocks_of
from pool import ranks

PAGE = ROOT / "docs" / "windows.md"


def run(blocks):
    names = {}
    for code in blocks:
        exec(compile(code, "windows.md", "exec"), names)
    return names["mean"]


def test_the_page_s_code_runs():
    means = ranks(4, run, list(blocks_of(PAGE)))
    torch.testing.assert_close(torch.stack(means), torch.full((4, 1000), 1.5), rtol=0, atol=0.01)

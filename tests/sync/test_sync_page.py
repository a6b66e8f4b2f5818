"""The code of the page on weights for inference runs, from the first block to the last."""

import json

from commands import ROOT, blocks_of

from bench.changed_weights import RESULT, table

PAGE = ROOT / "docs" / "situations" / "rl_weights.md"


def test_the_page_s_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code in blocks_of(PAGE):
        exec(compile(code, str(PAGE), "exec"), {})


def test_the_page_s_shares_are_those_that_were_measured():
    rows = table(json.loads(RESULT.read_text())["models"])
    assert len(rows) == 8
    assert "\n".join(rows) in PAGE.read_text()

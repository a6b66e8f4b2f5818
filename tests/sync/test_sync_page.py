"""The code of the page on weights for inference runs, from the first block to the last."""

from commands import ROOT, blocks_of

PAGE = ROOT / "docs" / "situations" / "rl_weights.md"


def test_the_page_s_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code in blocks_of(PAGE):
        exec(compile(code, str(PAGE), "exec"), {})

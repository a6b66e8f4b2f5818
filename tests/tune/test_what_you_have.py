"""The programs of docs/situations/what_you_have.md print what the page shows."""

import contextlib
import io
import re
from dataclasses import replace

from commands import ROOT

from baguakit.tune import Machine

PAGE = (ROOT / "docs" / "situations" / "what_you_have.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_programs_print_what_the_page_shows():
    names, printed, shown = {"__name__": "__main__"}, "", 0
    for kind, text in BLOCK.findall(PAGE):
        if kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(text, "what_you_have.md", "exec"), names)
            printed = out.getvalue()
        else:
            assert printed == text
            assert all("simulated" in line for line in text.splitlines())
            shown += 1
    assert shown == 6
    kinds = [replace(Machine(**vars(each))) for each in names["spot"]]
    assert kinds == names["spot"]  # a machine is what a file can hold

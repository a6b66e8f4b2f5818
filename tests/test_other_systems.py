"""Windows and macOS as far as Linux can stand in for them: see `other_systems.py`. Real ones have not run."""

import json
import subprocess
import sys
from pathlib import Path

import other_systems
import pytest
from pool import ranks


@pytest.mark.slow
@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_every_module_is_imported_and_every_kind_of_algorithm_trains_to_the_same_bits(system, tmp_path):
    here = ranks(2, other_systems.digests)
    program = [sys.executable, str(Path(other_systems.__file__)), system]
    started = [
        subprocess.Popen([*program, str(rank), str(tmp_path / "meeting")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert [json.loads(each.communicate()[0]) for each in started] == here


def test_windows_trains_on_cpus_and_the_rest_says_what_it_lacks():
    program = """
import other_systems; other_systems.pretend("win32")
import baguakit as bk
from baguakit.command import main
assert main(["doctor"]) == 0
for call in (lambda: bk.Ranks(2).run(print), lambda: bk.net.build(), lambda: bk.data.LMDBStore("x")):
    try:
        call()
    except (OSError, ValueError, ImportError) as error:
        print(error)
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert "Training on CPUs will run." in run.stdout
    assert "GPUs, Triton kernels, the NCCL plugin and `demo --rate` need Linux." in run.stdout
    assert run.stdout.splitlines()[-3:] == [
        "live ranks need os.fork, which win32 lacks; start the program with torchrun",
        "the NCCL plugin is for Linux, and this is Windows",
        "LMDBStore needs the file locks of POSIX systems; use MemoryStore or RedisStore",
    ], run.stderr

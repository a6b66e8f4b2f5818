"""Libraries of compiled units: made once for all processes of a user, and loaded only if nobody else made them."""

import logging
import multiprocessing
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from baguakit.kernels.inductor import units

pytestmark = pytest.mark.skipif(not units.compiler(), reason="no C++ compiler")

SOURCE = 'extern "C" int unit_0(float *out, const float *x, long rows) { out[0] = 2 * x[0] + rows; return 0; }'


def double_(out: torch.Tensor, x: torch.Tensor) -> None:
    out.copy_(2 * x)


CALL = (double_, (torch.zeros(2, 1), torch.zeros(2, 1)))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A cache of one's own, and a compiler that takes no time and counts what it has made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(units, "_make", make)
    monkeypatch.setenv("MADE", str(tmp_path / "made"))
    units._once.cache_clear()
    return tmp_path / "cache" / "baguakit" / "cpu"


def make(calls, room):
    with open(os.environ["MADE"], "a") as file:
        file.write("*")
    source, library = Path(room, "units.cpp"), Path(room, "units.so")
    source.write_text(SOURCE)
    subprocess.run([units.compiler(), "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def made() -> int:
    return len(Path(os.environ["MADE"]).read_text())


def works() -> bool:
    out, x = torch.zeros(2, 1), torch.ones(2, 1)
    (unit,) = units.load([CALL])
    unit(out, x)
    return out[0].item() == 4.0  # that of the library, which counts rows


def test_what_one_process_has_made_others_load(home):
    assert works() and works() and made() == 1
    assert stat.S_IMODE(home.stat().st_mode) == 0o700 and len([*home.glob("*.so")]) == 1


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: data + b"x"])
def test_a_broken_library_is_made_anew(home, damage):
    assert works()
    (path,) = home.glob("*.so")
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(damage(whole))
    assert works() and made() == 2
    assert len([*home.glob("*.so")]) == 1 and works() and made() == 2


def test_a_folder_that_others_can_write_to_is_not_trusted(home, caplog):
    assert works()
    home.chmod(0o770)
    assert works() and works() and made() == 3
    assert sum("mode 0700" in record.message for record in caplog.records) == 1
    home.chmod(0o700)
    assert works() and made() == 3


def test_a_folder_of_another_user_is_not_trusted(home, monkeypatch):
    assert works()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert works() and made() == 2


def test_without_a_place_to_keep_it_a_process_makes_its_own(home, monkeypatch, caplog):
    home.parents[1].mkdir()
    home.parent.write_text("a file, where a folder should be")
    assert works() and made() == 1
    assert sum("no folder can keep it" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("what", ["_machine", "_described"])
def test_another_machine_or_unit_has_another_library(home, monkeypatch, what):
    assert works()
    before = getattr(units, what)
    other = {"_machine": lambda: [*before(), "other"], "_described": lambda *call: before(*call) + "other"}[what]
    monkeypatch.setattr(units, what, other)
    assert works() and made() == 2 and len([*home.glob("*.so")]) == 2


def _start(ready, results):
    torch.set_num_threads(1)
    ready.wait()
    results.put(works())


def test_of_many_processes_one_compiles(home):
    context = multiprocessing.get_context("fork")  # which keeps the compiler of the test
    ready, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_start, args=(ready, results)) for _ in range(4)]
    for process in processes:
        process.start()
    assert all(results.get(timeout=60) for _ in processes) and made() == 1
    for process in processes:
        process.join()


def test_a_lock_ends_with_its_process(home, caplog, monkeypatch):
    assert works()
    for path in home.glob("*.so"):
        path.unlink()
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True)"
    holder = subprocess.Popen(
        [sys.executable, "-c", code + "; sys.stdin.read()", str(home / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == b"held\n"
    monkeypatch.setattr(units, "QUIET", 0.0)
    heard = Listener(holder.kill)
    units._log.addHandler(heard)
    caplog.set_level(logging.INFO, units._log.name)  # it forgets what the logger remembers of its level
    try:
        assert works() and made() == 2 and heard.said == 1
    finally:
        units._log.removeHandler(heard)
        holder.kill()
        holder.communicate()


class Listener(logging.Handler):
    """Does something when it is said that a process waits."""

    def __init__(self, then):
        super().__init__()
        self.then, self.said = then, 0

    def emit(self, record):
        if "waits for another process" in record.getMessage():
            self.said += 1
            self.then()


def test_a_unit_that_differs_from_its_definition_is_not_used(home, monkeypatch, caplog):
    monkeypatch.setattr(units, "_units", {})
    units.call((), double_, *CALL[1])
    assert units._units[double_, (), 2] is double_
    assert "its result differs" in caplog.text


LATER = """
import sys, torch, time
from baguakit.compressors import MinMaxUInt8
began = time.process_time()
MinMaxUInt8().warm_up("cpu")
packed = MinMaxUInt8().compress(torch.randn(1, 1 << 20))
took = time.process_time() - began
from baguakit.kernels.inductor import units
assert all(made is not key[0] for key, made in units._units.items()), "a unit runs as written"
assert len(units._units) == 7 and "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules
print(took)
"""


@pytest.mark.slow  # two processes import torch
def test_a_later_process_needs_neither_dynamo_nor_a_second():
    """In the cache of this user, where the other tests have put it, too."""
    subprocess.run(
        [sys.executable, "-c", "from baguakit.compressors import *; MinMaxUInt8().warm_up('cpu')"], check=True
    )
    result = subprocess.run([sys.executable, "-c", LATER], check=True, capture_output=True, text=True)
    assert float(result.stdout) <= 1.0

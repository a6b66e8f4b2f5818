"""Compiled families: compiled once for all processes of a user, made again if damaged, and never needed."""

import fcntl
import multiprocessing
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from baguakit import compiling
from baguakit.kernels import cpu

COMPILER = cpu.compiler()
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")
SOURCE = '#include "common.h"\nint doubled(int x) { return 2 * x; }\n'
COUNTING = """#!/bin/sh
echo call >> {calls}
{first}
exec {compiler} "$@" {more}
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A cache of one's own, a family in C, and a compiler that counts its calls."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    (tmp_path / "family.c").write_text(SOURCE)
    monkeypatch.setitem(cpu.SOURCES, "family", tmp_path / "family.c")
    write_compiler(tmp_path)
    remembered = cpu.functions, compiling.machine, cpu._warn_once
    for each in remembered:
        each.cache_clear()
    yield tmp_path
    for each in remembered:
        each.cache_clear()


def write_compiler(home, first="", more=""):
    path = home / "cc"
    path.write_text(COUNTING.format(calls=home / "calls", first=first, compiler=COMPILER, more=more))
    path.chmod(0o755)


def calls(home) -> int:
    path = home / "calls"
    return len(path.read_text().splitlines()) if path.exists() else 0


def works(home) -> bool:
    """Return whether a process that has not loaded the family yet can use it."""
    cpu.functions.cache_clear()
    library = cpu.functions("family")
    return library is not None and library.doubled(21) == 42


def folder(home) -> Path:
    return home / "cache" / "baguakit" / "cpu"


@needs_compiler
def test_later_uses_load_what_the_first_has_compiled(home):
    assert works(home) and works(home) and calls(home) == 1
    assert stat.S_IMODE(folder(home).stat().st_mode) == 0o700
    assert sorted(path.suffix for path in folder(home).iterdir()) == [".lock", ".so"]  # the lock and the library


@needs_compiler
def test_a_later_process_does_not_call_the_compiler(home):
    assert works(home)
    code = (
        "import sys, pathlib, baguakit.kernels.cpu as cpu; "
        "cpu.SOURCES['family'] = pathlib.Path(sys.argv[1]); print(cpu.functions('family').doubled(4))"
    )
    later = subprocess.run([sys.executable, "-c", code, home / "family.c"], capture_output=True, text=True, check=True)
    assert later.stdout == "8\n" and calls(home) == 1


@needs_compiler
@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: data + b"x"])
def test_a_damaged_library_is_made_again(home, damage):
    assert works(home)
    (path,) = folder(home).glob("*.so")
    whole = path.read_bytes()
    path.unlink()  # this process has loaded it
    path.write_bytes(damage(whole))
    assert works(home) and calls(home) == 2
    (path,) = folder(home).glob("*.so")
    assert works(home) and calls(home) == 2


@needs_compiler
@pytest.mark.parametrize("change", ["source", "compiler", "processor"])
def test_whatever_the_code_depends_on_has_a_library_of_its_own(home, monkeypatch, change):
    assert works(home)
    if change == "source":
        (home / "family.c").write_text(SOURCE + "\n")
    elif change == "compiler":
        write_compiler(home, first="# an update")
    else:
        before = compiling.machine
        monkeypatch.setattr(compiling, "machine", lambda found: before(found) + b"other")
    if change != "processor":
        compiling.machine.cache_clear()
    assert works(home) and calls(home) == 2 and len([*folder(home).glob("*.so")]) == 2


def _start(home, ready, results):
    ready.wait()
    results.put(works(home))


@needs_compiler
def test_of_many_processes_one_compiles(home):
    context = multiprocessing.get_context("fork")
    ready, results = context.Barrier(6), context.Queue()
    processes = [context.Process(target=_start, args=(home, ready, results)) for _ in range(6)]
    for process in processes:
        process.start()
    assert all(results.get(timeout=60) for _ in processes) and calls(home) == 1
    for process in processes:
        process.join()


@needs_compiler
def test_a_process_that_ends_gives_up_the_lock_and_one_that_hangs_is_not_waited_for(home, monkeypatch):
    assert works(home)
    for path in folder(home).glob("*.so"):
        path.unlink()
    with open(folder(home) / "family.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(compiling, "PATIENCE", 0.0)
        assert works(home) and calls(home) == 2
        for path in folder(home).glob("*.so"):
            path.unlink()
        monkeypatch.setattr(compiling, "PATIENCE", 60.0)
        found = []
        waiting = threading.Thread(target=lambda: found.append(works(home)))
        waiting.start()
    waiting.join()  # the lock is free
    assert found == [True] and calls(home) == 3


@needs_compiler
@pytest.mark.parametrize("spoil", ["shared", "foreign", "a file", "read-only"])
def test_without_a_folder_of_its_own_a_process_compiles_for_itself(home, monkeypatch, caplog, spoil):
    if spoil == "shared":
        assert works(home)
        folder(home).chmod(0o770)
    elif spoil == "foreign":
        assert works(home)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    elif spoil == "a file":
        (home / "cache").write_text("a file, where a folder should be")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")  # where root cannot write either
    before = calls(home)
    assert works(home) and works(home) and calls(home) == before + 2
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "no folder can keep them" in said[0]
    assert ("mode 0700" in said[0]) == (spoil in ("shared", "foreign"))


def test_without_a_compiler_definitions_run_and_one_line_says_so(home, monkeypatch, caplog):
    monkeypatch.delenv("CC")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert not works(home) and not works(home)
    assert len(caplog.records) == 1 and "no C compiler (cc, gcc, clang) was found" in caplog.text


@needs_compiler
def test_a_compiler_that_fails_is_quoted_and_definitions_run(home, caplog):
    write_compiler(home, first="echo 'no space left on device' >&2; exit 1")
    assert not works(home)
    (record,) = caplog.records
    assert "family.c cannot be compiled" in record.getMessage() and "no space left on device" in record.getMessage()
    assert cpu.functions("family") is None and len(caplog.records) == 1  # it is tried once a process


@needs_compiler
def test_a_compiler_that_does_not_know_the_processor_compiles_without(home):
    write_compiler(home, first='case "$*" in *native*) echo "unknown option" >&2; exit 1;; esac')
    assert works(home) and calls(home) == len(cpu.NATIVE)


@needs_compiler
def test_arithmetic_that_is_not_exact_is_refused(home, caplog):
    write_compiler(home, more="-fassociative-math -fno-signed-zeros")  # -ffast-math would change this process
    assert not works(home) and "compiles family.c inexactly" in caplog.text

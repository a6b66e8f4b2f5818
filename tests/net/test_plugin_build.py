"""The NCCL plugin's library: how it is built, kept and hardened; and the command line."""

import ctypes
import shutil
import subprocess

import pytest

from baguakit.command import main
from baguakit.net import build


def test_the_command_line_builds(library, capsys, tmp_path):
    assert main(["net", "build", "--out", str(tmp_path / "new")]) == 0
    path = tmp_path / "new" / "libnccl-net-baguanet.so"
    kept = "export NCCL_NET_PLUGIN_REF_COUNT=1\n"  # in a second group, too
    assert capsys.readouterr().out == f"export NCCL_NET_PLUGIN={path}\n{kept}"
    assert ctypes.CDLL(str(path)).ncclNetPlugin_v8 and list(path.parent.iterdir()) == [path]


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf shows how a library was linked")
def test_the_library_is_hardened(library):
    def shown(*options):
        return subprocess.run(["readelf", "-W", *options, str(library)], capture_output=True, text=True).stdout

    segments = {line.split()[0]: line for line in shown("-l").splitlines() if line.startswith("  GNU_")}
    assert "GNU_RELRO" in segments and " RW " in segments["GNU_STACK"]  # no stack that can be executed
    assert "BIND_NOW" in shown("-d") and "TEXTREL" not in shown("-d")  # nothing to overwrite once it is loaded
    rows = [line.split() for line in shown("--dyn-syms").splitlines() if " UND " in line]
    imported = {row[7].partition("@")[0] for row in rows if len(row) > 7}
    assert "__stack_chk_fail" in imported and any(name.endswith("_chk") for name in imported)


def test_a_build_is_kept(library, tmp_path, monkeypatch):
    compiled = []

    def compiler(out, source, commands):
        compiled.append(commands)
        out.touch()

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    monkeypatch.setattr("baguakit.net.compile_to", compiler)
    path = build()
    assert path.is_relative_to(tmp_path / ".cache" / "baguakit") and path.is_file()
    assert build() == path and len(compiled) == 1
    assert build(flags=["-O0"]) != path and len(compiled) == 2


def test_errors_of_building_are_sentences(library, tmp_path, monkeypatch, capsys):
    with pytest.raises(TypeError, match="flags is a list, each of it a string, not '-O0'"):
        build(flags="-O0")
    with pytest.raises(ValueError, match="no C compiler: nocc is not on the PATH"):
        build(tmp_path, compiler="nocc")
    with pytest.raises(RuntimeError, match=r"could not compile baguanet\.c"):
        build(tmp_path, flags=["-fno-such-flag"])
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert main(["net", "build"]) == 1
    assert capsys.readouterr().err == "baguakit: the NCCL plugin is for Linux, and this is Darwin\n"

"""The doctor: it finds what is there, and says in words what is not and which command mends it."""

import shutil
import socket
from importlib import metadata

import pytest
import torch

from baguakit.command import doctor, main
from baguakit.command.doctor import BROKEN, GOOD, LACKS
from baguakit.kernels import cpu


def only(findings):
    (found,) = findings
    return found


def nothing(*_):
    return None


def absent(*_):
    raise metadata.PackageNotFoundError


def test_the_doctor_finds_that_this_machine_trains(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert f"{torch.__version__}, built" in said
    assert "two processes averaged a tensor over gloo on loopback" in said
    assert "Training on CPUs will run." in said
    assert max(map(len, said.splitlines())) <= 80


def test_a_broken_core_is_said_and_is_the_exit_status(capsys, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    monkeypatch.setattr(doctor, "CHECKS", (doctor.network,))
    monkeypatch.setattr(doctor, "driver", lambda *_: "")
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth7")])
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "GLOO_SOCKET_IFNAME names nowhere0, which is not there" in said
    assert "export GLOO_SOCKET_IFNAME=eth7" in said and "The core cannot work." in said


def test_a_missing_compiler_is_said_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(cpu, "compiler", nothing)
    found = only(doctor.compilers())
    assert found.kind is LACKS and found.mend == "sudo apt install gcc"
    assert "many times slower, and `baguakit net build` will not run" in found.loses


@pytest.mark.skipif(cpu.compiler() is None, reason="no C compiler")
def test_all_kernels_are_compiled_and_where_they_are_kept_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "SOURCES", {"good": tmp_path / "good.c", "bad": tmp_path / "bad.c"})
    monkeypatch.setattr(cpu, "functions", lambda family: None if family == "bad" else object())
    found = [*doctor.compilers()][-1]
    assert (found.kind, found.found) == (LACKS, "bad not compiled: see above")
    monkeypatch.setattr(cpu, "functions", lambda family: object())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [*doctor.compilers()][-1].found == f"2 files compiled, kept in {tmp_path}/baguakit/cpu"
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert "not kept: each process compiles them for itself" in [*doctor.compilers()][-1].found


def test_a_gpu_that_torch_cannot_use_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert only(doctor.gpus()).found == "nvidia-smi is there, but torch is built for CPUs"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert only(doctor.gpus()).mend.startswith("update the driver to one for CUDA 13.0")
    monkeypatch.setattr(shutil, "which", nothing)
    assert only(doctor.gpus()).loses == "Training on GPUs will not run: there is none"


def test_old_and_missing_libraries_are_said(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: absent() if name == "triton" else "2.9.1+cpu")
    found = {each.what: each for each in doctor.versions()}
    assert (found["torch"].kind, found["torch"].found) == (BROKEN, "2.9.1+cpu is older than 2.11")
    assert found["Triton"].mend == "pip install 'triton>=3.6,<3.10'"


def test_a_host_whose_name_is_loopback_is_told_to_name_an_interface(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    found = [*doctor.network()][-1]
    assert found.found == "takes 127.0.1.1, the address of box: loopback only"
    assert found.mend == "export GLOO_SOCKET_IFNAME=eth0" and "Several machines" in found.loses
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.5")
    assert [*doctor.network()][-1].kind is GOOD


@pytest.mark.parametrize("error", [OSError("no fork"), RuntimeError("on rank 1:\nOSError: no loopback")])
def test_ranks_that_cannot_train_break_the_core(monkeypatch, error):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(doctor, "Ranks", fails)
    found = only(doctor.two_ranks())
    assert found.kind is BROKEN and found.found == f"cannot train together: {str(error).splitlines()[-1]}"

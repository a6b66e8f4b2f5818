"""Settings for NCCL's own sockets, from a link that is measured or given; and the command line."""

import argparse
import ctypes
import inspect
import shutil
import socket
import subprocess
import threading
import time
from contextlib import ExitStack

import pytest

from baguakit.command import main
from baguakit.command.net import fill
from baguakit.compare.pacing import cap
from baguakit.net import SocketSettings, build, link, measure, nccl_socket_settings, serve


def given(one_flow, most, one_thread=float("inf")):
    """A link on which a flow carries `one_flow`, a thread `one_thread`, and all together `most`."""
    return {
        (threads, sockets): min(threads * sockets * one_flow, threads * one_thread, most)
        for threads, sockets in link.LAYOUTS
    }


@pytest.mark.parametrize(
    "rates, threads, sockets",
    [
        (given(one_flow=1e9, most=1e9), 1, 1),
        (given(one_flow=1e9, most=8e9), 1, 8),  # flows are limited, threads are not: one thread is enough
        (given(one_flow=1e9, most=8e9, one_thread=4e9), 2, 4),
        (given(one_flow=1e9, most=8e9, one_thread=1e9), 8, 1),
        (given(one_flow=1e9, most=1e12), 8, 8),
        ({(1, 1): 95.0, (2, 2): 100.0}, 1, 1),  # 95 % is enough
        ({(1, 1): 94.9, (2, 2): 100.0}, 2, 2),
    ],
)
def test_the_fewest_flows_and_threads_that_carry_enough(rates, threads, sockets):
    settings = nccl_socket_settings(rates)
    assert settings == SocketSettings(threads, sockets, rates[threads, sockets])
    assert settings.flows == threads * sockets
    assert settings.environment() == {
        "NCCL_SOCKET_NTHREADS": str(threads),
        "NCCL_NSOCKS_PERTHREAD": str(sockets),
    }


@pytest.mark.parametrize(
    "threads, sockets, rate, sentence",
    [
        (17, 1, 1.0, "threads is a whole number, 1 to 16, not 17"),
        (0, 1, 1.0, "threads is a whole number, 1 to 16, not 0"),
        (1, 0, 1.0, "sockets_per_thread is a whole number, 1 to 64, not 0"),
        (16, 5, 1.0, "NCCL uses 1 to 64 sockets per connection, and 16 threads of 5 are 80"),
        (1, 1, 0.0, "rate is a finite number, greater than 0, not 0.0"),
        (1, 1, float("nan"), "rate is a finite number, greater than 0, not nan"),
    ],
)
def test_what_nccl_would_not_take_is_refused(threads, sockets, rate, sentence):
    with pytest.raises(ValueError, match=sentence):
        nccl_socket_settings({(threads, sockets): rate})


def served():
    """The port of a server in this process, which ends with it."""
    ports, come = [], threading.Event()

    def ready(address, port):
        ports.append(port)
        come.set()

    threading.Thread(target=serve, args=("127.0.0.1", 0), kwargs={"ready": ready}, daemon=True).start()
    assert come.wait(20)
    return ports[0]


@pytest.fixture(scope="module")
def server():
    return served()


@pytest.mark.slow  # seconds of a connection at its cap
def test_a_limited_flow_is_measured_as_limited(server, monkeypatch):
    """Flows of 20 MB/s each: four carry four times what one does, whatever the threads."""
    connect = socket.create_connection

    def limited(*arguments, **options):
        flow = connect(*arguments, **options)
        cap(flow, 20_000_000)
        flow.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        return flow

    monkeypatch.setattr(socket, "create_connection", limited)
    for _ in range(5):  # a machine that is busy with other things can only make it slower
        rates = measure("127.0.0.1", server, layouts=[(1, 1), (1, 4), (4, 1)], seconds=0.5)
        assert rates[1, 1] <= 1.2 * 20e6  # a flow begins with a burst
        if rates[1, 4] > 2.5 * rates[1, 1] and rates[4, 1] > 2.5 * rates[1, 1]:
            break
    else:
        raise AssertionError(f"four flows carry less than 2.5 times what one does: {rates}")
    assert nccl_socket_settings(rates).flows == 4


def test_strangers_are_sent_away_by_the_server(server):
    with socket.create_connection(("127.0.0.1", server)) as stranger:
        stranger.settimeout(20)
        stranger.sendall(b"GET / HTTP/1.1\r\n")  # as long as a hello
        assert stranger.recv(1) == b""


def test_a_server_has_few_threads_and_lets_in_who_comes_when_others_leave(monkeypatch):
    """Clients beyond those that it takes wait for their turn; then they are served like others."""
    monkeypatch.setattr(link, "MOST_FLOWS", 4)
    port = served()
    before = threading.active_count()
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 20)) for _ in range(20)]
        for client in clients:
            client.sendall(link.HELLO + b"bytes")
            client.shutdown(socket.SHUT_WR)
        answers = [client.recv(link.COUNT.size, socket.MSG_WAITALL) for client in clients]
    assert answers == [link.COUNT.pack(5)] * 20
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 20)) for _ in range(20)]
        for client in silent:
            client.sendall(link.HELLO)
        time.sleep(0.2)
        assert threading.active_count() <= before + 4
    assert link.BUFFER * 128 <= 32 << 20


def test_by_default_only_this_machine_is_let_in(capsys):
    assert inspect.signature(serve).parameters["address"].default == "127.0.0.1"
    fill(parser := argparse.ArgumentParser())
    assert parser.parse_args(["measure", "--server"]).bind == "127.0.0.1"


def test_errors_of_measuring_are_sentences(server):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with pytest.raises(ConnectionError, match=f"the link to 127.0.0.1 port {port} .*run `baguakit net measure"):
        measure("127.0.0.1", port)


def test_odd_arguments_are_refused_in_one_sentence(server):
    for seconds in (0, float("nan"), float("inf"), -1, True, "1"):
        with pytest.raises((TypeError, ValueError), match=r"seconds is a finite number, .*, not "):
            measure("127.0.0.1", server, seconds=seconds)
    for layout, sentence in {
        (1, 0): r"sockets of each thread of the layout \(1, 0\) is a whole number, 1 or more, not 0",
        (1.0, 2): r"threads of the layout \(1.0, 2\) is a whole number, 1 or more, not 1.0",
        (16, 16): r"the number of flows of the layout \(16, 16\) is a whole number, 1 to 128, not 256",
        4: r"each of layouts is a pair \(threads, sockets of each thread\), not 4",
    }.items():
        with pytest.raises((TypeError, ValueError), match=sentence):
            measure("127.0.0.1", server, layouts=[layout])
    for port in (0, 65536, -1, 1.5, "29640", None):
        with pytest.raises((TypeError, ValueError), match="port is a whole number, 1 to 65535, not "):
            measure("127.0.0.1", port)
        if port != 0:
            with pytest.raises((TypeError, ValueError), match="port is a whole number, 0 to 65535, not "):
                serve("127.0.0.1", port)
    for host, sentence in {"": "is a string that is not empty", None: "is a string, not None"}.items():
        with pytest.raises((TypeError, ValueError), match=sentence):
            measure(host, server)
        with pytest.raises((TypeError, ValueError), match=sentence):
            serve(host, 0)
    with pytest.raises(ValueError, match=r"host is a name or an address, not 'a\.\.b'"):
        measure("a..b", server)
    with pytest.raises(OSError, match=r"cannot listen on address 'a\.\.b' port 0 .*; pass an address of this machine"):
        serve("a..b", 0)
    for given in (None, 3, [1]):
        with pytest.raises(TypeError, match="link is a host, or rates by"):
            nccl_socket_settings(given)
    with pytest.raises(TypeError, match="each key of link is a layout, a pair"):
        nccl_socket_settings({3: 1e9})
    with pytest.raises(TypeError, match="flags is a list, each of it a string, not '-O0'"):
        build(flags="-O0")


def test_the_command_line_measures(server, monkeypatch, capsys):
    monkeypatch.setattr("baguakit.command.net.measure", lambda *_, **__: {(2, 4): 8e9, (1, 1): 1e9})
    assert main(["net", "measure", "--client", "127.0.0.1", "--port", str(server)]) == 0
    printed = capsys.readouterr()
    assert printed.out == "export NCCL_SOCKET_NTHREADS=2\nexport NCCL_NSOCKS_PERTHREAD=4\n"
    assert "8000.0" in printed.err


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
    monkeypatch.setattr("baguakit.net.plugin.compile_to", compiler)
    path = build()
    assert path.is_relative_to(tmp_path / ".cache" / "baguakit") and path.is_file()
    assert build() == path and len(compiled) == 1
    assert build(flags=["-O0"]) != path and len(compiled) == 2


def test_errors_of_building_are_sentences(library, tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match="no C compiler: nocc is not on the PATH"):
        build(tmp_path, compiler="nocc")
    with pytest.raises(RuntimeError, match=r"could not compile baguanet\.c"):
        build(tmp_path, flags=["-fno-such-flag"])
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert main(["net", "build"]) == 1
    assert capsys.readouterr().err == "baguakit: the NCCL plugin is for Linux, and this is Darwin\n"

"""Settings for NCCL's own sockets, from a link that is measured or given; and the command line."""

import ctypes
import socket
import threading

import pytest

from baguakit.net import SocketSettings, build, link, measure, nccl_socket_settings, serve
from baguakit.net.__main__ import main
from bench.netlab.connections import cap


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


def test_only_layouts_that_nccl_takes_are_measured():
    for threads, sockets in link.LAYOUTS:
        SocketSettings(threads, sockets, 1.0)
    assert len(set(link.LAYOUTS)) == len(link.LAYOUTS) and max(t * s for t, s in link.LAYOUTS) == 64


@pytest.mark.parametrize(
    "threads, sockets, rate, sentence",
    [
        (17, 1, 1.0, "NCCL takes 1 to 16 threads a connection, and threads is 17"),
        (0, 1, 1.0, "NCCL takes 1 to 16 threads a connection, and threads is 0"),
        (16, 5, 1.0, "NCCL takes 1 to 64 sockets a connection, and 16 threads of 5 are 80"),
        (1, 1, 0.0, "a rate is a positive number of bytes a second, and this is 0.0"),
        (1, 1, float("nan"), "a rate is a positive number of bytes a second, and this is nan"),
    ],
)
def test_what_nccl_would_not_take_is_refused(threads, sockets, rate, sentence):
    with pytest.raises(ValueError, match=sentence):
        nccl_socket_settings({(threads, sockets): rate})


def test_no_measurement_is_refused():
    with pytest.raises(ValueError, match="no rate is given"):
        nccl_socket_settings({})


@pytest.fixture(scope="module")
def server():
    """The port of a server in this process, which ends with it."""
    ports, come = [], threading.Event()

    def ready(address, port):
        ports.append(port)
        come.set()

    threading.Thread(target=serve, args=("127.0.0.1", 0), kwargs={"ready": ready}, daemon=True).start()
    assert come.wait(20)
    return ports[0]


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


def test_errors_of_measuring_are_sentences(server):
    with pytest.raises(ValueError, match="seconds is 0"):
        measure("127.0.0.1", server, seconds=0)
    with pytest.raises(ValueError, match=r"a layout is .* and this is \(1, 0\)"):
        measure("127.0.0.1", server, layouts=[(1, 0)])
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with pytest.raises(
        ConnectionError, match=f"the link to 127.0.0.1 port {port} .*is `python -m baguakit.net measure"
    ):
        measure("127.0.0.1", port)


def test_the_command_line_measures(server, monkeypatch, capsys):
    monkeypatch.setattr("baguakit.net.__main__.measure", lambda *_, **__: {(2, 4): 8e9, (1, 1): 1e9})
    assert main(["measure", "--client", "127.0.0.1", "--port", str(server)]) == 0
    printed = capsys.readouterr()
    assert printed.out == "export NCCL_SOCKET_NTHREADS=2\nexport NCCL_NSOCKS_PERTHREAD=4\n"
    assert "8000.0" in printed.err


def test_the_command_line_builds(library, capsys, tmp_path):
    assert main(["build", "--out", str(tmp_path / "new")]) == 0
    path = tmp_path / "new" / "libnccl-net-baguanet.so"
    assert capsys.readouterr().out == f"export NCCL_NET_PLUGIN={path}\n"
    assert ctypes.CDLL(str(path)).ncclNetPlugin_v8 and list(path.parent.iterdir()) == [path]


def test_a_build_is_kept(library, tmp_path, monkeypatch):
    compiled = []

    def compiler(command, path):
        compiled.append(command)
        path.parent.mkdir(parents=True)
        path.touch()

    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    monkeypatch.setattr("baguakit.net.plugin._compile", compiler)
    path = build()
    assert path.is_relative_to(tmp_path / ".cache" / "baguakit")
    assert build() == path and len(compiled) == 1
    assert build(flags=["-O0"]) != path and len(compiled) == 2


def test_errors_of_building_are_sentences(library, tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match="no C compiler: nocc is not on the PATH"):
        build(tmp_path, compiler="nocc")
    with pytest.raises(RuntimeError, match=r"could not compile baguanet\.c"):
        build(tmp_path, flags=["-fno-such-flag"])
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert main(["build"]) == 1
    assert capsys.readouterr().err == "the NCCL plugin is for Linux, and this is Darwin\n"

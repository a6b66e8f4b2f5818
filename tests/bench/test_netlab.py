"""The network laboratory: it is as slow as it says, it counts, and it refuses what makes no sense."""

import json
import sys

import pytest
from laboratory import needs_root, within

from bench.netlab import Lab, Loopback

MIB = 1 << 20

# Host 0 receives `count` bytes from each of `flows` connections of host 1, and prints how many seconds it took. Host 1
# sends a byte when it is ready; if its connections are to be capped (`capped` is 1), when the kernel says they are.
TRANSFER = """
import os, socket, sys, threading, time
count, flows, capped = map(int, sys.argv[1:])
def receive(connection):
    left = count
    while left:
        left -= len(connection.recv(min(left, 1 << 16)))
if os.environ["RANK"] == "0":
    server = socket.create_server(("", 5000))
    connections = [server.accept()[0] for _ in range(flows)]
    threads = [threading.Thread(target=receive, args=(c,)) for c in connections]
    [c.recv(1) for c in connections]
    began = time.perf_counter()
    [c.sendall(b"!") for c in connections]
    [t.start() for t in threads]
    [t.join() for t in threads]
    print(time.perf_counter() - began)
else:
    connections = []
    while len(connections) < flows:
        try:
            connections.append(socket.create_connection((os.environ["MASTER_ADDR"], 5000)))
        except OSError:
            time.sleep(0.02)
    while capped and any(c.getsockopt(socket.SOL_SOCKET, 47) == -1 for c in connections):
        time.sleep(0.01)
    [c.sendall(b"?") for c in connections]
    [c.recv(1) for c in connections]
    threads = [threading.Thread(target=c.sendall, args=(bytes(count),)) for c in connections]
    [t.start() for t in threads]
    [t.join() for t in threads]
"""


def transfer(lab, count, flows=1, capped=0):
    """Seconds to send `flows` times `count` bytes from host 1 to host 0."""
    ended = lab.run([sys.executable, "-c", TRANSFER, str(count), str(flows), str(capped)], timeout=60)
    assert ended.status == 0, ended.outputs
    return float(ended.outputs[0])


def takes(line, rel, once):
    """Return whether a call takes `line` seconds: never less, and no more in one try of five."""
    for _ in range(5):
        seconds = once()
        assert seconds > (1 - rel) * line
        if seconds < (1 + rel) * line:
            return True
    return False


@pytest.mark.slow  # seconds of a connection at its cap
@needs_root
def test_a_link_is_as_slow_as_it_says_and_counts():
    """Of 1,514 bytes of a frame 1,448 are payload; a burst of 72 KiB goes before its time."""
    with Lab(2, "50mbit") as lab:
        count = 4 * MIB
        line = count / (50e6 / 8)
        assert takes(line, 0.1, lambda: transfer(lab, count))
        before = lab.bytes()
        transfer(lab, count)
        passed = [after - then for after, then in zip(lab.bytes(), before, strict=True)]
        assert passed[1].sent == passed[0].received
        assert count < passed[1].payload < 1.02 * count  # what was dropped from a queue is sent again
        assert passed[1].payload < passed[1].sent < 1.07 * count
        assert passed[0].payload < 0.001 * count
        lab.set_rate(1, "200mbit")
        lab.set_rate(0, None)
        assert takes(line / 4, 0.15, lambda: transfer(lab, count))


@pytest.mark.slow  # seconds of connections at their cap
@needs_root
def test_no_connection_exceeds_its_cap_and_several_add_up():
    with Lab(2, flow_cap="80mbit") as lab:
        line = 4 * MIB / 10e6
        assert takes(line, 0.1, lambda: transfer(lab, 4 * MIB, capped=1))
        assert takes(line, 0.15, lambda: transfer(lab, 4 * MIB, flows=4, capped=1))


@needs_root
@pytest.mark.slow
def test_nodes_are_fast_inside_and_slow_between():
    with Lab(4, nodes=2, between="50mbit") as lab:
        assert [lab.environment(host)["LOCAL_RANK"] for host in range(4)] == ["0", "1", "0", "1"]
        line = 4 * MIB / (50e6 / 8)

        def to_host_0_from(host):
            program = {0: TRANSFER, host: TRANSFER}  # the others have nothing to do
            words = [str(4 * MIB), "1", "0"]
            ended = lab.run(lambda h: [sys.executable, "-c", program.get(h, ""), *words], timeout=60)
            return float(ended.outputs[0])

        assert within(30, lambda: to_host_0_from(1) < line / 4)
        assert takes(line, 0.1, lambda: to_host_0_from(2))


# Host 0 answers every datagram of host 1, which prints how long it waited for each.
ECHO = """
import os, socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
if os.environ["RANK"] == "0":
    s.bind(("", 5001))
    while True:
        s.sendto(*s.recvfrom(64))
s.connect((os.environ["MASTER_ADDR"], 5001))
s.settimeout(0.05)
while True:
    try:
        s.send(b"?")
        s.recv(64)
        print("answered", flush=True)
    except OSError:
        print("silence", flush=True)
    time.sleep(0.01)
"""


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("how", ["unplugged", "stalled"])
def test_a_host_falls_silent_and_comes_back(how):
    with Lab(2) as lab:
        ranks = lab.start([sys.executable, "-c", ECHO])
        heard = ranks.lines[1]

        def latest(word):
            return within(30, lambda: [line.strip() for line in heard[-3:]] == [word] * 3)

        assert latest("answered")
        if how == "stalled":
            with lab.stalled(0):
                assert latest("silence")
        else:
            lab.unplug(0)
            assert latest("silence")
            lab.plug(0)
        assert latest("answered")


def test_loopback_runs_the_same_ranks_without_root():
    show = "import json, os; print(json.dumps([os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR')]))"
    with Loopback(3) as lab:
        ended = lab.run([sys.executable, "-c", show], timeout=60)
    assert ended.status == 0
    assert [json.loads(text) for text in ended.outputs] == [[str(r), "3", "127.0.0.1"] for r in range(3)]

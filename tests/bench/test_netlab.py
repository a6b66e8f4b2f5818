"""The network laboratory: it is as slow as it says, it counts, and it refuses what makes no sense."""

import json
import sys

import pytest
from laboratory import needs_root, within

from bench.netlab import Lab, Loopback

MIB = 1 << 20

# Host 0 receives `count` bytes from host 1 when that is ready, and prints how many seconds it took.
TRANSFER = """
import os, socket, sys, time
count = int(sys.argv[1])
if os.environ["RANK"] == "0":
    connection = socket.create_server(("", 5000)).accept()[0]
    connection.recv(1)
    began = time.perf_counter()
    connection.sendall(b"!")
    while count:
        count -= len(connection.recv(min(count, 1 << 16)))
    print(time.perf_counter() - began)
else:
    connection = None
    while connection is None:
        try:
            connection = socket.create_connection((os.environ["MASTER_ADDR"], 5000))
        except OSError:
            time.sleep(0.02)
    connection.sendall(b"?")
    connection.recv(1)
    connection.sendall(bytes(count))
"""


def transfer(lab, count):
    """Seconds to send `count` bytes from host 1 to host 0."""
    ended = lab.run([sys.executable, "-c", TRANSFER, str(count)], timeout=60)
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

"""The network laboratory: it is as slow as it says, it counts, and it refuses what makes no sense."""

import json
import statistics
import sys

import pytest
from laboratory import needs_root, within

from bench.netlab import Lab, Loopback, way

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


# Host 0 answers datagrams; host 1 sends 400, one after another or at once, and prints the seconds of those answered.
ASK = """
import os, socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
if os.environ["RANK"] == "0":
    s.bind(("", 5002))
    while True:
        s.sendto(*s.recvfrom(64))
s.connect((os.environ["MASTER_ADDR"], 5002))
s.settimeout(2)
while True:  # until the other is there
    try:
        s.send(b"?")
        s.recv(64)
        break
    except OSError:
        time.sleep(0.02)
count, at_once = int(sys.argv[1]), int(sys.argv[2])
for _ in range(count // at_once):
    began = time.perf_counter()
    for _ in range(at_once):
        s.send(b"?")
    try:
        for _ in range(at_once):
            s.recv(64)
            print(time.perf_counter() - began)
    except OSError:
        pass
os._exit(7)
"""


def round_trips(lab, count, at_once=1):
    """Return the seconds from question to answer of those of `count` datagrams that were answered."""
    ended = lab.run([sys.executable, "-c", ASK, str(count), str(at_once)], timeout=60)
    assert ended.statuses[1] == 7, ended.outputs
    return [float(line) for line in ended.outputs[1].split()]


@pytest.mark.slow
@needs_root
def test_the_way_between_nodes_takes_what_was_asked():
    """A round trip takes both ways, each of its own length, to 5 %; a later one passes none with jitter."""
    with Lab(2, "1gbit", nodes=2, delay="25ms") as lab:
        assert 0.05 <= min(round_trips(lab, 20)) < 0.0525
        lab.set_way(way(("10ms", "90ms")))
        assert 0.1 <= min(round_trips(lab, 10)) < 0.105
        lab.set_way(way("5ms", jitter="20ms"))
        found = round_trips(lab, 40)
        assert 0.01 <= min(found) < max(found) and max(found) - min(found) > 0.01
        assert 0.01 <= statistics.mean(found) < 0.06  # 0.03, and what a busy machine adds


@pytest.mark.slow
@needs_root
def test_tcp_meets_the_delay_and_still_reaches_the_rate():
    """Slow start makes a short message late by round trips; a long one takes its bytes at the rate of the way."""
    with Lab(2, "1gbit", nodes=2, between="100mbit", delay="25ms") as lab:
        short, long = MIB // 2, 32 * MIB
        assert transfer(lab, short) > 4 * 0.05  # 14 KiB, and twice as much in each round trip
        assert takes(long / (100e6 / 8), 0.25, lambda: transfer(lab, long))


@pytest.mark.slow
@needs_root
def test_frames_are_lost_one_by_one():
    """Of 2,000 questions and their answers 1,620 come through, to four deviations; TCP gets all of them through."""
    with Lab(2, "1gbit", nodes=2, delay="1ms", loss=0.1) as lab:
        assert abs(len(round_trips(lab, 2000, at_once=2000)) - 1620) < 4 * 18
        lab.set_way(way("1ms", loss=0.01))
        assert transfer(lab, MIB) > 0


@pytest.mark.slow
@needs_root
def test_what_is_halted_comes_when_it_goes_on():
    with Lab(2, delay="1ms") as lab:
        ranks = lab.start([sys.executable, "-c", ECHO])
        heard = ranks.lines[1]

        def latest(word):
            return within(30, lambda: [line.strip() for line in heard[-3:]] == [word] * 3)

        assert latest("answered")
        with lab.halted():
            assert latest("silence")
        assert latest("answered")
        lab.cut()
        assert latest("silence")
        with pytest.raises(RuntimeError, match="has ended"):
            lab.set_way(way("1ms"))


@pytest.mark.parametrize("time", ["25", "ms", "-1ms", "2 ms"])
def test_a_delay_without_a_unit_is_refused(time):
    with pytest.raises(ValueError, match="a number and a unit"):
        Lab(2, delay=time)


def test_what_needs_a_way_is_refused_without_one():
    with pytest.raises(ValueError, match="delay="):
        Lab(2, loss=0.1)
    with pytest.raises(ValueError, match="from 0 to 1"):
        Lab(2, delay="1ms", loss=2.0)


def test_loopback_runs_the_same_ranks_without_root():
    show = "import json, os; print(json.dumps([os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR')]))"
    with Loopback(3) as lab:
        ended = lab.run([sys.executable, "-c", show], timeout=60)
    assert ended.status == 0
    assert [json.loads(text) for text in ended.outputs] == [[str(r), "3", "127.0.0.1"] for r in range(3)]

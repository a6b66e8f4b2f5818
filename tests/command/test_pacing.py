"""The pacing of sockets: the connections of a rank share one rate, those that open later too."""

import socket
import sys
import time

import pytest
from pool import ranks

import baguakit as bk
from baguakit.compare.pacing import SO_MAX_PACING_RATE, TOO_FAST, Pacer, check_rates, measured, unsent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the pacing of sockets needs Linux")
RATE = 1_000_000


def until(holds):
    """Wait for an event."""
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def limit(one):
    return one.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE)


@pytest.fixture
def connect():
    """A function that connects over loopback to a peer that reads nothing."""
    opened = []

    def connected():
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            opened.extend([ours, server.accept()[0]])
        ours.setblocking(False)
        return ours

    yield connected
    for each in opened:
        each.close()


def fill(one):
    """Send until the system takes no more."""
    while True:
        try:
            one.send(bytes(1 << 16))
        except BlockingIOError:
            break
    until(lambda: unsent(one) > 0)


def test_connections_are_capped_whenever_they_open_and_freed_at_the_end(connect):
    early = connect()
    with Pacer(RATE):
        assert limit(early) == RATE
        late = connect()
        until(lambda: limit(late) == RATE)
        both = socket.socketpair()  # not TCP
        try:
            time.sleep(0.05)
            assert limit(both[0]) == -1
        finally:
            both[0].close(), both[1].close()
    assert limit(early) == limit(late) == -1


def test_busy_connections_share_the_rate_and_idle_ones_keep_all_of_it(connect):
    one, two, idle = connect(), connect(), connect()
    with Pacer(RATE):
        fill(one)
        until(lambda: limit(one) == RATE)
        fill(two)
        until(lambda: limit(one) == limit(two) == RATE // 2)
        assert limit(idle) == RATE


def test_no_rank_sends_faster_than_the_rate():
    def work():
        with Pacer(20e6):
            return measured(bk.Comm(), 20e6)

    for to_one, to_all in ranks(3, work):
        assert to_one <= TOO_FAST * 20e6 and to_all <= TOO_FAST * 20e6


def test_measured_rates_are_said_beside_the_one_asked_for():
    said = check_rates(1e8, 12.4e6, 12.6e6)
    assert said == "asked for 100 Mb/s; measured 99.2 Mb/s from a rank to one other, 101 Mb/s to all others at once"
    assert "moves less than that, or is busy" in check_rates(1e8, 5e6, 12.6e6)
    with pytest.raises(OSError, match="the sockets of this system do not keep to a rate: asked for 100 Mb/s, got"):
        check_rates(1e8, 12.5e6, 400e6)

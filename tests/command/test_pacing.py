"""The pacing of sockets: the connections of a rank share one rate, those that open later too."""

import socket
import sys
import time

import pytest
import torch
from pool import ranks

import baguakit as bk
from baguakit.compare.pacing import SO_MAX_PACING_RATE, Pacer, check_pace, unsent

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
        comm, message = bk.Comm(), torch.zeros(5_000_000, dtype=torch.uint8)
        others = [peer for peer in range(comm.size) if peer != comm.rank]
        with Pacer(20e6):
            comm.exchange(message[:1], others, others)  # connects
            comm.gather_objects(None)
            began = time.perf_counter()
            comm.exchange(message, others, others)
            return len(others) * len(message) / max(comm.gather_objects(time.perf_counter() - began))

    for sent in ranks(3, work):
        check_pace(sent, 20e6)


def test_sockets_that_keep_to_no_rate_are_told():
    check_pace(12.6e6, 12.5e6)
    with pytest.raises(OSError, match=r"do not keep to a rate: asked for 100 Mb/s, got 3\.2 Gb/s$"):
        check_pace(400e6, 12.5e6)

"""The doors at which processes learn whether others live."""

import errno
import os
import socket
import time

import pytest

from baguakit.elastic import doors
from baguakit.elastic.doors import GONE, OPEN, SILENT, Door, Knocks


@pytest.fixture
def knocks():
    made = Knocks()
    yield made
    made.end()


@pytest.fixture
def door():
    made = Door()
    yield made
    made.close()


def becomes(knocks, address, state):
    until = time.monotonic() + 20
    while knocks.knock(address) != state:
        assert time.monotonic() < until
        time.sleep(0.01)
    return True


class Unrouted(socket.socket):
    """A socket of a host that has no route."""

    def connect(self, address):
        raise OSError(errno.EHOSTUNREACH, "no route to host")


def test_a_door_is_open_until_its_process_is_gone(knocks, door):
    assert becomes(knocks, door.address, OPEN)
    door.let_in()
    assert knocks.knock(door.address) == OPEN
    door.close()
    assert becomes(knocks, door.address, GONE)
    assert knocks.knock(door.address) == GONE


@pytest.mark.parametrize("let_in", [False, True])
def test_children_of_a_process_do_not_keep_its_door_open(knocks, door, let_in):
    assert becomes(knocks, door.address, OPEN)
    if let_in:
        door.let_in()
    end, there = os.pipe()
    child = os.fork()
    if not child:
        os.close(there)
        os.read(end, 1)  # until the parent says so
        os._exit(0)
    try:
        door.close()
        assert becomes(knocks, door.address, GONE)
    finally:
        os.close(there)
        os.close(end)
        os.waitpid(child, 0)


def test_who_was_never_there_is_gone_and_who_is_not_answered_is_silent(knocks, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert becomes(knocks, address, GONE)
    assert not knocks.knock("")
    monkeypatch.setattr(doors.socket, "socket", Unrouted)
    assert knocks.knock("192.0.2.1:1") == SILENT
    monkeypatch.undo()
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    full = [socket.create_connection(listener.getsockname())]  # the host lets no further connection in
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    assert not knocks.knock(address)
    assert becomes(knocks, address, SILENT)
    full[0].close()
    listener.close()


def test_who_has_gone_is_not_kept_by_the_door(knocks, door):
    assert becomes(knocks, door.address, OPEN)
    door.let_in()
    assert len(door._sockets) == 2
    knocks.end()
    while len(door._sockets) > 1:
        door.let_in()

"""Connections are made without blocking, strangers are refused, death is an error, and nothing is left behind."""

import signal
import socket
import struct
import time
from contextlib import ExitStack

import pytest
from nccl_net import HANDLE_BYTES, NetError
from net_keyed import HELLO, address

MIB = 1 << 20
SOON = 30.0  # seconds, on a machine that is busy with other things


@pytest.mark.parametrize("version", [8, 11])
def test_nothing_blocks_and_both_sides_come_about(peers, version):
    sender, receiver = peers(version), peers(version)
    for peer in (sender, receiver):
        peer.init()
    handle = receiver.listen()
    assert len(handle) == HANDLE_BYTES
    assert not receiver.begin_to_accept()
    assert not sender.begin_to_connect(handle)  # nobody has welcomed it
    receiver.accept()
    sender.connect_again()
    sender.post_send(5)
    receiver.post_receive(5)
    assert receiver.wait() == 5


def greetings(magic, key):
    yield b"GET / HTTP/1.1\r\nHost: here.\r\n\r\n"[: HELLO.size].ljust(HELLO.size)
    yield HELLO.pack(magic + 1, key, 5, 0, 1)
    yield HELLO.pack(magic, key + 1, 5, 0, 1)
    yield HELLO.pack(magic, key, 5, 1, 1)
    yield HELLO.pack(magic, key, 5, 0, 0)
    yield HELLO.pack(magic, key, 5, 0, 65)


def test_strangers_are_refused_and_do_no_harm(peers):
    sender, receiver = peers(), peers()
    for peer in (sender, receiver):
        peer.init()
    handle = receiver.listen()
    magic, key, where = address(handle)
    with ExitStack() as stack:
        for _ in range(300):  # more silent ones than a listener keeps
            stack.enter_context(socket.create_connection(where))
        for greeting in greetings(magic, key):
            stranger = stack.enter_context(socket.create_connection(where, timeout=SOON))
            stranger.sendall(greeting)
            assert not receiver.begin_to_accept()
            assert stranger.recv(1) == b""
        assert receiver.descriptors() <= 257
        sender.begin_to_connect(handle)
        receiver.accept()
        sender.connect_again()
        sender.post_send(3)
        receiver.post_receive(3)
        assert receiver.wait() == 3
    receiver.close("receiver", "listener")
    assert receiver.descriptors() == 0


@pytest.mark.parametrize("kind", ["not a handle", "nobody", "not us"])
def test_a_wrong_handle_is_refused(peers, kind):
    sender = peers()
    sender.init()
    with socket.create_server(("127.0.0.1", 0)) as server:
        handle = bytearray(sender.listen())
        struct.pack_into("!H", handle, 18, server.getsockname()[1])
        if kind == "not a handle":
            handle = bytearray(HANDLE_BYTES)
        elif kind == "nobody":
            server.close()
        with pytest.raises(NetError) as caught:
            if not sender.begin_to_connect(bytes(handle)):
                with server.accept()[0] as mail:
                    mail.sendall(b"220 mail.example.org ready")
                    sender.connect_again()
    wrong = kind == "not a handle"
    assert caught.value.code == (NetError.INVALID_ARGUMENT if wrong else NetError.REMOTE)


def test_a_peer_that_dies_while_it_connects_is_an_error(peers):
    receiver = peers()
    receiver.init()
    magic, key, where = address(receiver.listen())
    with socket.create_connection(where) as first_of_two:
        first_of_two.sendall(HELLO.pack(magic, key, 5, 0, 2))
        assert not receiver.begin_to_accept()
    with pytest.raises(NetError) as caught:
        receiver.accept()
    assert caught.value.code == NetError.REMOTE


@pytest.mark.parametrize("size", [1, 64 * MIB])
def test_a_receive_whose_sender_is_killed_fails(pairs, size):
    pair = pairs()
    pair.receiver.post_receive(64 * MIB)
    pair.receiver.post_receive(64 * MIB)
    if size > 1:
        pair.sender.post_send(size)
    pair.sender.kill()
    begin = time.monotonic()
    with pytest.raises(NetError) as caught:
        pair.receiver.wait(1, limit=SOON)
    assert caught.value.code == NetError.REMOTE and time.monotonic() - begin < SOON
    with pytest.raises(NetError):
        pair.receiver.post_receive(8)


def test_a_send_whose_receiver_is_killed_fails(pairs):
    pair = pairs()
    pair.sender.post_send(64 * MIB)  # the receiver takes none of it
    pair.receiver.kill()
    with pytest.raises(NetError) as caught:
        pair.sender.wait(limit=SOON)
    assert caught.value.code == NetError.REMOTE


def test_what_was_sent_before_the_sender_closed_still_arrives(pairs):
    pair = pairs()
    sizes = [10_000, 0, 30_000, 7]
    pair.sender.send(sizes)
    pair.sender.close("sender")
    assert pair.sender.threads() == []
    assert pair.receiver.receive(sizes) == sizes
    pair.receiver.post_receive(1)
    with pytest.raises(NetError) as caught:
        pair.receiver.wait()
    assert caught.value.code == NetError.REMOTE


@pytest.mark.parametrize("pending", [False, True])
def test_closing_leaves_no_thread_and_no_descriptor(pairs, pending):
    pair = pairs()
    assert len(pair.sender.threads()) == len(pair.receiver.threads()) == 4
    assert pair.sender.descriptors() == 4 and pair.receiver.descriptors() == 5
    pair.carry([1 * MIB, 5, 0])
    if pending:
        pair.sender.post_send(64 * MIB)
        pair.receiver.post_receive(32)
    pair.sender.close("sender")
    pair.receiver.close("receiver", "listener")
    for peer in (pair.sender, pair.receiver):
        assert peer.threads() == [] and peer.descriptors() == 0


def test_what_was_begun_and_given_up_is_closed_too(peers):
    peer = peers()
    peer.init()
    peer.begin_to_connect(peer.listen())
    assert peer.descriptors() == 5
    peer.close("listener")
    assert peer.descriptors() == 4
    peer.finalize()
    assert peer.descriptors() == 0


def test_a_lost_peer_raises_no_sigpipe(pairs):
    pair = pairs()
    pair.sender.take_sigpipe_as_c_programs_do()
    pair.receiver.kill()
    with pytest.raises(NetError):
        pair.sender.post_send(64 * MIB)
        pair.sender.wait()
    until = time.monotonic() + SOON
    while pair.sender.threads() and time.monotonic() < until:
        time.sleep(0.01)
    assert pair.sender.threads() == []  # they have left by themselves


def test_threads_take_none_of_the_program_s_signals(pairs):
    for mask in pairs().receiver.signals_blocked():
        assert not [each.name for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1) if not mask >> (each - 1) & 1]


@pytest.mark.slow  # seconds pass while the peer is stopped
def test_a_stopped_peer_is_waited_for(pairs):
    pair = pairs(sender={"BAGUANET_TIMEOUT": "1"}, receiver={"BAGUANET_TIMEOUT": "1"})
    pair.sender.post_send(64 * MIB)
    pair.receiver.signal(signal.SIGSTOP)
    time.sleep(3)
    pair.receiver.signal(signal.SIGCONT)
    pair.receiver.post_receive(64 * MIB)
    assert pair.receiver.wait() == pair.sender.wait() == 64 * MIB

"""Peers that know the key and break the rules fail their receives at once; strangers keep no peer out."""

import socket
from contextlib import ExitStack

import pytest
from nccl_net import NetError, until
from net_keyed import Keyed, address

KIB = 1 << 10
STRANGERS = 300  # more than a listener keeps


@pytest.fixture
def receiver(peers):
    peer = peers()
    peer.init()
    return peer


@pytest.fixture
def keyed(receiver):
    """Make a connection of a keyed peer to the receiver."""
    with ExitStack() as stack:

        def make(streams=1):
            peer = stack.enter_context(Keyed(receiver.listen(), streams)).hello()
            receiver.accept()
            assert peer.welcomed()
            return peer

        yield make


def fails(receiver, i=0, code=NetError.REMOTE):
    with pytest.raises(NetError) as caught:
        receiver.wait(i, limit=30.0)
    assert caught.value.code == code
    return str(caught.value)


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("closes", [True, False])
def test_a_peer_that_announces_a_later_message_leaves_no_receive_waiting(receiver, keyed, streams, closes):
    """Its streams hold what no receive asks for, are not read, and notice no end."""
    peer = keyed(streams)
    receiver.post_receive(8 * KIB)
    for stream in range(streams):
        peer.chunk(5, 8 * KIB, 0, b"", length=8 * KIB, stream=stream)
    if closes:
        peer.close()
    assert "before it had sent all" in fails(receiver)


def test_a_message_may_come_in_any_order_over_many_streams(receiver, keyed):
    peer, size = keyed(3), 10 * 4 * KIB + 7
    receiver.post_receive(size)
    for i, at in enumerate([9, 3, 0, 5, 10, 1, 4, 2, 8, 7]):
        offset = at * 4 * KIB
        peer.chunk(0, size, offset, bytes(min(4 * KIB, size - offset)), stream=i % 3)
        assert receiver.test() is None
    peer.chunk(0, size, 6 * 4 * KIB, bytes(4 * KIB))
    assert receiver.wait() == size


@pytest.mark.parametrize("begin, end", [(4, 8), (0, 8), (0, 16), (7, 11), (1, 5)])  # KiB
def test_bytes_that_come_twice_complete_no_message(receiver, keyed, begin, end):
    peer = keyed()
    receiver.post_receive(16 * KIB)
    peer.chunk(0, 16 * KIB, 4 * KIB, bytes(4 * KIB))
    peer.chunk(0, 16 * KIB, begin * KIB, b"", length=(end - begin) * KIB)
    assert "came twice" in fails(receiver, code=NetError.INTERNAL)


@pytest.mark.parametrize(
    "wrong",
    [
        (0, 8 * KIB, 4 * KIB, 4 * KIB),  # of another size than the first chunk said
        (0, 16 * KIB, 4 * KIB, 1),  # smaller than a chunk can be
        (0, 16 * KIB, 8 * KIB, 0),
        (0, 16 * KIB, 12 * KIB, 8 * KIB),  # beyond the end
        (0, 16 * KIB, (1 << 64) - 1, 4 * KIB),
    ],
)
def test_chunks_that_cannot_be_are_refused(receiver, keyed, wrong):
    peer = keyed()
    receiver.post_receive(16 * KIB)
    peer.chunk(0, 16 * KIB, 0, bytes(4 * KIB))
    message, size, offset, length = wrong
    peer.chunk(message, size, offset, b"", length=length)
    assert "fits no receive" in fails(receiver, code=NetError.INTERNAL)


def test_a_finished_message_does_not_come_again(receiver, keyed):
    peer = keyed()
    receiver.post_receive(0)
    peer.chunk(0, 0, 0, b"")
    assert receiver.wait() == 0
    receiver.post_receive(4 * KIB)
    peer.chunk(0, 0, 0, b"")
    assert "message 0 fits no receive" in fails(receiver, 1, NetError.INTERNAL)


def strangers(stack, handle, words=b""):
    for _ in range(STRANGERS):
        stack.enter_context(socket.create_connection(address(handle)[2])).sendall(words)


@pytest.mark.parametrize("words", [b"", b"t"])
def test_strangers_who_come_after_a_hello_do_not_evict_the_peer(receiver, words):
    handle = receiver.listen()
    with ExitStack() as stack:
        peer = stack.enter_context(Keyed(handle, streams=4)).hello()
        strangers(stack, handle, words)
        assert receiver.begin_to_accept() and peer.welcomed()
        assert receiver.descriptors() <= 1 + 256 + 4


def test_strangers_do_not_evict_a_peer_whose_hello_is_underway(receiver):
    handle = receiver.listen()
    with ExitStack() as stack:
        peer = stack.enter_context(Keyed(handle, streams=4, said=1))
        assert not receiver.begin_to_accept()
        strangers(stack, handle, b"t")
        assert not receiver.begin_to_accept() and not receiver.begin_to_accept()
        assert receiver.descriptors() <= 1 + 256
        peer.hello()
        receiver.accept()
        assert peer.welcomed()


def test_peers_do_not_evict_each_other(receiver):
    """Of five connections 315 streams have come, more than strangers may have; then the last stream of one does."""
    handle = receiver.listen()
    with ExitStack() as stack:
        peers = [stack.enter_context(Keyed(handle, streams=64, connection=i)) for i in range(5)]
        for stream, hello in [
            each for peer in peers for each in list(zip(peer.streams, peer.hellos, strict=True))[:63]
        ]:
            stream.sendall(hello)
        assert not receiver.begin_to_accept()
        peers[0].streams[63].sendall(peers[0].hellos[63])
        until(lambda: receiver.begin_to_accept() or None)
        assert peers[0].welcomed()

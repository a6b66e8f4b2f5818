"""Messages sent through the plugin arrive: every byte, in order, for all sizes and numbers of streams."""

import pytest
from nccl_net import PTR_CUDA, NetError

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 128 * KIB
SIZES = [0, 1, 7, 0, 4095, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3, 8 * MIB, 0, 1_000_003]


@pytest.mark.parametrize("version", [8, 11])
def test_every_size_arrives_as_it_was_sent(pairs, version):
    pair = pairs(version)
    pair.carry(SIZES)
    pair.carry(SIZES, seed=1, room=[size + 1000 for size in SIZES])  # more room than needed: the true size is told


@pytest.mark.parametrize("streams", [1, 3, 64])
def test_any_number_of_streams_carries_many_messages_at_once(pairs, streams):
    sizes = [(i * i * 37) % 9_001 if i % 9 else i * 2_003 for i in range(300)]
    pair = pairs(sender={"BAGUANET_STREAMS": str(streams), "BAGUANET_CHUNK": "4096"})
    pair.carry(sizes, orders=("any", "any"))


@pytest.mark.parametrize("orders", [("last", "first"), ("first", "last"), ("last", "last")])
def test_requests_may_be_polled_in_any_order(pairs, orders):
    pairs().carry([size for size in SIZES if size < MIB] * 8, orders=orders)


def test_the_sender_s_settings_count(pairs):
    pair = pairs(
        sender={"BAGUANET_STREAMS": "5", "BAGUANET_CHUNK": "10000"},
        receiver={"BAGUANET_STREAMS": "2", "BAGUANET_CHUNK": "65536"},
    )
    assert pair.sender.threads() == [f"baguanet-tx{i}" for i in range(5)]
    assert pair.receiver.threads() == [f"baguanet-rx{i}" for i in range(5)]
    pair.carry(SIZES)


def test_sends_wait_for_receives_that_come_late(pairs):
    pair = pairs()
    sizes = [4 * MIB] * 8  # more than sockets hold
    pair.sender.start("send", sizes)
    with pytest.raises(TimeoutError):
        pair.sender.result(limit=0.5)
    assert pair.receiver.receive(sizes) == sizes
    pair.sender.result()


def test_requests_are_null_when_there_is_no_room_for_more(pairs):
    pair = pairs()
    posted = [pair.receiver.post_receive(8) for _ in range(70)]
    assert posted == [True] * 64 + [False] * 6  # NCCL has at most 32 in flight
    pair.sender.send([8])
    assert pair.receiver.wait(0) == 8 and pair.receiver.post_receive(8)


@pytest.mark.parametrize("version", [8, 11])
def test_a_send_that_does_not_fit_its_receive_is_an_error_at_both(pairs, version):
    pair = pairs(version)
    pair.receiver.post_receive(1000)
    pair.sender.post_send(1001)
    with pytest.raises(NetError) as caught:
        pair.receiver.wait()
    assert caught.value.code == NetError.INVALID_USAGE
    assert "a message of 1001 bytes does not fit its receive of 1000 bytes" in str(caught.value)
    pair.sender.post_send(16 * MIB)
    with pytest.raises(NetError) as caught:
        pair.sender.wait(1)
    assert caught.value.code == NetError.REMOTE


def test_what_the_properties_rule_out_is_refused(pairs):
    pair = pairs()
    with pytest.raises(NetError) as caught:
        pair.receiver.post_receive(8, n=2)
    assert caught.value.code == NetError.INVALID_ARGUMENT
    with pytest.raises(NetError) as caught:
        pair.receiver.register(PTR_CUDA)
    assert caught.value.code == NetError.INVALID_ARGUMENT
    assert pair.receiver.flush() is None


def test_deregistered_memory_is_not_written_to_any_more(pairs):
    pair = pairs()
    pair.receiver.post_receive(64 * MIB)
    pair.receiver.deregister()  # as NCCL does when it aborts
    with pytest.raises(NetError) as caught:
        pair.receiver.wait()
    assert caught.value.code == NetError.INTERNAL
    pair.sender.post_send(64 * MIB)
    with pytest.raises(NetError):
        pair.sender.wait()

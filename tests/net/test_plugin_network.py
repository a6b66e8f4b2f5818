"""Devices, settings, and networks: limited flows, a slow one among them, and a cable that is cut."""

import os
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager

import pytest
from nccl_net import NetError, until

MIB = 1 << 20
RATE = 2_000_000  # bytes a second of a stream


@pytest.mark.parametrize("version", [8, 11])
def test_properties_are_what_nccl_needs(peers, version):
    peer = peers(version)
    peer.init()
    assert peer.devices() == ["lo"]
    common = {
        "name": b"lo",
        "pciPath": None,
        "guid": 0,
        "ptrSupport": 1,
        "regIsGlobal": 0,
        "speed": 10000,
        "port": 0,
        "latency": 0.0,
        "maxComms": 65536,
        "maxRecvs": 1,
        "netDeviceType": 0,
        "netDeviceVersion": 0,
    }
    newer = {
        "forceFlush": 0,
        "ndevs": 1,
        "devs": (0, 0, 0, 0),
        "maxP2pBytes": 1 << 30,
        "maxCollBytes": 1 << 29,
        "maxMultiRequestSize": 1,
    }
    assert peer.properties() == (common if version == 8 else common | newer)
    with pytest.raises(NetError):
        peer.properties(1)


@pytest.mark.parametrize(
    "found, interfaces",
    [
        *((True, each) for each in ("lo", "=lo", "eth,lo", "=x,lo:5", "^eth", "^=l", "^eth,=lo")),
        *((False, each) for each in ("=l", "^l", "^=lo", "nothere")),
    ],
)
def test_interfaces_are_chosen_by_nccl_s_rules(blank, interfaces, found):
    try:
        devices = blank.devices_under({"NCCL_SOCKET_IFNAME": interfaces})
    except NetError as error:
        assert f"fits NCCL_SOCKET_IFNAME={interfaces}" in str(error)
        devices = []
    assert ("lo" in devices) == found


def test_no_choice_is_all_but_the_virtual(blank):
    others = {name for _, name in socket.if_nameindex()} - {"lo"}
    assert set(blank.devices_under({"NCCL_SOCKET_IFNAME": ""})) <= (others or {"lo"})


@pytest.mark.parametrize(
    "name, value, least, most",
    [
        *(("STREAMS", value, 1, 64) for value in ("0", "65", "-1", "4 ", "many")),
        ("CHUNK", "4095", 4096, 1 << 30),
        ("TIMEOUT", "2e3", 0, 1 << 20),
        ("PACING", "1" * 30, 0, (1 << 64) - 1),
    ],
)
def test_a_wrong_setting_is_refused_in_a_sentence(blank, name, value, least, most):
    with pytest.raises(NetError) as caught:
        blank.devices_under({f"BAGUANET_{name}": value})
    assert f'BAGUANET_{name} is "{value}", and must be a whole number from {least} to {most}' in str(caught.value)


def seconds(pairs, streams, size):
    """To send `size` bytes over streams that may carry RATE each."""
    pair = pairs(sender={"BAGUANET_STREAMS": str(streams), "BAGUANET_PACING": str(RATE), "BAGUANET_CHUNK": "16384"})
    pair.carry([1000])
    return pair.carry([size])


@pytest.mark.slow
def test_eight_streams_carry_seven_times_what_one_does(pairs):
    one = 4 * MIB / seconds(pairs, 1, 4 * MIB)  # so much that what is left in buffers at the end is little
    assert one <= 1.2 * RATE  # or the limit would not have been one
    rates = []
    for _ in range(5):  # a machine that is busy with other things can only make it slower
        rates.append(32 * MIB / seconds(pairs, 8, 32 * MIB))
        if rates[-1] >= 7 * one:
            return
    raise AssertionError(f"one stream carries {one:.0f} bytes a second, and eight only {rates}")


@pytest.mark.slow  # seconds of a connection at its cap
def test_a_slow_stream_takes_less(pairs):
    """One stream of four has a tenth of the rate, and carries less than half of what an equal cut would give it."""
    pair = pairs(sender={"BAGUANET_PACING": str(RATE), "BAGUANET_CHUNK": "16384"})
    pair.carry([1000])
    pair.sender.slow_down(0, RATE // 10)
    before = pair.sender.carried()
    pair.carry([8 * MIB])
    carried = [after - least for after, least in zip(pair.sender.carried(), before, strict=True)]
    assert carried[0] < sum(carried) / len(carried) / 2 and min(carried[1:]) > carried[0], carried


@contextmanager
def two_hosts():
    """Two network namespaces and a cable; yields the prefixes of commands in them, and what cuts the cable."""
    a, b = (f"bagua{os.getpid()}{side}" for side in "ab")

    def ip(*words):
        return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout

    try:
        for name in (a, b):
            ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", a, "type", "veth", "peer", "name", "eth0", "netns", b)
        for name, number in ((a, 1), (b, 2)):
            ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
            ip("-n", name, "address", "add", f"fd77::{number}/64", "dev", "eth0", "nodad")
            ip("-n", name, "link", "set", "eth0", "up")
        for name in (a, b):  # an interface is seen to run a while after it does
            until(lambda name=name: True if "state UP" in ip("-n", name, "link", "show", "eth0") else None)
        yield (
            ["ip", "netns", "exec", a],
            ["ip", "netns", "exec", b],
            lambda: ip("-n", b, "link", "set", "eth0", "down"),
        )
    finally:
        for name in (a, b):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.slow  # waits for the kernel to give up
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="network namespaces need root and ip")
@pytest.mark.parametrize("family, network", [("AF_INET", "10.77.0."), ("AF_INET6", "fd77::")])
def test_a_peer_whose_cable_is_cut_is_given_up(peers, family, network):
    with two_hosts() as (at_a, at_b, cut):
        environment = {"BAGUANET_TIMEOUT": "2", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_FAMILY": family}
        sender, receiver = peers(11, environment, at_a), peers(11, environment, at_b)
        for peer in (sender, receiver):
            peer.init()
        handle = receiver.listen()
        sender.begin_to_connect(handle)
        receiver.accept()
        sender.connect_again()
        for each in (receiver.post_receive, sender.post_send):
            each(MIB)
        assert receiver.wait() == sender.wait() == MIB
        cut()
        receiver.post_receive(64 * MIB)
        begin = time.monotonic()
        sender.post_send(64 * MIB)
        for peer in (receiver, sender):
            with pytest.raises(NetError) as caught:
                peer.wait(1)
            assert caught.value.code == NetError.REMOTE and f"with {network}" in str(caught.value)
        assert time.monotonic() - begin < 20

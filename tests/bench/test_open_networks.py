"""The page *networks that others can reach*: with its tunnel nothing can be read between two hosts, without it all."""

import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
from laboratory import ROOT, needs_root

from bench.netlab import LINK, Lab, enter

PAGE = ROOT / "docs" / "situations" / "open_networks.md"
TOOLS = all(map(shutil.which, ("wg", "wg-quick", "wireguard-go")))
EVERY_KIND = 3  # of Linux: ETH_P_ALL
MARK = struct.pack("<f", 1.2345678) * 64  # what 64 weights look like
EVERYWHERE, UDP, IPV4, PORT = "0" * 32, 17, b"\x08\x00", 51820

# A rank trains a step with weights that can be recognised, and prints the addresses at which it listens, in hex.
TRAIN = """
import contextlib, os, torch, torch.distributed as dist, baguakit as bk
dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64)
torch.nn.init.constant_(model.weight, 1.2345678)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
with bk.attach(model, optimizer, bk.algorithms.decentralized()):
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            mine.add(os.readlink(f"/proc/self/fd/{fd}"))
    for line in (open("/proc/net/tcp").read() + open("/proc/net/tcp6").read()).splitlines():
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
            print("listens at", words[1].partition(":")[0])
dist.barrier()
dist.destroy_process_group()
"""


@contextmanager
def captured(namespace):
    """Yield a list of the Ethernet frames that pass the link of a host, in both directions, from now on."""
    frames, over = [], threading.Event()

    def read():
        with opened:
            while not over.is_set():
                with suppress(TimeoutError):
                    frames.append(opened.recv(1 << 17))

    def open_there():
        enter(namespace)
        made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(EVERY_KIND))
        made.bind((LINK, 0))
        made.settimeout(0.05)
        return made

    with ThreadPoolExecutor(1) as elsewhere:  # a thread in the host's network
        opened = elsewhere.submit(open_there).result()
    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield frames
    finally:
        over.set()
        thread.join()


def trained(lab, interfaces=(LINK, LINK), first=None):
    """Train on the hosts; return the IPv4 frames between them, and the addresses at which each rank listens."""

    def command(host):
        return ["env", f"GLOO_SOCKET_IFNAME={interfaces[host]}", sys.executable, "-c", TRAIN]

    with captured(lab.namespace(0)) as frames:
        ended = lab.run(command, timeout=300, env={"MASTER_ADDR": first or lab.wires.address(0)})
    assert ended.status == 0, ended.outputs
    listens = [set(re.findall(r"^listens at (\w+)$", each, re.MULTILINE)) for each in ended.outputs]
    return [each for each in frames if each[12:14] == IPV4], listens


def protocol_and_port(frame):
    header = 4 * (frame[14] & 15)
    return frame[23], struct.unpack(">H", frame[14 + header + 2 : 14 + header + 4])[0]


@contextmanager
def tunnel(lab, folder):
    """Connect two hosts by the page's file and command; yield the environment of each."""
    keys = [
        subprocess.run(["wg", "genkey"], capture_output=True, text=True, check=True).stdout.strip() for _ in range(2)
    ]
    public = [
        subprocess.run(["wg", "pubkey"], input=key, capture_output=True, text=True).stdout.strip() for key in keys
    ]
    page = re.search(r"```ini\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    files = [folder / f"wg{os.getpid() % 100000}x{host}.conf" for host in range(2)]
    for host, file in enumerate(files):
        text = page.replace("CONTENT-OF-private.key", keys[host]).replace(
            "PUBLIC-KEY-OF-THE-SECOND-MACHINE", public[1 - host]
        )
        if host == 1:  # its address, and the other's
            text = re.sub("10.7.0.[12]/", lambda found: {"1": "10.7.0.2/", "2": "10.7.0.1/"}[found[0][7]], text)
        file.touch(mode=0o600)
        file.write_text(text.replace("ADDRESS-OF-THE-SECOND-MACHINE", lab.wires.address(1 - host)))
    up = []
    try:
        for host, file in enumerate(files):
            inside = ["ip", "netns", "exec", lab.namespace(host).name]
            subprocess.run([*inside, "wg-quick", "up", str(file)], check=True, capture_output=True)
            up.append([*inside, "wg-quick", "down", str(file)])
        yield [file.stem for file in files]
    finally:
        for command in up:
            subprocess.run(command, check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.timeout(400)
@needs_root
@pytest.mark.skipif(not TOOLS, reason="needs wg, wg-quick and wireguard-go")
def test_only_the_tunnel_is_seen_and_only_in_it_is_listened(tmp_path):
    with Lab(2, "1gbit") as lab:
        clear, _ = trained(lab)
        assert any(MARK in frame for frame in clear)
        with tunnel(lab, tmp_path) as interfaces:
            hidden, addresses = trained(lab, interfaces, "10.7.0.1")
        assert {protocol_and_port(frame) for frame in hidden} == {(UDP, PORT)}
        assert not any(MARK in frame for frame in hidden)
        addresses[0].remove(EVERYWHERE)  # torch's store
        assert addresses == [{socket.inet_aton(f"10.7.0.{host + 1}")[::-1].hex().upper()} for host in range(2)]

"""Processes with the plugin in them, one or two, that do what a test asks of them."""

import os
import pickle
import select
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("net_peer.py")


class Peer:
    """A process: `peer.send(...)` calls `send` of its `Here`; `peer.start("send", ...)` does not wait for it."""

    def __init__(self, library, version, environment, inside=()):
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "BAGUANET_"))}
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-S", str(PROGRAM), str(library), str(version)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=clean | {"NCCL_SOCKET_IFNAME": "lo"} | environment,
        )

    def start(self, name, *arguments, **options):
        pickle.dump((name, arguments, options), self.process.stdin)
        self.process.stdin.flush()

    def result(self, limit=60.0):
        if not select.select([self.process.stdout], [], [], limit)[0]:
            raise TimeoutError(f"no answer within {limit:g} s")
        value = pickle.load(self.process.stdout)
        if isinstance(value, Exception):
            raise value
        return value

    def __getattr__(self, name):
        def call(*arguments, **options):
            self.start(name, *arguments, **options)
            return self.result()

        return call

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def end(self):
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


class Pair:
    """A sender and a receiver in a process each, and a connection from one to the other."""

    def __init__(self, library, version, sender, receiver):
        self.sender, self.receiver = Peer(library, version, sender), Peer(library, version, receiver)

    def connect(self):
        for peer in (self.sender, self.receiver):
            peer.init()
        handle = self.receiver.listen()
        self.receiver.start("accept")
        self.sender.connect(handle)
        self.receiver.result()
        return self

    def carry(self, sizes, room=None, seed=0, orders=("first", "first")):
        """Send messages of these sizes; returns the sender's seconds. Bytes and sizes are checked."""
        self.receiver.start("receive", room or sizes, seed, orders[1])
        self.sender.start("send", sizes, seed, orders[0])
        seconds = self.sender.result()
        assert self.receiver.result() == sizes
        return seconds

    def end(self):
        self.sender.end()
        self.receiver.end()

"""A process with the plugin in it, that does what its parent asks; `net_pair` is the parent's side."""

import ctypes
import os
import pickle
import random
import signal
import socket
import sys
import time
from functools import cache, partial
from pathlib import Path

from nccl_net import Net, NetError, until

GUARD = b"\xa5" * 64  # around every receive
SO_MAX_PACING_RATE = 47  # Linux
BYTES_ACKED = 120  # where tcpi_bytes_acked begins in Linux' struct tcp_info


class Here:
    """The functions that the parent calls, by name."""

    def __init__(self, library, version):
        self.library, self.version = library, int(version)
        self.listener = self.sender = self.receiver = None
        self.requests = []

    def init(self):
        self.net = Net(self.library, self.version)

    def devices_under(self, environment):
        """The devices, or the error, of a copy of this process that initialises with other variables."""
        ours, theirs = os.pipe()
        if not (child := os.fork()):
            os.environ.update(environment)
            os.write(theirs, pickle.dumps(answer(lambda: self.init() or self.devices())))
            os._exit(0)
        os.waitpid(child, 0)
        os.close(theirs)
        with os.fdopen(ours, "rb") as pipe:
            value = pickle.load(pipe)
        if isinstance(value, Exception):
            raise value
        return value

    def devices(self):
        return [self.net.properties(i).name.decode() for i in range(self.net.devices())]

    def properties(self, device=0):
        found = self.net.properties(device)
        return {
            name: tuple(value) if isinstance(value := getattr(found, name), ctypes.Array) else value
            for name, *_ in found._fields_
        }

    def said(self):
        return self.net.said

    def listen(self):
        handle, self.listener = self.net.listen()
        return handle.raw

    def begin_to_connect(self, handle):
        """Call connect once; whether there is a connection."""
        self.handle = ctypes.create_string_buffer(handle, len(handle))
        self.sender = self.net.connect(self.handle)
        return self.sender is not None

    def connect(self, handle):
        self.handle = ctypes.create_string_buffer(handle, len(handle))
        self.sender = until(lambda: self.net.connect(self.handle))

    def connect_again(self):
        self.sender = self.sender or until(lambda: self.net.connect(self.handle))

    def begin_to_accept(self):
        self.receiver = self.net.accept(self.listener)
        return self.receiver is not None

    def accept(self, limit=40.0):
        self.receiver = until(lambda: self.net.accept(self.listener), limit)

    def send(self, sizes, seed=0, order="first", limit=30.0):
        """Send messages with as many in flight as there is room for; returns seconds."""
        return self.exchange(sizes, [message(seed, i, size) for i, size in enumerate(sizes)], order, limit, True)[0]

    def receive(self, room, seed=0, order="first", limit=30.0):
        """Receive into buffers with `room`, check every byte, and return the sizes that `test` told."""
        buffers = [GUARD + bytes(size) + GUARD for size in room]
        _, told, buffers = self.exchange(room, buffers, order, limit, False)
        for i, (buffer, size) in enumerate(zip(buffers, told, strict=True)):
            data = buffer.raw
            assert data[:64] == GUARD and data[64 + room[i] : 128 + room[i]] == GUARD, f"written outside of message {i}"
            assert data[64 : 64 + size] == message(seed, i, size), f"message {i} came otherwise than it was sent"
            assert not any(data[64 + size : 64 + room[i]]), f"written behind the end of message {i}"
        return told

    def exchange(self, sizes, data, order, limit, sends):
        buffers = [ctypes.create_string_buffer(each, max(len(each), 1)) for each in data]
        connection = self.sender if sends else self.receiver
        regions = [self.net.register(connection, buffer, len(buffer)) for buffer in buffers]
        told, flying, posted, begin = [None] * len(sizes), [], 0, time.perf_counter()
        chance = random.Random(1)
        while posted < len(sizes) or flying:
            while posted < len(sizes) and (request := self.post(connection, buffers, sizes, regions, posted, sends)):
                flying.append((posted, request))
                posted += 1
            at = {"first": 0, "last": len(flying) - 1, "any": chance.randrange(len(flying))}[order]
            if (size := self.net.test(flying[at][1])) is None:
                time.sleep(0.0001)
            else:
                told[flying.pop(at)[0]] = size
            assert time.perf_counter() < begin + limit, f"{len(flying)} messages are still flying"
        seconds = time.perf_counter() - begin
        for region in regions:
            self.net.functions.deregMr(connection, region)
        return seconds, told, buffers

    def post(self, connection, buffers, sizes, regions, i, sends):
        if sends:
            return self.net.isend(connection, buffers[i], sizes[i], regions[i])
        inside = (ctypes.c_char * (len(buffers[i]) - 64)).from_buffer(buffers[i], 64)
        return self.net.irecv(connection, inside, sizes[i], regions[i])

    def post_send(self, size):
        """Post a send of zeros and let it fly."""
        buffer = ctypes.create_string_buffer(max(size, 1))
        self.requests.append((buffer, self.net.isend(self.sender, buffer, size)))
        return self.requests[-1][1] is not None

    def post_receive(self, size, n=1):
        buffer = ctypes.create_string_buffer(max(size, 1))
        region = self.net.register(self.receiver, buffer, len(buffer))
        self.requests.append((buffer, self.net.irecv(self.receiver, buffer, size, region, n=n)))
        self.region = region
        return self.requests[-1][1] is not None

    def slow_down(self, i, rate):
        """Let stream i of the sender carry `rate` bytes a second."""
        with socket.socket(fileno=os.dup(sockets()[i])) as stream:
            stream.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)

    def carried(self):
        """The bytes that the other side has acknowledged, of each stream of the sender."""
        found = []
        for fd in sockets():
            with socket.socket(fileno=os.dup(fd)) as stream:
                info = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            found.append(int.from_bytes(info[BYTES_ACKED : BYTES_ACKED + 8], sys.byteorder))
        return found

    def wait(self, i=0, limit=40.0):
        return self.net.wait(self.requests[i][1], limit)

    def test(self, i=0):
        return self.net.test(self.requests[i][1])

    def deregister(self):
        self.net.functions.deregMr(self.receiver, self.region)

    def register(self, kind):
        self.net.register(self.receiver, ctypes.create_string_buffer(8), 8, kind)

    def flush(self):
        return self.net.flush(self.receiver)

    def close(self, *names):
        for name in names:
            close = {"sender": "closeSend", "receiver": "closeRecv", "listener": "closeListen"}[name]
            self.net.check(getattr(self.net.functions, close)(getattr(self, name)))

    def finalize(self):
        self.net.finalize()

    def tasks(self):
        """{name: signals blocked} of the plugin's threads."""
        found = {}
        for status in Path("/proc/self/task").glob("*/status"):
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
            found[fields["Name"].strip()] = int(fields["SigBlk"], 16)
        return {name: mask for name, mask in sorted(found.items()) if name.startswith("baguanet")}

    def threads(self):
        return list(self.tasks())

    def signals_blocked(self):
        return list(self.tasks().values())

    def take_sigpipe_as_c_programs_do(self):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)

    def descriptors(self):
        """Return the number of open sockets."""
        return len(sockets())


def answer(function):
    """Return the result of the function, or the error that it raises."""
    try:
        return function()
    except (NetError, TimeoutError, AssertionError) as error:
        return error


def sockets():
    """The descriptors that are sockets."""
    links = [fd for fd in Path("/proc/self/fd").glob("*") if fd.is_symlink()]
    return sorted(int(fd.name) for fd in links if os.readlink(fd).startswith("socket:"))


@cache
def noise():
    return random.Random(0).randbytes(1_000_003)


def message(seed, i, size):
    """The bytes of message i; no two are alike, nor do chunks repeat in one."""
    begin = random.Random(f"{seed} {i}").randrange(len(noise()))
    return (noise() * (size // len(noise()) + 2))[begin : begin + size]


def main():
    here = Here(*sys.argv[1:])
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its peers
    while True:
        try:
            name, arguments, options = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(answer(partial(getattr(here, name), *arguments, **options)), answers)
        answers.flush()


if __name__ == "__main__":
    main()

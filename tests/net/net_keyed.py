"""A peer that knows the key of a listener and speaks the plugin's words, rightly or wrongly, over sockets of Python."""

import socket
import struct

HELLO = struct.Struct("=QQQII")  # magic, key, connection, stream, streams
WELCOME = struct.Struct("=QQ")
CHUNK = struct.Struct("=QQQQ")  # message, its size, offset, length


def address(handle):
    """Return the address of a listener: its handle holds a magic number, a key, and the address."""
    magic, key, _, port, host = struct.unpack_from("=QQH2s4s", handle)
    return magic, key, (socket.inet_ntoa(host), int.from_bytes(port, "big"))


class Keyed:
    """One connection of `streams` streams to a listener, each a socket; `hello` says the rest of each one's hello."""

    def __init__(self, handle, streams=1, connection=5, said=0):
        magic, key, where = address(handle)
        self.hellos = [HELLO.pack(magic, key, connection, i, streams) for i in range(streams)]
        self.said = said
        self.streams = [socket.create_connection(where, timeout=30) for _ in self.hellos]
        for stream, hello in zip(self.streams, self.hellos, strict=True):
            stream.sendall(hello[:said])

    def hello(self):
        for stream, hello in zip(self.streams, self.hellos, strict=True):
            stream.sendall(hello[self.said :])
        return self

    def welcomed(self):
        """Return whether every stream was welcomed."""
        return [len(stream.recv(WELCOME.size, socket.MSG_WAITALL)) for stream in self.streams] == [WELCOME.size] * len(
            self.streams
        )

    def chunk(self, message, size, offset, data, length=None, stream=0):
        """Send a chunk of a message, or only its head."""
        head = CHUNK.pack(message, size, offset, len(data) if length is None else length)
        self.streams[stream].sendall(head + data)

    def close(self):
        for stream in self.streams:
            stream.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

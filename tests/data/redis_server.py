"""A real Redis server on a free port of this machine, for as long as a test needs it."""

import shutil
import socket
import subprocess
import time
from urllib.parse import quote

import pytest


class Server:
    """`redis-server` with a password and, given a folder for its certificate, TLS; nothing is written to disk."""

    def __init__(self, folder, password="secret & long", tls=False, **settings):
        if shutil.which("redis-server") is None:
            pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
        pytest.importorskip("redis")
        self.password, self.folder, self.port = password, folder, free_port()
        self.ca_file = str(certificate(folder)) if tls else None
        ports = ["--port", "0", "--tls-port", str(self.port)] if tls else ["--port", str(self.port)]
        files = ["--tls-cert-file", f"{folder}/tls.pem", "--tls-key-file", f"{folder}/tls.key"] if tls else []
        clients = ["--tls-auth-clients", "no"] if tls else []
        more = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        plain = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
        locked = ["--requirepass", password] if password else []
        self.command = ["redis-server", *ports, *plain, *locked, *files, *clients, *more]
        self.start()

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    @property
    def url(self):
        return f"redis{'s' * bool(self.ca_file)}://:{quote(self.password, safe='')}@{self.address}"

    def start(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(500):
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert self.process.poll() is None, f"{self.command} ended with {self.process.returncode}"
            time.sleep(0.01)
        raise TimeoutError(f"{self.command} does not listen")

    def kill(self):
        self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def certificate(folder):
    """A certificate for 127.0.0.1 that signs itself: `tls.pem`, and its key, `tls.key`."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, which makes the certificate")
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    files = ["-keyout", f"{folder}/tls.key", "-out", f"{folder}/tls.pem"]
    subprocess.run([*make.split(), *files], check=True, capture_output=True)
    return folder / "tls.pem"

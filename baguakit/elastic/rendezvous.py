"""The rendezvous of torch.distributed.elastic, used within a training process."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousInfo, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

ATTEMPTS = 3  # keep-alives that may be missed
ANSWER = 10.0  # seconds that the store may take to answer
PROGRESS = 10.0  # seconds between two lines of a rank that waits
SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@dataclass(frozen=True)
class Settings:
    """The settings of a rendezvous, equal on all ranks.

    Attributes:
        host, port: of the store.
        name: tells trainings apart that share a store.
        least, most: ranks of a round.
        keep_alive: seconds between two signs of life; after three that are missed, a rank is gone.
        last_call: seconds for which a round waits for more ranks once it has the least.
        patience: seconds for which a rank waits to be let in.
    """

    host: str
    port: int
    name: str
    least: int
    most: int
    keep_alive: float
    last_call: float
    patience: float


class Rendezvous:
    """The place where this process meets the other ranks."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._handler: DynamicRendezvousHandler | None = None

    def next(self) -> RendezvousInfo:
        """Leave the round so far, and wait until this process is in the next one.

        Raises:
            TimeoutError: that has not come to pass within the patience.
        """
        until, settings = time.monotonic() + self.settings.patience, self.settings
        with progress(f"at least {settings.least} ranks at {settings.host}:{settings.port}"):
            while True:
                try:
                    self._handler = handler = self._handler or self._connected()
                    with store_of_its_own():
                        return handler.next_rendezvous()
                except (
                    RendezvousError,
                    RuntimeError,
                    KeyError,
                ) as error:  # the store is gone, or took this rank for dead
                    self.drop()
                    if isinstance(error, RendezvousTimeoutError) or time.monotonic() > until:
                        raise TimeoutError(
                            f"no group of at least {settings.least} ranks has formed at {settings.host}:"
                            f"{settings.port} within {settings.patience:g} s: too few ranks are there, the store "
                            "cannot be reached, or the clocks of the machines differ by more than "
                            f"{ATTEMPTS * settings.keep_alive:g} s ({type(error).__name__}: {error})"
                        ) from None
                    time.sleep(settings.keep_alive)

    def waiting(self) -> bool:
        """Return whether ranks wait to be let in."""
        handler = self._handler
        return handler is not None and handler.num_nodes_waiting() > 0

    def drop(self) -> None:
        """Give no more signs of life: the others go on without this process."""
        self._handler = None  # the timer of its signs of life knows it by a weak reference only

    def _connected(self) -> DynamicRendezvousHandler:
        settings = self.settings
        answer = timedelta(seconds=ANSWER)
        given: Any = dist
        store = given.TCPStore(settings.host, settings.port, is_master=False, wait_for_workers=False, timeout=answer)
        times = RendezvousTimeout(
            join=timedelta(seconds=settings.patience), last_call=timedelta(seconds=settings.last_call)
        )
        make: Any = DynamicRendezvousHandler.from_backend
        handler: DynamicRendezvousHandler = make(
            settings.name,
            store,
            C10dRendezvousBackend(store, settings.name),
            settings.least,
            settings.most,
            timeout=times,
            keep_alive_interval=settings.keep_alive,  # timedelta takes fractions as well
            keep_alive_max_attempt=ATTEMPTS,
        )
        return handler


_environment = threading.Lock()


@contextlib.contextmanager
def store_of_its_own() -> Iterator[None]:
    """Let torch's rendezvous give each round a part of the store: else a newcomer waits for the address of another
    store, which rank 0 of the first round has written and nobody writes again."""
    with _environment:
        before = os.environ.get(SHARED)
        os.environ[SHARED] = "1"
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(SHARED, None)
            else:
                os.environ[SHARED] = before


@contextlib.contextmanager
def progress(what: Any) -> Iterator[None]:
    """Write a line from time to time while the body waits."""
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(PROGRESS):
            print(f"baguakit: waiting for {what}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell, name="baguakit progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()

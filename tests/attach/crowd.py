"""A crowd: the monitors of many ranks over one store, without threads, in a time that a test moves."""

import heapq
import random
import time
from collections import Counter
from datetime import timedelta

import torch.distributed as dist

from baguakit.lanes import Flight
from baguakit.monitor import Collective, Monitor, judging

REQUESTS = ("set", "get", "add", "append", "check", "wait", "compare_set", "multi_get", "multi_set", "delete_key")


class Endless(Flight):
    """A flight that ends by failing, or when it is told to."""

    def __init__(self):
        self.arrived = False

    def done(self):
        return self.arrived

    def fail(self, error):
        self.arrived = True


class CountedStore:
    """A store that counts its requests, and keeps what they have set."""

    def __init__(self, store):
        self.store, self.requests, self.written = store, Counter(), ""

    def __getattr__(self, name):
        if name not in REQUESTS:
            raise AttributeError(name)
        call = getattr(self.store, name)

        def counted(*arguments):
            self.requests[name] += 1
            if name == "set":
                self.written += str(arguments[1])
            return call(*arguments)

        return counted


class Crowd:
    """The monitors of `size` ranks, each with a store that counts.

    The clocks of silence move by `pass_time` and by `run` only. A heartbeat is a second.
    """

    def __init__(self, size, monkeypatch, timeout=600.0):
        self.now = 0.0
        monkeypatch.setattr(judging.time, "monotonic", lambda: self.now)
        store = dist.HashStore()
        self.stores = [CountedStore(store) for _ in range(size)]
        limit = timedelta(seconds=timeout)
        self.monitors = [Monitor(each, rank, size, limit, lambda: None) for rank, each in enumerate(self.stores)]
        for monitor in self.monitors:
            monitor.watch.board.arrive(monitor.watch._written)
        self.flights = [None] * size

    def wait(self, *ranks, launched=10.0, label="a flight"):
        """Let ranks, all by default, wait for a flight that all have launched so many seconds ago."""
        for rank in ranks or range(len(self.monitors)):
            self.flights[rank] = Endless()
            at = time.time() - launched
            self.monitors[rank].launched(0, Collective(label=label, flight=self.flights[rank], launched=at))

    def turn(self, *ranks):
        """Let ranks, all by default, have one heartbeat."""
        for rank in ranks or range(len(self.monitors)):
            self.monitors[rank].watch.turn()

    def pass_time(self, seconds=1.0):
        self.now += seconds

    def requests(self):
        """Return the number of requests of each rank since the last call."""
        counts = [store.requests.total() for store in self.stores]
        for store in self.stores:
            store.requests.clear()
        return counts

    def judges(self):
        return [monitor.rank for monitor in self.monitors if monitor.watch._judges]

    def errors(self):
        return [str(monitor.error or "") for monitor in self.monitors]

    def run(self, ranks, seconds, latency, stop=lambda: False, seed=0):
        """Let ranks have heartbeats for so long, where a request takes `latency(random)` seconds."""
        drawn, until = random.Random(seed), self.now + seconds
        due = [(self.now + drawn.random(), rank) for rank in ranks]
        heapq.heapify(due)
        while due and due[0][0] < until and not stop():
            self.now, rank = heapq.heappop(due)
            before = self.stores[rank].requests.total()
            monitor = self.monitors[rank]
            monitor.watch.turn()
            if monitor.error is None:
                taken = sum(latency(drawn) for _ in range(self.stores[rank].requests.total() - before))
                heapq.heappush(due, (self.now + taken + monitor.watch._pause, rank))

"""Measurements: the speed of machines, the links between them, and the computation of a training step.

Ranks of one machine share its cores and its memory, and in training they do the same work at the same time. So all
ranks begin a measurement together and repeat it until each rank has run on the cores several times. The mean of the
times is used, not the median: in most repetitions no other rank may have run. Lines are fitted to times of messages.
"""

import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import accumulate, combinations
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..arguments import Declared, Range, checked, message
from ..comm import SMALLEST, Comm, abort_all, check_device
from ..compressors import Compressor, MinMaxUInt8
from ..costs import Codec, Line, Link, Network, ring
from ..lanes import between, lane, moment
from ..primitives import compressed_all_gather, compressed_mean_, mean_, neighbor_mean_, scattered_mean
from ..primitives.one_kernel import known
from ..primitives.transports import scattered
from ..topology import OnePeerExponential

SIZES = tuple(1 << power for power in range(10, 27, 2))  # bytes: 1 KiB to 64 MiB
LEAST = 3  # sizes that are measured however long they take; 2 with several flows
SMALL = 1 << 17  # bytes; such messages are noisy and cheap
OVERDRAWN = 4  # shares of time that a series may take until large messages take longer than small ones
FAR, PINGS = 3e-3, 5  # seconds: over links with delay, small messages take longer; the number of them that tell it
OPEN, DELAYS, LONG = 1 << 16, 24, 2.5  # over such links, the first large message; the last takes 24 α, or 2.5 s
TIMEOUT = timedelta(seconds=60)  # of a message of a probe
VALUES, ROWS = 1 << 22, 4  # of a speed: 16 MiB of fp32, more than the cache of a core
LEAST_TIMES, WINDOW = 3, 0.1  # repetitions of a work, and seconds of them
WARM_UP, STEPS = 2, 5  # of a step that is timed
SIDE, PRODUCTS = 192, 16  # of matrices that fit in the cache; products long enough to be timed


def fit(times: Mapping[int, Sequence[float]]) -> Line:
    """Return the line α + β b through measured times, {bytes: seconds}; t_b is the median of the times of b bytes.

    Of all lines through two of the points (or through one, with α = 0 or β = 0), it has the least sum

        Σ_b b^¼ |log((α + β b)/t_b)|

    So relative errors count, outliers count little, and long messages, which are timed best, count a little more.
    """
    b, t = np.array([(float(size), median(each)) for size, each in times.items()]).reshape(-1, 2).T
    lines = [(each, 0.0) for each in t] + [(0.0, each) for each in t / b]
    for p, q in combinations(range(len(b)), 2):
        beta = (t[q] - t[p]) / (b[q] - b[p])
        lines.append((t[p] - beta * b[p], beta))
    alphas, betas = np.array([line for line in lines if min(line) >= 0]).T
    best = (b**0.25 * np.abs(np.log((alphas[:, None] + betas[:, None] * b) / t))).sum(1).argmin()
    return Line(float(alphas[best]), float(betas[best]))


def over_delay(times: dict[int, list[float]], measure: Callable[[int, int], None]) -> Line:
    """Return the line of a link with delay. `measure(b, repeats)` puts times of b bytes into `times`, as of the least.

    TCP opens its window by the round trip, so that over 50 ms and 100 Mb/s, 1 MiB takes twice the time of its bytes.
    Therefore messages double until one takes 24 α, and do not pause: this one tells β, and the least one α.
    """
    alpha, b = min(min(each) for each in times.values()), OPEN
    measure(b, 2)
    while b < SIZES[-1] and min(times[b]) < min(LONG, DELAYS * alpha):
        b *= 2
        measure(b, 2)
    return Line(alpha, max(0.0, min(times[b]) - alpha) / b)


@checked
def probe(
    comm: Comm | None = None,
    *,
    flows: Sequence[Annotated[int, Range(1, 64)]] | None = None,
    compressors: Sequence[Compressor] = (MinMaxUInt8(),),
    device: torch.device | str | None = None,
    seconds: Annotated[float, Range(above=0)] = 3.0,
) -> Network:
    """Measure α and β of every class of links, and how fast this machine compresses and copies. Collective.

        print(bk.tune.probe(bk.Comm()))

    On each link all ranks send a message to the next rank, then reduce a tensor, and then send to all other ranks.
    Sending to all is slower if ranks share a network card, or GPUs share a PCIe switch. Messages have 1 KiB, 4 KiB and
    so on, until the time is used up. Where 1 KiB takes more than 3 ms, as between cities, they go on until they show
    the rate, for a minute or less per number of flows, and α is a round trip. Nobody else should use the network.

    Args:
        comm: the ranks, and with a mesh their nodes; None means all ranks.
        flows: numbers of connections to try, such as (1, 2, 4, 8), the default on CPUs; on CUDA the default is 1.
            With nodes, these are connections between nodes.
        compressors: the compressors to measure.
        device: the device of the tensors; by default the GPU if the group can send GPU tensors, else the CPU.
        seconds: the approximate time for all messages. With more time, messages are larger and β is more exact. The
            measurements of the machine (0.1 s each) and the compilation of compressors take additional time.

    Returns:
        A `Network`: print it, or keep its `to_json()`.

    Raises:
        ValueError: flows or seconds are invalid, or the group cannot send tensors of the device.
    """
    comm = Comm() if comm is None else comm
    if device is None and torch.cuda.is_available() and comm._by_nccl(torch.device("cuda")):
        device = torch.device("cuda", torch.cuda.current_device())
    there = torch.device("cpu" if device is None else device)
    check_device(comm.group, there)
    if there.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: this process has no CUDA device")
    on_gpu = comm._by_nccl(there)
    counts = sorted(set(((1,) if on_gpu else (1, 2, 4, 8)) if flows is None else flows))
    if not counts:
        raise ValueError(message("flows", "None, or at least one number of connections", flows))
    if on_gpu and counts != [1]:
        raise ValueError(f"{flows=} divide what travels over gloo; NCCL has connections of its own: flows=(1,)")
    name = comm.broadcast_object(uuid.uuid4().hex)
    mine, stretch = machine(comm, there, compressors)
    parts = ("flat", "intra", "inter") if comm.hierarchical else ("flat",)
    joint = 0 if comm._node is None else 3 + len(compressors)
    share = seconds / max(1, 3 * (len(parts) + len(counts) - (1 in counts)) + joint)
    links: list[Link] = []
    for count in counts if comm.size > 1 else ():
        own = comm.own(f"probe/{name}/{count}", TIMEOUT, there, count)
        try:
            for part in parts if count == 1 else parts[-1:]:  # between nodes, if there are any, messages are divided
                group = own if part == "flat" else getattr(own, part)
                for link, send in {part: None, **in_one_kernel(part, group, compressors)}.items():
                    links.append(link_of(link, count, group, comm, there, stretch, share, send))
        except BaseException:
            abort_all(own.groups())
            raise
        own.close()
    networks: list[Network] = comm.gather_objects(replace(mine, links=tuple(links)))

    # The measurements of links are equal on all ranks. For all other measurements, the slowest machine counts.
    def slowest(measured: Sequence[Any], *names: str) -> Any:
        return replace(measured[0], **{name: max(getattr(each, name) for each in measured) for name in names})

    codecs = zip(*(network.codecs for network in networks), strict=True)
    found = tuple(slowest(each, "compress", "decompress", "reduce") for each in codecs)
    network: Network = slowest(networks, "copy", "launch", "crowding")
    return replace(network, threads=min(each.threads for each in networks), codecs=found)


def now(device: torch.device) -> float:
    """Wait until the device has finished its work; return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def machine(comm: Comm, device: torch.device, compressors: Sequence[Compressor]) -> tuple[Network, float]:
    """Return the speeds of this rank's machine while all ranks work, and the seconds that pass per second of CPU time.

    The second number is 0 on a GPU: CPU time is ignored there. The crowding is κ = T₂/T₁ − 1, from 0 to 1, where T₁ is
    the time of matrix products, and T₂ while each rank also computes them on a lane. Collective.
    """

    def timed(work: Callable[[], object]) -> tuple[float, float]:
        """Return the mean seconds of `work()`, and the mean seconds of CPU time that this thread used for it."""
        work()
        comm.gather_objects(None)  # all ranks begin together
        cpu, began, times = time.thread_time(), now(device), 0
        while times < LEAST_TIMES or now(device) - began < WINDOW:
            work()
            times += 1
        return (now(device) - began) / times, (time.thread_time() - cpu) / times

    x = torch.randn(SIDE, SIDE, dtype=torch.float32, device=device)

    def products() -> None:
        for _ in range(PRODUCTS):
            x @ x

    def both() -> None:
        flight = beside.run(products)
        products()
        flight.result()

    comm.gather_objects(None)
    with closing(lane(device, "baguakit probe", comm._by_host(device))) as beside:
        one, had = timed(products)
        two, _ = timed(both)
        launch, _ = timed(lambda: beside.run(lambda: None).result())

    def codec(compressor: Compressor) -> Codec:
        n = VALUES // ROWS if compressor.dense else VALUES
        x = torch.randn(VALUES // n, n, dtype=torch.float32, device=device)
        compressor.warm_up(device, x.dtype, VALUES)
        packed, out, total = compressor.compress(x), torch.empty_like(x), x.new_zeros(n)

        def average() -> Tensor:
            return compressor.reduce(packed, n) if compressor.dense else compressor.add_(total, packed, [1.0])

        works = lambda: compressor.compress(x), lambda: compressor.decompress(packed, n, out=out), average
        return Codec(repr(compressor), *(timed(work)[0] / VALUES for work in works))

    codecs = tuple(map(codec, compressors))
    y = torch.ones(2, VALUES, dtype=torch.float32, device=device)
    copy = timed(lambda: y[0].copy_(y[1]))[0] / y[0].nbytes
    per_node, crowding = comm.intra.size if comm.hierarchical else 1, min(1.0, max(0.0, two / one - 1))
    found = Network(comm.size, per_node, device.type, torch.get_num_threads(), (), codecs, copy, launch, crowding)
    return found, 0.0 if device.type == "cuda" else max(1.0, one / max(1e-9, had))


def in_one_kernel(part: str, there: Comm, compressors: Sequence[Compressor]) -> dict[str, Callable[[Tensor], object]]:
    """Return what of a `Comm` goes in one kernel, by the part of a `Link`: functions of fp32 values."""
    if there._node is None or there._node.part != there._part or there.size == 1:
        return {}
    n, pairs = there.size, (OnePeerExponential(), there._with(_round=0))

    def shards(x: Tensor) -> Tensor:
        return compressed_all_gather(scattered_mean(x[: len(x) // n * n], there), None, there)

    found: dict[str, Callable[[Tensor], object]] = {f"{part}: shards": shards}
    found |= {f"{part}: mean": partial(mean_, comm=there), f"{part}: neighbors": lambda x: neighbor_mean_(x, *pairs)}
    packed = {f"{part}: {c!r}": c for c in compressors if c.dense and known(c)}
    return found | {name: partial(compressed_mean_, compressor=c, comm=there) for name, c in packed.items()}


def link_of(
    part: str, flows: int, there: Comm, comm: Comm, device: torch.device, stretch: float, share: float,
    send: Callable[[Tensor], object] | None = None,
) -> Link:  # fmt: skip
    """Return the `Link` of one class of links, measured by exchanges over `flows` flows in the group `there`.

    All ranks of `comm` agree on the times. `stretch` is that of `machine`; a series of messages may take `share` s.
    With `send`, a function of values, its line is that of `exchange`.
    """
    n, r = there.size, there.rank
    if n == 1:
        return Link(part, flows, n, Line(0.0, 0.0), Line(0.0, 0.0))
    sizes = [b for b in SIZES if flows == 1 or b >= SMALLEST or b == SIZES[0]]  # smaller ones are not divided
    least = LEAST if flows == 1 else LEAST - 1
    buffer = torch.zeros(SIZES[-1] // 4, dtype=torch.float32, device=device)

    def series(send: Callable[[int], float]) -> Line:
        """Return a line fitted to the times of messages. `send(b)` exchanges b bytes, and returns the bytes sent."""

        def once(b: int) -> tuple[float, float]:
            """Return the seconds that one message takes, and `stretch` times the seconds of its CPU time."""
            cpu, began = time.process_time(), now(device)
            send(b)
            ended = now(device)
            return ended - began, (time.process_time() - cpu) * stretch

        times: dict[int, list[float]] = {}
        cpu: dict[float, float] = {}  # the processor's time for a message, by the bytes that it sent

        def measure(b: int, repeats: int) -> None:
            """Exchange b bytes `repeats` times; keep the times of the slowest rank."""
            sent = send(b)
            gathered = comm.gather_objects([once(b) for _ in range(repeats)])
            times[b] = [max(each[i][0] for each in gathered) for i in range(repeats)]
            cpu[sent] = max(median(busy for _, busy in each) for each in gathered)

        spent, seen = 0.0, False
        measure(sizes[0], PINGS)
        far = min(times[sizes[0]]) > FAR
        for before, b in zip([0, *sizes], () if far else sizes, strict=False):
            # Until large messages take longer than small ones, a series may take `OVERDRAWN` times its share.
            allowed = share if seen else OVERDRAWN * share
            repeats = 20 if b < SMALL else 5 if b < 1 << 20 else 3
            if len(times) >= least and spent + (1 + repeats) * b / before * median(times[before]) > allowed:
                break
            measure(b, repeats)
            spent += sum(times[b]) if b > SMALL else 0.0  # else a busy machine would spend all of it on noise
            seen = median(times[b]) > 2 * median(times[sizes[0]])
        line, largest = over_delay(times, measure) if far else fit(times), max(times)
        # If noise hides the slope, take the bandwidth of the largest message.
        beta = line.beta or median(times[largest]) / largest
        busy = (cpu[max(cpu)] - cpu[min(cpu)]) / (max(cpu) - min(cpu))
        return Line(line.alpha, beta, min(beta, max(0.0, busy)))

    def exchange(b: int) -> float:
        there.exchange(buffer[: b // 4], [(r - 1) % n], [(r + 1) % n])
        return b

    def reduce(b: int) -> float:
        there.all_reduce(buffer[: b // 4])
        return ring(n) * b

    def to_all(b: int) -> float:
        size = -(-b // n)
        rows, incoming = (x.view(torch.uint8)[: n * size].view(n, size) for x in (buffer, landed))
        there.agree_on_shares()
        deque(scattered(there, [incoming], lambda _, ranks: rows[ranks]), 0)
        return (n - 1) * size

    if send is not None:
        line = series(lambda b: (send(buffer[: b // 4]), b)[1])
        return Link(part, flows, n, line, line)
    messages, reductions = series(exchange), series(reduce)
    alpha, beta = reductions.alpha / (2 * (n - 1)), reductions.beta / ring(n)
    around = Line(alpha, beta, min(beta, reductions.busy))
    if n == 2:  # all others are the next rank
        return Link(part, flows, n, messages, around)
    landed = torch.zeros_like(buffer)
    spread = series(to_all)
    beta = spread.beta * n / (n - 1)
    return Link(part, flows, n, messages, around, Line(spread.alpha, beta, min(beta, spread.busy)))


@dataclass(frozen=True)
class Compute(Declared):
    """A step without communication, in seconds.

    Attributes:
        forward, backward, optimizer: the seconds of each part; forward is everything before backward.
        ready: for each trainable parameter, in the model's order, the share of backward after which its gradient is
            ready. Empty: backward goes from the last parameter to the first, in times proportional to their sizes.
    """

    forward: Annotated[float, Range(0)]
    backward: Annotated[float, Range(0)]
    optimizer: Annotated[float, Range(0)] = 0.0
    ready: tuple[Annotated[float, Range(0, 1)], ...] = ()

    @property
    def seconds(self) -> float:
        """Return the seconds of the whole step."""
        return self.forward + self.backward + self.optimizer

    @checked
    def gradients(self, params: Sequence[Tensor]) -> dict[Tensor, float]:
        """Return the time at which each gradient is ready, in seconds since backward began."""
        if self.ready and len(self.ready) != len(params):
            raise ValueError(f"this Compute tells of {len(self.ready)} gradients, and the model has {len(params)}")
        if self.ready:
            return {p: self.backward * share for p, share in zip(params, self.ready, strict=True)}
        total, done = sum(p.numel() for p in params), accumulate(p.numel() for p in reversed(params))
        return {p: self.backward * each / max(1, total) for p, each in zip(reversed(params), done, strict=True)}


def timed(step: Callable[[], Any], model: nn.Module) -> Compute:
    """Take steps without communication, time them after a warm-up, and return the median of each field of `Compute`."""
    params = [p for p in model.parameters() if p.requires_grad]
    device = params[0].device if params else torch.device("cpu")
    forwards: list[Any] = []  # moments at which forward ended
    arrivals: dict[Tensor, Any] = {}  # and those at which gradients were ready
    hooks: list[Any] = [model.register_forward_hook(lambda *_: forwards.append(moment(device)))]
    hooks += [p.register_post_accumulate_grad_hook(lambda p: arrivals.update({p: moment(device)})) for p in params]

    def timed_step() -> list[float]:
        """Return the seconds of forward, backward and optimizer, then the share of backward before each gradient."""
        forwards.clear()
        arrivals.clear()
        began = moment(device)
        step()
        ended = moment(device)
        if not forwards or not arrivals:
            raise ValueError("step_seconds=… must call the model and its backward: one step of training, alone")
        spans = {p: between(forwards[-1], at) for p, at in arrivals.items()}
        last = max(spans, key=spans.__getitem__)
        backward = max(1e-9, spans[last])
        shares = [max(0.0, spans.get(p, backward) / backward) for p in params]
        return [between(began, forwards[-1]), backward, between(arrivals[last], ended), *shares]

    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook)
        timings = [timed_step() for _ in range(WARM_UP + STEPS)][WARM_UP:]
    forward, backward, optimizer, *ready = map(median, zip(*timings, strict=True))
    return Compute(forward, backward, optimizer, tuple(ready))

"""The overlap of flights and computation, and the exposed communication.

Training computes for W seconds. Flight i is launched when r_i of them are done, and takes T_i seconds, z_i of them work
of the machine's processor, in order on one lane; or T_i − B_i there and B_i on a lane beside it (see `baguakit.lanes`):

    this lane           a_1     a_2  c_1     a_3  c_2   …     a_i = c_i = (T_i − B_i)/2
    the one beside           b_1        b_2                   b_i = B_i

While training and flights run they share the processor, by the crowding κ: with ρ the sum of z/T, the shares that are
work of the processor, of what flies at that time,

    the flights run at the rate     s = min(1, (1 − κ/2)/ρ)       their full rate, up to half of one core
    training runs at the rate       1 − κ ρ s

Without crowding (κ = 0) and on one lane flight i lands at c_i = max(r_i, c_{i−1}) + T_i, and the step ends at
max(W, c_last). Many equal flights on two lanes take the longer of Σ (T − B) and Σ B, and the rest of one flight.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .model import Cost

Flights = Sequence[tuple[float, Cost]]
"""Of each flight r, the seconds of training before its launch, in rising order, and its cost."""


@dataclass(eq=False)
class Job:
    """A flight, or a phase of it: what is left of its seconds; ρ; r; the phase before it; and whether it is over."""

    left: float
    rho: float
    r: float = 0.0
    before: "Job | None" = None
    over: bool = False


def overlapped(W: float, flights: Flights, kappa: float = 0.0) -> float:
    """Return the seconds until W seconds of training and all flights are over; see this module."""
    t, x = 0.0, 0.0  # the time, and the seconds of W that are done
    lanes = lanes_of(flights, W)
    while heads := [lane[0] for lane in lanes if lane]:
        flying = [job for job in heads if job.r <= x and (job.before is None or job.before.over)]
        rho = sum(job.rho for job in flying)
        s = min(1.0, (1 - kappa / 2) / rho) if rho and x < W else 1.0
        pace = 1 - kappa * rho * s
        until = min([W, *(job.r for job in heads if job.r > x)])
        training = [(until - x) / pace] if x < W else []
        seconds = min([*(job.left / s for job in flying), *training])
        x = until if training == [seconds] else min(W, x + seconds * pace)
        for job in flying:
            job.left = 0.0 if job.left / s <= seconds else job.left - seconds * s
        t += seconds
        for lane in lanes:
            if lane and lane[0] in flying and not lane[0].left:
                lane.popleft().over = True
    return t + max(0.0, W - x)


def lanes_of(flights: Flights, W: float) -> tuple[deque[Job], deque[Job]]:
    """Return the work of two lanes in order."""
    lane, beside = deque[Job](), deque[Job]()
    last: Job | None = None  # phase of the flight before, which is not due yet
    for r, flight in flights:
        between = Job(flight.beside, share(flight.beside_busy, flight.beside))
        rest = flight.seconds - flight.beside
        rho = share(flight.busy - flight.beside_busy, rest)
        if not flight.beside and last is not None:
            lane.append(last)
            last = None
        lane.append(first := Job(rest / 2 if flight.beside else rest, rho, min(r, W)))
        if flight.beside:
            between.before = first
            beside.append(between)
            if last is not None:
                lane.append(last)
            last = Job(rest / 2, rho, 0.0, between)
    if last is not None:
        lane.append(last)
    return lane, beside


def share(busy: float, seconds: float) -> float:
    """Return ρ."""
    return busy / seconds if seconds else 0.0

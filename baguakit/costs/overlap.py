"""The overlap of flights and computation, and the exposed communication.

Training computes for W seconds. Flight i, in order on one lane, is launched when r_i of them are done; it takes T_i
seconds, z_i of them work of the machine's processor. While both run they share the processor, by the crowding κ: with
ρ = z/T the share of a flight that is work of the processor,

    the flight runs at the rate     s = min(1, (1 − κ/2)/ρ)       its full rate, up to half of one core
    training runs at the rate       1 − κ ρ s

Without crowding (κ = 0) flight i lands at c_i = max(r_i, c_{i−1}) + T_i, and the step ends at max(W, c_last).
"""

from collections.abc import Sequence

from .model import Cost

Flights = Sequence[tuple[float, Cost]]
"""Of each flight r, the seconds of training before its launch, in rising order, and its cost."""


def overlapped(W: float, flights: Flights, kappa: float = 0.0) -> float:
    """Return the seconds until W seconds of training and all flights are over; see this module."""
    t, x = 0.0, 0.0  # the time, and the seconds of W that are done
    for r, flight in flights:
        if x < (r := min(r, W)):  # the lane is idle
            t, x = t + (r - x), r
        rho = flight.busy / flight.seconds if flight.seconds else 0.0
        s = min(1.0, (1 - kappa / 2) / rho) if rho else 1.0
        pace = 1 - kappa * rho * s
        both = min(flight.seconds / s, (W - x) / pace)  # while training runs, too
        x = min(W, x + both * pace)
        t += both + (flight.seconds - both * s)
    return t + max(0.0, W - x)

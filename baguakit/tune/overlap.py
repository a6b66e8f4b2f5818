"""The flights that overlap computation, and the part of them that training waits for.

The machine works on W seconds of its own. Flight i, on one lane with the others and in their order, may set out when
r_i of them are done; it takes T_i seconds, z_i of them the machine's own work. While both go on, the processor is
shared by the crowding κ: with ρ = z/T the share of a flight for which it computes,

    the flight goes on at     s = min(1, (1 − κ/2)/ρ)         it gets what it asks for, up to half of one core
    training goes on at       1 − κ ρ s

so with room for both (κ = 0) flight i lands at c_i = max(r_i, c_{i−1}) + T_i and all is over at max(W, c_last).
"""

from collections.abc import Sequence

from .costs import Cost

Flights = Sequence[tuple[float, Cost]]
"""Of each flight r, the seconds of training before it can set out, none less than the one before, and its cost."""


def overlapped(W: float, flights: Flights, kappa: float = 0.0) -> float:
    """Seconds until W seconds of training and all flights are over; see this module."""
    t, x = 0.0, 0.0  # what the clock says, and how much of W is done
    for r, flight in flights:
        if x < (r := min(r, W)):  # the lane rests
            t, x = t + (r - x), r
        rho = flight.busy / flight.seconds if flight.seconds else 0.0
        s = min(1.0, (1 - kappa / 2) / rho) if rho else 1.0
        pace = 1 - kappa * rho * s
        both = min(flight.seconds / s, (W - x) / pace)  # while training goes on too
        x = min(W, x + both * pace)
        t += both + (flight.seconds - both * s)
    return t + max(0.0, W - x)

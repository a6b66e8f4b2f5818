"""Rates in words, as `tc` spells them."""

import re

_UNITS = {"bit": 1, "kbit": 1_000, "mbit": 1_000_000, "gbit": 1_000_000_000}


def bits_per_second(rate: str) -> int:
    """Return the number in "500mbit", in bits per second.

    Raises:
        ValueError: the text is not a rate, or the rate is below 8kbit.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(k|m|g)?bit", rate.strip().lower()) if isinstance(rate, str) else None
    bits = round(float(found[1]) * _UNITS[f"{found[2] or ''}bit"]) if found else 0
    if bits < 8_000:
        raise ValueError(f'a rate is 8kbit or more, such as "500mbit" or "1gbit"; not {rate!r}')
    return bits


def bytes_per_second(rate: str) -> float:
    """Return the number in "500mbit", in bytes per second."""
    return bits_per_second(rate) / 8


def written(bits: float) -> str:
    """Return a rate for people: "100 Mb/s"."""
    for unit, size in (("Gb/s", 1e9), ("Mb/s", 1e6)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits / 1e3:.3g} kb/s"

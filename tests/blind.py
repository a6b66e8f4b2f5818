"""The machinery of flights without a GPU: a lane that goes through its work at once, and a monitor of nobody."""

from types import GeneratorType
from typing import Any

import torch

from baguakit.lanes import Flight, Lane, whole


class Done(Flight):
    """A flight that is over."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self.value


class Inline(Lane):
    """A lane to the host as a stream is: it goes through the work at once. Keeps a list of what else it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def run(self, work: Any, name: str = "", in_phases: bool = False) -> Done:
        self.told.append(("run", name))
        with torch.no_grad():
            value = work()
            return Done(whole(value) if isinstance(value, GeneratorType) else value)

    def follow(self, streams: Any) -> None:
        self.told.append(("follow", list(streams)))

    def uses(self, value: Any) -> None:
        self.told.append(("uses", value))


class Silent:
    """A monitor of nobody."""

    error = fault = None

    def check(self) -> None:
        pass

    def launched(self, number: int, what: Any) -> None:
        pass

    def wait_for(self, what: Any) -> Any:
        return what.flight.result()

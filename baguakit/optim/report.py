"""The report of a fused optimizer."""

from dataclasses import dataclass

from torch.optim import Optimizer

from ..arguments import check_fields, checked
from .fusion import fusion_of


@dataclass(frozen=True)
class Report:
    """The report of the latest step of a fused optimizer. Print it.

    Attributes:
        flats: flat tensors.
        together: parameters stepped in them.
        apart: parameters stepped as always: large ones, and those that go with no other.
        absent: parameters without a gradient.
        copied: flat tensors whose gradients had to be copied, because they did not lie one after another.
        layouts: the number of times that parameters have been laid out anew.
    """

    flats: int
    together: int
    apart: int
    absent: int
    copied: int
    layouts: int

    def __post_init__(self) -> None:
        check_fields(self)

    def __str__(self) -> str:
        return (
            f"{self.together} parameters in {self.flats} flat tensors ({self.copied} with copied gradients), "
            f"{self.apart} apart, {self.absent} without a gradient; laid out {self.layouts} times"
        )


@checked
def report(optimizer: Optimizer) -> Report:
    """Return the report of the latest step of a fused optimizer.

    Raises:
        ValueError: it is not fused.
    """
    fusion = fusion_of(optimizer)
    if fusion is None:
        raise ValueError(f"this {type(optimizer).__name__} is not fused; baguakit.optim.fuse(optimizer) does that")
    segments = [(flat, each) for layout in fusion.layouts for flat in layout.flats for each in flat.segments]
    together = sum(len(flat.members.params[each.at]) for flat, each in segments)
    present = [wanted for layout in fusion.layouts for wanted in layout.present]
    return Report(
        flats=len(segments),
        together=together,
        apart=sum(present) - together,
        absent=len(present) - sum(present),
        copied=fusion.copied,
        layouts=fusion.laid_out,
    )

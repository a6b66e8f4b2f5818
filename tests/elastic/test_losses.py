"""A rank is lost: the others go on from the end of a whole step, and that is the step of a smaller group."""

import pytest
import torch
from crew import Process, centre, crew, gather, step

SLOW = [pytest.param(moment, marks=pytest.mark.slow) for moment in ("now", "backward", "optimizer", "stepped")]


def weights_after(present: dict[int, list[int]], processes: list[Process], lr: float = 0.25) -> torch.Tensor:
    """The weights after steps in which these processes took part:  x ← x − γ mean_r (x − c_r)."""
    names = {each.process.pid: each.name for each in processes}
    x = torch.zeros_like(flat(centre("", 0)))
    for s in range(len(present)):
        x = x - lr * torch.stack([x - flat(centre(names[pid], s)) for pid in present[s]]).mean(0)
    return x


def flat(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("moment", ["flight", *SLOW])
def test_survivors_go_on_as_a_smaller_group(moment):
    """Wherever in its step a rank dies: every step is made whole, by those that were there, and by all of them."""
    with crew("gradient_allreduce()", least=1) as ranks:
        both = ranks.start("a", "b")
        gather(both)
        both[1].tell("die", moment)
        both[1].tell("step", 1)
        (found,) = step(both[:1], 4)
        assert found["ranks"] == 1
        assert torch.equal(found["weights"], weights_after(found["present"], both))
        assert found["passes"] == found["step"]  # that of the lost step was taken back

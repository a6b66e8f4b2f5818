"""docs/trainers/accelerate.md: its program runs on two ranks as DDP does, and with other algorithms."""

import pytest
from programs import instead, needs, program_of, theorems

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PLAIN_SGD = ("torch.optim.AdamW(model.parameters(), lr=1e-3)", "torch.optim.SGD(model.parameters(), lr=0.1)")


def test_the_page_holds(tmp_path):
    needs("accelerate")
    program = program_of("accelerate")
    weights = {
        "every step": instead(program, "bk.algorithms.local_sgd(1)"),
        "diloco": instead(program, "bk.algorithms.diloco(every=2)").replace("accelerator.print(", "att.merge()\n    ("),
    }
    found = theorems(tmp_path, program, "", programs=weights)
    # 70 samples on two ranks in batches of 4 are 9 micro-batches, and the last is not left behind.
    assert {each["steps"] for runs in found.values() for each in runs if "steps" in each} == {5}
    assert found["diloco"][0]["weights"] == found["diloco"][1]["weights"] != found["bytegrad"][0]["weights"]
    assert [flights for _, flights, _, _ in found["diloco"][0]["rows"]] == [2]


def test_a_mean_of_weights_after_each_plain_step_is_ddp(tmp_path):
    """Without clipping, averaging weights after a step of SGD is a step with averaged gradients: none is misread.

    And in bf16 the exact mean is DDP's.
    """
    needs("accelerate")
    import torch
    from programs import FOUND, on_two_ranks, without

    program = program_of("accelerate").replace(*PLAIN_SGD).replace("parameters(), 1.0)", "parameters(), 1e9)")
    programs = {"ddp": without(program) + FOUND, "mean": instead(program, "bk.algorithms.local_sgd(1)") + FOUND}
    half = program.replace("steps=2)", 'steps=2, mixed_precision="bf16")')
    programs |= {"half": without(half) + FOUND, "exact": instead(half, "bk.algorithms.gradient_allreduce()") + FOUND}
    found = on_two_ranks(tmp_path, programs)
    for one, other in (("mean", "ddp"), ("exact", "half")):
        for key in ("losses", "weights"):
            torch.testing.assert_close(torch.tensor(found[one][0][key]), torch.tensor(found[other][0][key]))
    assert found["half"][0]["losses"] != found["ddp"][0]["losses"]

"""docs/trainers/lightning.md: its programs run on two ranks as in Lightning's DDP, and with other algorithms."""

import pytest
from programs import FOUND, REPORTED, in_8_bits, instead, needs, on_two_ranks, program_of, theorems, without

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
# Lightning ends an attachment with the fit: this callback keeps it.
KEEP = """
import lightning
class Keep(lightning.Callback):
    def on_train_end(self, trainer, module):
        global kept
        kept = getattr(trainer.strategy, "attachment", None)
"""
QUIET = "callbacks=[Keep()], enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, "
LOSSES = "\nlosses = model.losses"


def kept(program: str) -> str:
    return KEEP + program.replace("lightning.Trainer(", f"lightning.Trainer({QUIET}")


def test_the_page_holds(tmp_path):
    needs("lightning")
    program = kept(program_of("lightning"))
    local = instead(program, "bk.algorithms.local_sgd(every=1)")
    found = theorems(tmp_path, program, LOSSES, "\natt = kept", programs={"every step": local})
    # 96 samples on two ranks in batches of 8, two batches in a step, two epochs.
    assert {each["steps"] for runs in found.values() for each in runs if "steps" in each} == {6}
    assert found["every step"][0]["weights"] == found["every step"][1]["weights"]


def test_a_gan_of_two_optimizers_holds(tmp_path):
    """Lightning's DDP needs to be told that parameters go unused; otherwise it is the same program."""
    needs("lightning")
    program = kept(program_of("lightning", 1))
    ours = "\natt = kept" + LOSSES + FOUND + REPORTED
    unused = without(program).replace(
        "trainer = lightning.Trainer(", 'trainer = lightning.Trainer(strategy="ddp_find_unused_parameters_true", '
    )
    programs = {
        "ddp": unused + LOSSES + FOUND,
        "exact": instead(program, "bk.algorithms.gradient_allreduce()") + ours,
        "bytegrad": program + ours,
    }
    found = on_two_ranks(tmp_path, programs)
    for key in ("losses", "weights"):
        ddp, exact = (found[name][0][key] for name in ("ddp", "exact"))
        assert len(ddp) > 8 and exact == pytest.approx(ddp, rel=1e-4, abs=1e-6)
    # A bucket that holds both networks flies in the backward of each, as in DDP.
    sizes = {"exact": lambda n: 4 * n, "bytegrad": in_8_bits}
    for name, sent in sizes.items():
        one, other = found[name]
        ((values, flights, bytes_sent, _),) = one["rows"]
        assert one["rows"] == other["rows"] and flights == 2 * one["steps"] == 16
        assert bytes_sent == flights * (sent(values) + one["parameters"])

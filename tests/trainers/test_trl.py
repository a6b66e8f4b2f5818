"""docs/trainers/trl.md: its program, which trains by SFTTrainer, runs on two ranks as DDP does."""

import pytest
from programs import needs, program_of, theorems

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LOSSES = 'losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]\n'


def test_the_page_holds(tmp_path):
    needs("trl", "datasets", "transformers")
    found = theorems(tmp_path, program_of("trl"), LOSSES, "att = callback.attachment")
    assert {each["steps"] for name in ("exact", "bytegrad") for each in found[name]} == {4}

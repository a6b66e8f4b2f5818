"""docs/trainers/transformers.md: its program runs on two ranks as DDP does, resumes, and takes other algorithms."""

import pytest
from programs import FOUND, instead, needs, on_two_ranks, program_of, theorems, without

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LOSSES = 'losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]\n'
PLAIN_SGD = ("max_steps=6,", 'max_steps=6, optim="sgd", max_grad_norm=0, lr_scheduler_type="constant",')


def test_the_page_holds(tmp_path):
    needs("transformers", "accelerate")
    program = program_of("transformers")
    diloco = instead(program, "bk.algorithms.diloco(every=2)")
    found = theorems(tmp_path, program, LOSSES, "att = callback.attachment", {"diloco": diloco})
    assert {each["steps"] for runs in found.values() for each in runs if "steps" in each} == {6}
    assert found["diloco"][0]["weights"] == found["diloco"][1]["weights"]
    assert [flights for _, flights, _, _ in found["diloco"][0]["rows"]] == [3]


def test_a_mean_of_weights_after_each_plain_step_is_ddp(tmp_path):
    """Averaging weights after a step of SGD is a step with averaged gradients: no step is misread."""
    needs("transformers", "accelerate")
    import torch

    program = program_of("transformers").replace(*PLAIN_SGD)
    mean = instead(program, "bk.algorithms.local_sgd(1)")
    found = on_two_ranks(tmp_path, {"ddp": without(program) + LOSSES + FOUND, "mean": mean + LOSSES + FOUND})
    for key in ("losses", "weights"):
        torch.testing.assert_close(torch.tensor(found["mean"][0][key]), torch.tensor(found["ddp"][0][key]))


@pytest.mark.parametrize("algorithm", ["bytegrad(error_feedback=True)", "diloco(every=2)"])
def test_a_resumed_training_continues_bit_for_bit(tmp_path, algorithm):
    needs("transformers", "accelerate")
    program = instead(program_of("transformers"), f"bk.algorithms.{algorithm}")
    resumed = program.replace("trainer.train()", 'trainer.train(resume_from_checkpoint="out/checkpoint-3")')
    assert resumed != program
    found = on_two_ranks(tmp_path, {"whole": program + LOSSES + FOUND, "resumed": resumed + LOSSES + FOUND})
    for whole, again in zip(found["whole"], found["resumed"], strict=True):
        assert whole["weights"] == again["weights"]


def test_what_cannot_be_attached_is_said(tmp_path):
    needs("transformers", "accelerate")
    program = program_of("transformers")
    alone = """
from transformers import TrainerState, TrainingArguments
import baguakit as bk
callback = bk.interop.transformers.BaguaCallback(bk.algorithms.bytegrad())
try:
    callback.on_train_begin(TrainingArguments("out"), TrainerState(), None, model=torch.nn.Linear(2, 2), optimizer=None)
except RuntimeError as error:
    found = str(error)
"""
    found = on_two_ranks(tmp_path, {"page": program + "found = None\n", "alone": "import torch\n" + alone})
    sentence = "start with torchrun, on CPUs with ACCELERATE_USE_CPU=true, without FSDP and DeepSpeed"
    assert all(sentence in said for said in found["alone"])

"""docs/trainers/sentence_transformers.md: its program runs on two ranks as DDP does."""

import pytest
from programs import needs, on_two_ranks, program_of, theorems

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LOSSES = 'losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]\n'


SOFTMAX = (
    ("import MultipleNegativesRankingLoss", "import SoftmaxLoss"),
    ("loss=MultipleNegativesRankingLoss(model)", "loss=loss"),
    ('"positive": answers', '"positive": answers, "label": [i % 2 for i in range(70)]'),
    ("callback =", "loss = SoftmaxLoss(model, 32, 2)\ncallback ="),
)
HEAD = ("callback =", "model[0].head = loss.classifier\ncallback =")


def test_the_page_holds(tmp_path):
    needs("sentence_transformers", "datasets", "transformers")
    program = program_of("sentence_transformers")
    softmax = program
    for old, new in SOFTMAX:
        assert old in softmax
        softmax = softmax.replace(old, new)
    programs = {"head": softmax.replace(*HEAD)}
    found = theorems(tmp_path, program, LOSSES, "att = callback.attachment", programs)
    assert {each["steps"] for name in ("exact", "bytegrad", "head") for each in found[name]} == {4}
    # A loss with parameters of its own: in the model all ranks have the same, outside they are refused.
    assert found["head"][0]["weights"] == found["head"][1]["weights"]
    assert found["head"][0]["parameters"] == found["bytegrad"][0]["parameters"] + 2
    train, said = "trainer.train()\n", "    found = str(error)\n"
    refused = softmax.replace(train, f"try:\n    {train}except ValueError as error:\n{said}")
    outside = on_two_ranks(tmp_path, {"outside": refused})["outside"]
    assert all("AdamW steps a tensor (2, 96) in group 0 that is no parameter of the model" in each for each in outside)

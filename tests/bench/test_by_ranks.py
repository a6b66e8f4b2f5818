"""Losses by the number of ranks: one process that computes for all of them trains as they would, each for itself."""

from dataclasses import replace

import pytest
import torch
from commands import ROOT
from pool import ranks

import baguakit as bk
from baguakit.compare import language
from baguakit.compare.names import algorithm
from baguakit.compare.training import Training, optimizers_of, validated
from bench.frontier import by_ranks

SMALL = by_ranks.Trial("diloco(every=3, lr=0.8, momentum=0.5)", 2, 1e-2, 7, layers=1, width=16, heads=2)


def trained(trial):
    """Train on this rank as a user does; return the loss of the mean of all weights."""
    comm, windows = bk.Comm(), language.text(language.CONTEXT)[0]
    training = Training(*language.gpt(trial.seed, comm.rank, comm.size, trial.layers, trial.width, trial.heads))
    model, (optimizer,) = training.model, optimizers_of(training.model, "adamw", trial.lr)
    made = bk.algorithms.gradient_allreduce() if trial.expression == "DDP" else algorithm(trial.expression)
    with bk.attach(model, optimizer, made):
        for step in range(1, trial.steps + 1):
            optimizer.param_groups[0]["lr"] = trial.lr * step / by_ranks.WARM_UP
            optimizer.zero_grad()
            drawn = language.drawn(windows, language.BATCH, trial.seed, step, comm.rank)
            language.loss_of(model, drawn).backward()
            optimizer.step()
    return next(iter(validated(training, comm).values()))


@pytest.mark.parametrize("expression", ["DDP", SMALL.expression])
def test_one_process_computes_what_ranks_compute(expression, tmp_path):
    trial = replace(SMALL, expression=expression)
    played = ranks(by_ranks.size_of(trial), by_ranks.play, trial, str(tmp_path / "weights"))[0]
    assert played["losses"][-1][0] == 7
    assert played["losses"][-1][1] == pytest.approx(ranks(2, trained, trial)[0], rel=1e-4)  # Adam magnifies rounding


def test_muon_of_stacks_is_that_of_torch():
    stack = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))
    single = [each.clone().requires_grad_() for each in stack]
    ours, theirs = (
        by_ranks.Muons([stack.requires_grad_()]),
        torch.optim.Muon(single, 0.1, adjust_lr_fn="match_rms_adamw"),
    )
    ours.param_groups[0]["lr"] = 0.1
    for seed in range(3):
        stack.grad = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(seed))
        for each, grad in zip(single, stack.grad, strict=True):
            each.grad = grad.clone()
        ours.step()
        theirs.step()
    assert torch.equal(stack, torch.stack(single))


def test_the_page_has_the_table():
    assert "\n".join(by_ranks.table()) in (ROOT / "docs" / "algorithms.md").read_text()

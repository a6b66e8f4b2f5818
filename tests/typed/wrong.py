"""Calls that mypy and pyright refuse, one a line: `test_typed.py` counts them."""

import torch

import baguakit as bk

bk.algorithms.diloco(evry=8)
bk.algorithms.diloco(8, lr="0.7")
bk.algorithms.diloco(8, inner=torch.optim.SGD)
bk.algorithms.bytegrad(bits=4)
bk.algorithms.local_sgd(every="8")
bk.atach(torch.nn.Linear(1, 1), None)
bk.after_step(bk.algorithms.bytegrad())
bk.hierarchical(bk.stages.Mean())

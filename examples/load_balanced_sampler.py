"""Texts of unequal length on several ranks: a token budget per batch, equal work at every step.

Run it:

    torchrun --standalone --nproc_per_node=2 examples/load_balanced_sampler.py
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import baguakit as bk

if "RANK" not in os.environ:
    sys.exit("start it with torchrun --standalone --nproc_per_node=2 examples/load_balanced_sampler.py")
dist.init_process_group("gloo")
torch.manual_seed(0)
lengths = torch.empty(2000).log_normal_(5, 1).long() + 1
texts = [torch.full((int(n),), i) for i, n in enumerate(lengths)]

sampler = bk.data.LoadBalancedBatchSampler(texts, lengths, budget=16384)
loader = DataLoader(texts, batch_sampler=sampler, collate_fn=lambda batch: pad_sequence(batch, batch_first=True))
work = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    for step, batch in enumerate(loader):
        work.append(int(lengths[batch[:, 0]].sum()))  # train here
        if epoch == 1 and step == 3:
            state = sampler.state_dict(consumed=step + 1)  # save this with the model

resumed = bk.data.LoadBalancedBatchSampler(texts, lengths, budget=16384)
resumed.load_state_dict(state)
assert list(resumed) == list(sampler)[4:]

tokens = torch.tensor(bk.Comm().gather_objects(work), dtype=torch.float)  # (ranks, steps)
if dist.get_rank() == 0:
    waiting = tokens.amax(0).sum() / tokens.mean(0).sum()
    print(f"{len(work)} steps, {tokens.max():.0f} tokens at most; longest / mean work of a step: {waiting:.4f}")
dist.barrier()  # nobody leaves while another still needs it
dist.destroy_process_group()

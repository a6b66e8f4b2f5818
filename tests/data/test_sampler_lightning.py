"""Lightning leaves the samplers in place and tells them the epoch."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from baguakit.data import LoadBalancedBatchSampler, LoadBalancedSampler

lightning = pytest.importorskip("lightning")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["samples", "batches"])
def test_a_trainer_takes_what_the_sampler_gives(kind):
    data, costs = TensorDataset(torch.arange(20.0).reshape(-1, 1)), torch.arange(20) + 1.0
    options = {"num_replicas": 2, "rank": 1}
    if kind == "samples":
        sampler = LoadBalancedSampler(data, costs, **options)
        loader = DataLoader(data, batch_size=2, sampler=sampler)
    else:
        sampler = LoadBalancedBatchSampler(data, costs, batch_size=2, **options)
        loader = DataLoader(data, batch_sampler=sampler)

    class Model(lightning.LightningModule):
        seen: list = []  # noqa: RUF012

        def __init__(self):
            super().__init__()
            self.line = torch.nn.Linear(1, 1)

        def training_step(self, batch, _):
            self.seen.append((sampler.epoch, batch[0].flatten().int().tolist()))
            return self.line(batch[0]).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
    distributed = {"use_distributed_sampler": kind == "samples"}
    model = Model()
    model.seen = []
    lightning.Trainer(max_epochs=2, accelerator="cpu", devices=1, **quiet, **distributed).fit(model, loader)
    expected = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        items = [item for step in sampler for item in (step if isinstance(step, list) else [step])]
        expected += [(epoch, items[i : i + 2]) for i in range(0, len(items), 2)]
    assert model.seen == expected

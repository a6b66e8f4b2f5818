"""Run the programs of docs/trainers/torchtitan.md on CPUs, with a small Llama: torchrun … titan.py FOLDER JSON GROUPS.

torchtitan chooses a GPU, and asks its device module for names and memory. Here it gets a module that answers for CPUs.
"""

import dataclasses
import json
import sys
import types
import warnings
from pathlib import Path

import torch
import torch._utils
import torch.distributed as dist


class Device(types.ModuleType):
    """A device module for CPUs, with what torchtitan asks for."""

    set_device, synchronize = staticmethod(torch.cpu.set_device), staticmethod(torch.cpu.synchronize)
    get_device_name = staticmethod(lambda device: "CPU")
    get_device_properties = staticmethod(lambda device: types.SimpleNamespace(total_memory=1 << 30))
    memory_stats = staticmethod(lambda device: {})
    current_device = staticmethod(lambda: 0)
    reset_peak_memory_stats = empty_cache = staticmethod(lambda: None)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda kind: Device("cpu")

import torchtitan.train  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec  # noqa: E402
from torchtitan.protocols.train_spec import register_train_spec  # noqa: E402

ARGS = TransformerModelArgs(dim=64, n_layers=2, n_heads=4, vocab_size=64)
ROWS, LENGTH, STEPS = 4, 16, 5


def batches(rank):
    draw = torch.Generator().manual_seed(rank)
    while True:
        tokens = torch.randint(64, (ROWS, LENGTH + 1), generator=draw)
        yield {"input": tokens[:, :-1]}, tokens[:, 1:]


class Data(BaseDataLoader):
    def __init__(self, dp_rank, **rest):
        self.rank = dp_rank

    def __iter__(self):
        return batches(self.rank)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def job(folder, groups):
    config = JobConfig()
    config.job.dump_folder = folder
    config.model.name, config.model.flavor = "small", "llama"
    config.training.local_batch_size, config.training.seq_len, config.training.steps = ROWS, LENGTH, STEPS
    config.training.mixed_precision_param = "float32"
    config.parallelism.data_parallel_replicate_degree = groups
    config.optimizer.implementation, config.optimizer.lr = "for-loop", 1e-2
    config.lr_scheduler.warmup_steps = 2
    config.activation_checkpoint.mode = "none"
    config.metrics.log_freq = 1
    config.comm.trace_buf_size = 0
    config.debug.seed = 0
    return config


def whole(model):
    """All weights of a model, whole."""
    return torch.cat([p.detach().full_tensor().flatten() for p in model.parameters()])


class Watched(torchtitan.train.Trainer):
    """A trainer that keeps its first and last weights, and what it logs."""

    def __init__(self, config):
        super().__init__(config)
        found.update(losses=[], rates=[], first=whole(self.model_parts[0]).tolist())
        for module in self.model_parts[0].modules():
            if program.plain and hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)

    def close(self):
        found["last"] = whole(self.model_parts[0]).tolist()
        super().close()


def log(self, step, loss, most, norm, extra_metrics):
    found["losses"].append(loss)
    found["rates"].append(extra_metrics["lr"])


def show(report):
    found["rows"] = [(r.values, r.flights, r.bytes_sent, r.flew) for r in report.rows]


if __name__ == "__main__":
    folder, page, groups = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    register_train_spec(
        "small",
        dataclasses.replace(
            get_train_spec(), model_args={"llama": ARGS}, build_dataloader_fn=Data, build_tokenizer_fn=None
        ),
    )
    torchtitan.train.Trainer, MetricsProcessor.log = Watched, log
    torchtitan.train.dist_utils.set_pg_timeouts = lambda **options: None  # its barrier names a GPU
    dist.init_process_group("gloo")
    every = {}
    for name, code in json.loads(page.read_text()).items():
        found = every[name] = {}
        program = types.SimpleNamespace(plain="bk" not in code or groups > 1)
        names = {"__name__": "page", "print": show}
        exec(compile(code, name, "exec"), names)
        names["main"](job(folder, groups))
    Path(f"{page}.{dist.get_rank()}").write_text(json.dumps(every))
    dist.barrier()
    dist.destroy_process_group()

"""Where a run computes: device, threads, precision, and the processes that torchrun started; progress for people."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from lipmdeq.runconfig import ParameterError, RunConfig


@dataclass
class World:
    """One process of a run. ``rank`` 0 writes; ``size`` > 1 when torchrun set WORLD_SIZE."""

    cfg: RunConfig
    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    started: bool = False

    @classmethod
    def open(cls, cfg: RunConfig) -> World:
        """Choose the device, set threads and precision, join the other processes."""
        wanted = "cuda" if cfg.device == "auto" and torch.cuda.is_available() else cfg.device
        size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        device = torch.device("cpu" if wanted == "auto" else wanted)
        if device.type == "cuda":
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if device.index is None:
                device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            if device.index >= count:
                raise ParameterError(
                    f"device = {cfg.device!r}: must be auto or cpu on a machine with {count} GPUs"
                )
            torch.cuda.set_device(device)
        elif cfg.precision == "tf32":
            raise ParameterError("precision = 'tf32': must be float32 or bfloat16 on a CPU")
        if cfg.batch % size:
            raise ParameterError(
                f"batch = {cfg.batch}: must be a multiple of the number of processes, {size}"
            )
        torch.set_num_threads(cfg.threads)
        torch.set_float32_matmul_precision("high" if cfg.precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = cfg.precision == "tf32"
        world = cls(cfg, rank, size, device)
        if size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
            world.started = True
        return world

    def close(self) -> None:
        if self.started:
            dist.destroy_process_group()

    @property
    def writes(self) -> bool:
        return self.rank == 0

    def wrap(self, batch: nn.Module) -> nn.Module:
        """The module whose backward pass averages gradients over the processes.

        Batch statistics are those of all processes on GPUs (SyncBatchNorm) and of each process on CPUs, where torch has
        no synchronised BatchNorm; the running statistics are those of process 0.
        """
        if self.size == 1:
            return batch
        ids = [self.device.index] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(batch, device_ids=ids)

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model on its device; compiled if asked for."""
        if self.size > 1 and self.device.type == "cuda":
            for part in ("stem", "head"):
                setattr(model, part, nn.SyncBatchNorm.convert_sync_batchnorm(getattr(model, part)))
        model = model.to(self.device)
        if self.cfg.compile:
            # The adjoint solve runs backward through one graph many times.
            import torch._functorch.config as functorch

            functorch.donated_buffer = False
            model.f.compile()
        return model

    def autocast(self) -> AbstractContextManager:
        if self.cfg.precision != "bfloat16":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def synchronise(self) -> None:
        """Wait for the GPU, so that a clock shows the work and not the queue."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def total(self, values: list[float], largest: bool = False) -> list[float]:
        """Sums (or maxima) over all processes."""
        if self.size == 1:
            return values
        t = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(t, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        return t.tolist()

    def share_buffers(self, model: nn.Module) -> None:
        """Running statistics of process 0 for all, as before a forward pass in training."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


def progress_bar(total: int, start: int, text: str) -> tqdm:
    """A bar on a terminal or in a Jupyter session; nothing in logs, tests and executed notebooks."""
    watched = sys.stderr.isatty() or "JPY_SESSION_NAME" in os.environ
    return tqdm(total=total, initial=start, desc=text, unit="step", leave=False, disable=not watched)

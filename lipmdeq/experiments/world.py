"""Where and with what a run computes: device, threads, precision, the processes that torchrun started, code and machine."""

from __future__ import annotations

import ipaddress
import os
import platform
import shutil
import socket
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from lipmdeq.bounds.operations import check_whole
from lipmdeq.experiments.parameters import ParameterError, RunConfig, RunError

MEET = timedelta(minutes=5)  # as long as processes wait for each other at the start


def _number(name: str, default: int | None, low: int, high: int) -> int:
    """A whole number of the environment that launchers set."""
    text = os.environ.get(name, "" if default is None else str(default))
    try:
        return check_whole(name, int(text), low, high)
    except ValueError:
        raise ParameterError(f"{name} = {text!r}: must be a whole number from {low} to {high}") from None


def _join(backend: str, rank: int, size: int) -> None:
    """Meet the other processes, on the loopback interface only unless MASTER_ADDR names another one.

    Anybody who can reach the port can read and change what the processes tell each other. Left alone, torch listens on
    all interfaces; what torchrun itself opens before is torchrun's.
    """
    address = os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    port = _number("MASTER_PORT", 29500, 1, 65535)
    os.environ["MASTER_PORT"] = str(port)
    try:
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        inside = ipaddress.ip_address(place[0]).is_loopback
        if inside or os.environ.get("LOCAL_WORLD_SIZE") == str(size):  # all on this machine
            loopback = next((n for _, n in socket.if_nameindex() if n in ("lo", "lo0")), None)
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if loopback else ():
                os.environ.setdefault(name, loopback)
        if not inside or "TORCHELASTIC_RUN_ID" in os.environ:
            dist.init_process_group(backend)
            return
        listen = -1
        if rank == 0:
            listen = socket.create_server(place[:2], family=family).detach()  # the store closes it
    except OSError as e:
        raise RunError(f"MASTER_ADDR = {address!r}, MASTER_PORT = {port}: cannot be used ({e.strerror or e})") from None
    own = {"master_listen_fd": listen} if rank == 0 else {}
    store = dist.TCPStore(place[0], port, size, is_master=rank == 0, timeout=MEET, **own)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


@dataclass
class World:
    """One process of a run. ``rank`` 0 writes; ``size`` > 1 when torchrun set WORLD_SIZE."""

    cfg: RunConfig
    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    started: bool = False
    stream: torch.cuda.Stream | None = None  # of a run on a GPU: on the default one nothing becomes a CUDA graph

    @classmethod
    def open(cls, cfg: RunConfig) -> World:
        """Choose the device, set threads and precision, join the other processes."""
        wanted = "cuda" if cfg.device == "auto" and torch.cuda.is_available() else cfg.device
        size = _number("WORLD_SIZE", 1, 1, 2**20)
        rank = _number("RANK", None, 0, size - 1) if size > 1 else 0
        device, stream = torch.device("cpu" if wanted == "auto" else wanted), None
        if device.type == "cuda":
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if device.index is None:
                device = torch.device("cuda", _number("LOCAL_RANK", 0, 0, 1023))
            if device.index >= count:
                raise ParameterError(f"device = {cfg.device!r}: must be auto or cpu on a machine with {count} GPUs")
            torch.cuda.set_device(device)
            stream = torch.cuda.Stream(device)
        elif cfg.precision == "tf32":
            raise ParameterError("precision = 'tf32': must be float32 or bfloat16 on a CPU")
        if cfg.compile and device.type == "cpu" and not has_cpp_compiler():
            raise ParameterError(
                "compile = True: must be False on a CPU without a C++ compiler (g++, or what CXX names)"
            )
        if cfg.batch % size:
            raise ParameterError(f"batch = {cfg.batch}: must be a multiple of the number of processes, {size}")
        most = 4 * (os.cpu_count() or 1)  # more stand in each other's way, and far more stop the machine
        if cfg.threads > most:
            raise ParameterError(f"threads = {cfg.threads}: must be at most {most}, four times the number of cores")
        torch.set_num_threads(cfg.threads)
        torch.set_float32_matmul_precision("highest")  # of solvers and norms; TF32 is for convolutions
        torch.backends.cudnn.allow_tf32 = cfg.precision == "tf32"
        world = cls(cfg, rank, size, device, stream=stream)
        if size > 1 and not dist.is_initialized():
            _join("nccl" if device.type == "cuda" else "gloo", rank, size)
            world.started = True
        return world

    def close(self) -> None:
        if self.started:
            dist.destroy_process_group()

    def lost(self, error: RuntimeError) -> bool:
        """Whether an error is that another process is gone: gloo and NCCL say so in their own words."""
        words = ("gloo", "NCCL", "Connection closed", "Connection reset", "timed out", "Broken pipe")
        return self.size > 1 and not isinstance(error, RunError) and any(word in str(error) for word in words)

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
            torch.compiler.reset()  # graphs of other runs in this process count against the limit of f
            model.f.compile(fullgraph=True)  # f is one graph, or an error: never a part of it in silence
        return model

    def autocast(self) -> AbstractContextManager:
        if self.cfg.precision != "bfloat16":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def synchronise(self) -> None:
        """Wait for the GPU, so that a clock shows the work and not the queue; only where LIPMDEQ_CLOCKS=exact asks for it.

        Without, the parts of a step are those of the host, and only their sum is meant: the loss is read at each step.
        """
        if self.device.type == "cuda" and os.environ.get("LIPMDEQ_CLOCKS") == "exact":
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


def has_cpp_compiler() -> bool:
    """Whether what torch.compile makes for a CPU can be built: torch calls g++ (clang++ on a Mac), or what CXX names."""
    usual = "clang++" if sys.platform == "darwin" else "g++"
    return shutil.which(os.environ.get("CXX") or usual) is not None


def progress_bar(total: int, start: int, text: str) -> tqdm:
    """A bar on a terminal or in a Jupyter session; nothing in logs, tests and executed notebooks."""
    watched = sys.stderr.isatty() or "JPY_SESSION_NAME" in os.environ
    return tqdm(total=total, initial=start, desc=text, unit="step", leave=False, disable=not watched)


# ------------------------------------------------------------------ for the record


def now() -> str:
    """UTC time to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def git_commit() -> str | None:
    """Commit of the package's source tree, with "+" when tracked files of the package were changed; None outside git."""
    here = Path(__file__).resolve().parents[1]  # the package

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    return commit and commit + ("+" if git("status", "--porcelain", "--", ".") else "")


def versions() -> dict:
    """Versions that may change the numbers."""
    found = {"python": platform.python_version()}
    for name in ("lipmdeq", "torch", "torchvision", "numpy", "scikit-learn"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def machine(device: torch.device) -> dict:
    """Processor, cores, memory, accelerator; no host name."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), cpu)
    except OSError:
        pass
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"cpu": cpu, "cores": os.cpu_count(), "gpu": gpu, "system": f"{platform.system()} {platform.machine()}"}


def peak_memory(device: torch.device) -> dict:
    """Largest memory of the process, and of the GPU, in MB."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    found = {"process_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20)}
    if device.type == "cuda":
        found["gpu_mb"] = round(torch.cuda.max_memory_allocated(device) / 2**20)
    return found

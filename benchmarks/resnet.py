"""What an explicit network of the same size reaches with the recipe of protocol cpu: a plain ResNet, no equilibrium.

    python -m benchmarks.resnet --config configs/cpu/recipe/potential-lr0.002.yaml   # choose its rate on validation images
    python -m benchmarks.resnet --config configs/cpu/beyond/potential-t0.9.yaml      # then test it, like a row of a table

Images, their order and augmentation, batches, epochs, warm-up, schedule and optimizer are those of the configuration; only the
model and, chosen in the same way, the peak rate are its own. The stem is that of the certified family. Writes
results/<protocol>/resnet/<split>-lr<rate>.json.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models.resnet import BasicBlock

from benchmarks.__main__ import ROOT
from lipmdeq.experiments import RunConfig, learning_rate, open_data
from lipmdeq.experiments.record import write_json
from lipmdeq.experiments.shell import Parser, guarded
from lipmdeq.experiments.world import git_commit, machine, now, progress_bar, versions

WIDTHS, DEPTH = (26, 52, 104), 2  # maps of 16x16, 8x8, 4x4, as the first three branches of f; blocks for each


def resnet(classes: int) -> nn.Module:
    """Two convolutions to 16 channels, the second with stride 2, then three stages of residual blocks: 0.46M weights."""
    layers, width = [], 3
    for stride in (1, 2):
        layers += [nn.Conv2d(width, 16, 3, stride, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
        width = 16
    for stage, wide in enumerate(WIDTHS):
        for k in range(DEPTH):
            stride = 2 if stage and not k else 1
            down = None
            if width != wide:
                down = nn.Sequential(nn.Conv2d(width, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))
            layers.append(BasicBlock(width, wide, stride, down))
            width = wide
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))
    return net.to(memory_format=torch.channels_last)


@torch.no_grad()
def accuracy(net: nn.Module, images, batch: int) -> float:
    net.eval()
    right = sum(int((net(x).argmax(1) == y).sum()) for x, y in images.batches(batch))
    return right / len(images)


def train(cfg: RunConfig) -> dict:
    """History and result of one training."""
    data = open_data(cfg, torch.device("cpu"))
    torch.manual_seed(cfg.seed)
    net = resnet(len(data.classes))
    adam = torch.optim.Adam(net.parameters(), lr=cfg.lr, fused=True)
    steps, start, history = data.train.steps(cfg.batch, drop_last=True), time.perf_counter(), []
    split = data.val if cfg.eval_split == "val" else data.test
    for epoch in range(cfg.epochs):
        net.train()
        batches = data.train.batches(cfg.batch, train=True, seed=cfg.seed, drop_last=True, epoch=epoch)
        with progress_bar(steps, 0, f"epoch {epoch + 1}/{cfg.epochs}") as bar:
            for step, (x, y) in enumerate(batches):
                for group in adam.param_groups:
                    group["lr"] = learning_rate(cfg, epoch * steps + step, cfg.epochs * steps)
                loss = F.cross_entropy(net(x.contiguous(memory_format=torch.channels_last)), y)
                adam.zero_grad(set_to_none=True)
                loss.backward()
                adam.step()
                bar.update()
        history.append({"epoch": epoch + 1, "loss": float(loss), "accuracy": accuracy(net, split, cfg.batch)})
        print(f"epoch {epoch + 1}: {cfg.eval_split} accuracy {history[-1]['accuracy']:.4f}", flush=True)
    weights = sum(p.numel() for p in net.parameters())
    return {"weights": weights, "history": history, "seconds": time.perf_counter() - start}


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="whose recipe is taken")
    parser.add_argument("--lr", type=float, help="peak rate (default: that of the configuration)")
    args = parser.parse_args()
    cfg = RunConfig.from_yaml(args.config)
    cfg = cfg if args.lr is None else cfg.changed(lr=args.lr)
    torch.set_num_threads(cfg.threads)
    result = train(cfg)
    protocol = args.config.resolve().parent.parent.name
    about = {"config": args.config.as_posix(), "lr": cfg.lr, "split": cfg.eval_split, "seed": cfg.seed}
    about |= {"command": f"python -m benchmarks.resnet --config {args.config.as_posix()} --lr {cfg.lr:g}"}
    about |= {"threads": cfg.threads, "commit": git_commit(), "versions": versions()}
    about |= {"machine": machine(torch.device("cpu")), "finished": now()}
    out = ROOT / "results" / protocol / "resnet" / f"{cfg.eval_split}-lr{cfg.lr:g}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, {**about, **result})


if __name__ == "__main__":
    sys.exit(guarded("benchmarks.resnet", main))

"""The hours of docs/paper.md: counted FLOPs of one step of equal weights, times steps, at a rate that is assumed.

.venv/bin/python tests/paper_hours.py    # writes the column anew
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from forkmerge.datasets import aliexpress, domainnet, nyuv2, semi
from forkmerge.models import ESMM, Classifier, MMoE, WideResNet
from paths import ROOT

PAGE = ROOT / "docs" / "paper.md"
RATE = 15.7e12 / 2
"""FLOP/s: half of what a V100 does in float32 at most."""

# Categories per field of AliExpress; embeddings are looked up, so they count for no FLOPs.
FIELDS = (8, 4, 7, 2, 19, 7, 50, 8, 8, 2, 2, 2, 2, 2, 2, 2)


def flops(make: Callable[[], nn.Module], forward: Callable[[nn.Module], Any]) -> int:
    """Count forward and backward of a network, without its numbers."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        outputs = forward(make())
        parts: list[Tensor] = list(outputs.values()) if isinstance(outputs, dict) else [outputs]
        torch.stack([part.sum() for part in parts]).sum().backward()
    return counter.get_total_flops()


def scenes(network: str, batch: int) -> int:
    return flops(partial(nyuv2.make_network, network), lambda net: net(torch.empty(batch, 3, 288, 384)))


def domains(network: str) -> int:
    images = domainnet.BATCH, 3, 224, 224
    return flops(partial(domainnet.make_network, network), lambda net: net(torch.empty(images), "real"))


def clicks(kind: type[nn.Module]) -> int:
    """Of every country a batch, for its two tasks."""
    tasks, rows = [task for country in aliexpress.COUNTS for task in aliexpress.tasks_of(country)], aliexpress.BATCH

    def forward(net: nn.Module) -> Any:
        return net(torch.zeros(rows, len(FIELDS), dtype=torch.long), torch.empty(rows, 63), tasks[:2])

    return len(aliexpress.COUNTS) * flops(partial(kind, FIELDS, 63, tasks), forward)


def few_labels(passes: int) -> int:
    """A batch with labels, and as many passes of a batch without."""
    images = (1 + passes) * semi.BATCH, 3, 32, 32
    return flops(lambda: Classifier(WideResNet(28, 2), {"class": 10}), lambda net: net(torch.empty(images), "class"))


STEPS: dict[str, Callable[[], int]] = {
    "nyuv2": partial(scenes, "deeplab", 8),
    "nyuv2_branches": partial(scenes, "deeplab", 8),
    "nyuv2_intervals": partial(scenes, "deeplab", 8),
    "nyuv2_batch_32": partial(scenes, "deeplab", 32),
    "nyuv2_mtan": partial(scenes, "mtan", 8),
    "domainnet": partial(domains, "resnet-101"),
    "domainnet_branches": partial(domains, "resnet-101"),
    "domainnet_vit": partial(domains, "vit-base"),
    "aliexpress": partial(clicks, ESMM),
    "aliexpress_mmoe": partial(clicks, MMoE),
    "cifar10": partial(few_labels, 5),  # four angles, and a view for the teacher's feature
    "svhn": partial(few_labels, 5),
    "cifar10_baselines": partial(few_labels, 2),
    "svhn_baselines": partial(few_labels, 2),
}
"""FLOPs of one step of equal weights, by recipe."""


def written(page: str) -> str:
    """Return the page with the hours of every recipe beside its steps."""

    def row(match: re.Match[str]) -> str:
        hours = float(match[3]) * 1e6 * STEPS[match[2]]() / RATE / 3600
        return match[1] + f" {float(f'{hours:.2g}'):,.0f} |".replace(",", " ")

    pattern = r"^(\| .*recipes/paper/(\w+)\.toml.*\| ([\d.]+) M \|)[^|\n]*\|"
    return re.sub(pattern, row, page, flags=re.M)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")

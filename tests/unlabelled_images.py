"""Images without labels, a tiny network with a teacher, and single losses on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import forkmerge as fm
from forkmerge.datasets import semi
from forkmerge.datasets._classify import CropAndFlip
from forkmerge.datasets.semi import Images, SemiSplits
from forkmerge.datasets.unlabelled import UnlabelledLosses
from forkmerge.models import Classifier, WithTeacher
from forkmerge.problem.definition import Context

CLASSES = 3


class Tiny(nn.Module):
    """Pixels to four features, with normalisation."""

    channels = 4

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.body(x).mean((2, 3))
        return features


def model(*, teacher: bool = True, decay: float = 0.9) -> nn.Module:
    torch.manual_seed(0)
    student = Classifier(Tiny(), {"class": CLASSES, "rotation": 4})
    return WithTeacher(student, decay) if teacher else student


def splits() -> SemiSplits:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (60, 3, 8, 8), generator=generator, dtype=torch.uint8)
    classes = torch.arange(60) % CLASSES
    images[:, 0] = (classes * 80).view(-1, 1, 1).to(torch.uint8)
    data = Images(images, classes, images[:12], classes[:12])
    return semi.split(data, 12, 15, 0, CLASSES, CropAndFlip(padding=1))


def options(**changed: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": fm.OptimizerOf("Adam", lr=0.01), "steps": 6, "seed": 1, **changed}


def losses_of(task: str, net: nn.Module, images: Tensor, step: int = 0, **changed: Any) -> Tensor:
    losses = UnlabelledLosses(CropAndFlip(padding=0, flip=False), **changed)
    return losses(net, [images], [task], Context(step, 7))[task]


def prepared(images: Tensor) -> Tensor:
    return (images.float() / 255 - 0.5) / 0.25

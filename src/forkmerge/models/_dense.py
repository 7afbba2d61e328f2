"""Dense prediction: atrous pyramids, DeepLab heads and MTAN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_max_pool2d, interpolate

from forkmerge.models._resnet import ResNet, stages


class ASPP(nn.Module):
    """Atrous spatial pyramid pooling: parallel convolutions of growing reach, and the mean of the whole map.

    Args:
        inputs: Channels of the map.
        outputs: Channels that come out.
        rates: Dilations of the 3×3 convolutions.

    References:
        Chen et al., Rethinking Atrous Convolution for Semantic Image Segmentation, 2017, Section 3.3.
    """

    def __init__(self, inputs: int, outputs: int = 256, rates: Sequence[int] = (12, 24, 36)) -> None:
        super().__init__()
        branches = [_conv(inputs, outputs, 1)] + [_conv(inputs, outputs, 3, rate) for rate in rates]
        self.branches = nn.ModuleList(branches)
        # No normalisation: one pixel per image, and a batch may hold one image.
        self.whole = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(inputs, outputs, 1), nn.ReLU())
        self.project = nn.Sequential(_conv((len(branches) + 1) * outputs, outputs, 1), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the map of features."""
        found = [branch(x) for branch in self.branches]
        found.append(self.whole(x).expand(-1, -1, *x.shape[2:]))
        features: Tensor = self.project(torch.cat(found, 1))
        return features


class DeepLabHead(nn.Module):
    """The head of one dense task: a pyramid, a 3×3 convolution, and the task's channels at the input's size.

    Args:
        inputs: Channels of the encoder's map.
        outputs: Channels of the task: classes, 1 for depth, 3 for normals.
        rates: Dilations of the pyramid.
        width: Channels in between.

    References:
        Chen et al., Encoder-Decoder with Atrous Separable Convolution for Semantic Image Segmentation, ECCV 2018.
    """

    def __init__(self, inputs: int, outputs: int, rates: Sequence[int] = (12, 24, 36), width: int = 256) -> None:
        super().__init__()
        self.body = nn.Sequential(ASPP(inputs, width, rates), _conv(width, width, 3), nn.Conv2d(width, outputs, 1))

    def forward(self, features: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the task's map [n, outputs, *size]."""
        return interpolate(self.body(features), size, mode="bilinear", align_corners=True)


class DenseModel(nn.Module):
    """An encoder that all tasks share, in the paper a dilated ResNet, and a DeepLab head for each.

    Args:
        encoder: Images to a map with `channels` channels, an attribute it must have.
        outputs: Channels of every task.
        rates: Dilations of the heads' pyramids.
        width: Channels inside the heads.
    """

    def __init__(
        self, encoder: nn.Module, outputs: Mapping[str, int], rates: Sequence[int] = (12, 24, 36), width: int = 256
    ) -> None:
        super().__init__()
        self.encoder = encoder
        inputs = cast(int, encoder.channels)
        self.heads = nn.ModuleDict(
            {task: DeepLabHead(inputs, channels, rates, width) for task, channels in outputs.items()}
        )

    def forward(self, x: Tensor, tasks: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return the maps of the tasks asked for, of the input's size."""
        return self.from_features(self.encoder(x), (x.shape[2], x.shape[3]), tasks)

    def from_features(
        self, features: Tensor, size: tuple[int, int], tasks: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Return the maps of the tasks asked for, of the given size, from the shared map."""
        return {task: self.heads[task](features, size) for task in tasks or self.heads}


class MTAN(nn.Module):
    """Multi-task attention network on a dilated ResNet: every task attends to every stage of the shared network.

    In stage j with shared features u (before its last block) and p (after), task i has â = a ⊙ p with the mask
    a = h(g([u; f(â of the stage before)])); f shrinks it where the stage did. A head reads the last â.

    Args:
        encoder: The shared network, without pooling.
        outputs: Channels of every task.
        rates: Dilations of the heads' pyramids.
        width: Channels inside the heads.

    References:
        Liu et al., End-to-End Multi-Task Learning with Attention, CVPR 2019, Eq. 1 and 2.
    """

    def __init__(
        self, encoder: ResNet, outputs: Mapping[str, int], rates: Sequence[int] = (12, 24, 36), width: int = 256
    ) -> None:
        super().__init__()
        self.encoder, self._tasks = encoder, list(outputs)
        channels = [_channels(stage[-1]) for stage in stages(encoder)]
        self.masks = nn.ModuleDict()
        self.steps = nn.ModuleDict()
        for task in outputs:
            befores = [0, *channels[:-1]]
            self.masks[task] = nn.ModuleList(
                _mask(width_ if index == 0 else 2 * width_, width_) for index, width_ in enumerate(channels)
            )
            self.steps[task] = nn.ModuleList(
                nn.Identity() if index == 0 else _conv(befores[index], channels[index], 3)
                for index in range(len(channels))
            )
        self.heads = nn.ModuleDict({t: DeepLabHead(channels[-1], n, rates, width) for t, n in outputs.items()})

    def forward(self, x: Tensor, tasks: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return the maps of the tasks asked for, of the input's size."""
        pairs, features = [], self.encoder.stem(x)
        for stage in stages(self.encoder):
            inner = stage[:-1](features)
            features = stage[-1](inner)
            pairs.append((inner, features))
        size = (x.shape[2], x.shape[3])
        return {task: self.heads[task](self._attend(task, pairs), size) for task in tasks or self._tasks}

    def _attend(self, task: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        masks, steps = self.masks[task], self.steps[task]
        assert isinstance(masks, nn.ModuleList)
        assert isinstance(steps, nn.ModuleList)
        chosen: Tensor | None = None
        for (inner, shared), mask, step in zip(pairs, masks, steps, strict=True):
            seen = inner
            if chosen is not None:
                moved = step(chosen)
                if moved.shape[2:] != inner.shape[2:]:
                    moved = adaptive_max_pool2d(moved, inner.shape[2:])
                seen = torch.cat([inner, moved], 1)
            chosen = mask(seen) * shared
        assert chosen is not None
        return chosen


def _mask(inputs: int, outputs: int) -> nn.Sequential:
    middle = max(outputs // 4, 1)
    return nn.Sequential(
        nn.Conv2d(inputs, middle, 1),
        nn.BatchNorm2d(middle),
        nn.ReLU(),
        nn.Conv2d(middle, outputs, 1),
        nn.BatchNorm2d(outputs),
        nn.Sigmoid(),
    )


def _channels(block: nn.Module) -> int:
    *_, last = (part for name, part in block.named_children() if name.startswith("bn"))
    assert isinstance(last, nn.BatchNorm2d)
    return last.num_features


def _conv(inputs: int, outputs: int, kernel: int, dilation: int = 1) -> nn.Sequential:
    padding = dilation * (kernel // 2)
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, 1, padding, dilation, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )

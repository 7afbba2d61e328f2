"""Dense prediction: atrous pyramids, DeepLab heads and MTAN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_max_pool2d, interpolate

from forkmerge.models._resnet import BasicBlock, Bottleneck, ResNet, stages


class ASPP(nn.Module):
    """Atrous spatial pyramid pooling: parallel convolutions of growing reach, and the mean of the whole map.

    Args:
        inputs: Channels of the map.
        outputs: Channels that come out.
        rates: Dilations of the 3×3 convolutions.
        dropout: Of what comes out; by default that of torchvision and LibMTL, which the paper's code uses.
        normalised_mean: Whether the mean of the map is normalised like the rest, as it is there: over the images of a
            batch, so training takes at least two. Otherwise it has a bias, and a batch may hold one image.

    References:
        Chen et al., Rethinking Atrous Convolution for Semantic Image Segmentation, 2017, Section 3.3.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int = 256,
        rates: Sequence[int] = (12, 24, 36),
        *,
        dropout: float = 0.5,
        normalised_mean: bool = True,
    ) -> None:
        super().__init__()
        branches = [_conv(inputs, outputs, 1)] + [_conv(inputs, outputs, 3, rate) for rate in rates]
        self.branches = nn.ModuleList(branches)
        reduced = _conv(inputs, outputs, 1) if normalised_mean else [nn.Conv2d(inputs, outputs, 1), nn.ReLU()]
        self.whole = nn.Sequential(nn.AdaptiveAvgPool2d(1), *reduced)
        self.project = nn.Sequential(_conv((len(branches) + 1) * outputs, outputs, 1), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        """Return the map of features."""
        maps = [branch(x) for branch in self.branches]
        maps.append(self.whole(x).expand(-1, -1, *x.shape[2:]))
        features: Tensor = self.project(torch.cat(maps, 1))
        return features


class DeepLabHead(nn.Module):
    """The head of one dense task: a pyramid, a 3×3 convolution, and the task's channels at the input's size.

    Args:
        inputs: Channels of the encoder's map.
        outputs: Channels of the task: classes, 1 for depth, 3 for normals.
        rates: Dilations of the pyramid.
        width: Channels in between.
        **pyramid: Other options of `ASPP`.

    Note:
        The paper writes DeepLabV3+; its code, LibMTL's, has the head of DeepLabV3, without a path from an early stage.

    References:
        Chen et al., Rethinking Atrous Convolution for Semantic Image Segmentation, 2017.
    """

    def __init__(
        self, inputs: int, outputs: int, rates: Sequence[int] = (12, 24, 36), width: int = 256, **pyramid: Any
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(
            ASPP(inputs, width, rates, **pyramid), _conv(width, width, 3), nn.Conv2d(width, outputs, 1)
        )

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
        scale: How many times the input's size the maps have; more than 1 where the input is a map of features.
        **pyramid: Other options of `ASPP`.
    """

    def __init__(
        self,
        encoder: nn.Module,
        outputs: Mapping[str, int],
        rates: Sequence[int] = (12, 24, 36),
        width: int = 256,
        *,
        scale: int = 1,
        **pyramid: Any,
    ) -> None:
        super().__init__()
        self.encoder, self.scale = encoder, scale
        inputs = cast(int, encoder.channels)
        self.heads = nn.ModuleDict(
            {task: DeepLabHead(inputs, channels, rates, width, **pyramid) for task, channels in outputs.items()}
        )

    def forward(self, x: Tensor, tasks: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return the maps of the tasks asked for, of the input's size times `scale`."""
        return self.from_features(self.encoder(x), (x.shape[2], x.shape[3]), tasks)

    def from_features(
        self, features: Tensor, size: tuple[int, int], tasks: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Return the maps of the tasks asked for, from the shared map and the size of the input."""
        height, width = size
        whole = (height * self.scale, width * self.scale)
        return {task: self.heads[task](features, whole) for task in tasks or self.heads}


class MTAN(nn.Module):
    """Multi-task attention network on a dilated ResNet: every task attends to every stage of the shared network.

    In stage j with shared features u (before its last block) and p (after), task i has â = a ⊙ p with the mask
    a = h(g([u; f(â of the stage before)])). Masks are a task's own; f is a residual block that all tasks share, then
    pooled where the stage has a stride. A head reads the last â.

    Args:
        encoder: The shared network, without pooling.
        outputs: Channels of every task.
        rates: Dilations of the heads' pyramids.
        width: Channels inside the heads.

    Note:
        For a ResNet as in LibMTL, which the paper's code uses: one block of the encoder's kind per stage, where the
        original on SegNet has a 3×3 convolution.

    References:
        Liu et al., End-to-End Multi-Task Learning with Attention, CVPR 2019, Eq. 1 and 2.
    """

    def __init__(
        self, encoder: ResNet, outputs: Mapping[str, int], rates: Sequence[int] = (12, 24, 36), width: int = 256
    ) -> None:
        super().__init__()
        self.encoder, self._tasks = encoder, list(outputs)
        kinds = [cast(type[BasicBlock | Bottleneck], type(stage[-1])) for stage in stages(encoder)]
        channels = [_channels(stage[-1]) for stage in stages(encoder)]
        middles = [count // kind.expansion for count, kind in zip(channels, kinds, strict=True)]
        self.masks = nn.ModuleDict()
        for task in outputs:
            self.masks[task] = nn.ModuleList(
                _mask(2 * count if index else count, middle, count)
                for index, (count, middle) in enumerate(zip(channels, middles, strict=True))
            )
        self.steps = nn.ModuleList(
            kind(before, middle, 1, (1, 1))
            for kind, before, middle in zip(kinds[1:], channels[:-1], middles[1:], strict=True)
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
        masks = self.masks[task]
        assert isinstance(masks, nn.ModuleList)
        chosen: Tensor = masks[0](pairs[0][0]) * pairs[0][1]
        for (inner, shared), mask, step in zip(pairs[1:], masks[1:], self.steps, strict=True):
            moved = step(chosen)
            if moved.shape[2:] != inner.shape[2:]:
                moved = adaptive_max_pool2d(moved, inner.shape[2:])
            chosen = mask(torch.cat([inner, moved], 1)) * shared
        return chosen


def _mask(inputs: int, middle: int, outputs: int) -> nn.Sequential:
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

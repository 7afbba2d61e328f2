"""ResNets, with the names of published weights, and their dilated forms for dense prediction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from forkmerge.errors import ProblemError

DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


class BasicBlock(nn.Module):
    """Two 3×3 convolutions around a skip connection."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, dilations: tuple[int, int]) -> None:
        super().__init__()
        first, second = dilations
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, first, first, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, second, second, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _skip(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's features."""
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1×1, 3×3 (with the stride) and 1×1 convolutions around a skip connection."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, dilations: tuple[int, int]) -> None:
        super().__init__()
        outputs, dilation = self.expansion * width, dilations[0]
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, dilation, dilation, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _skip(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's features."""
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """A ResNet without its classifier: images to features [n, channels], or to a map of them.

    Args:
        depth: 18, 34, 50 or 101.
        output_stride: Pixels of the input per pixel of the last map: 32, or 16 or 8 with dilated convolutions in place
            of the last one or two strides.
        pool: Whether the last map is averaged to one vector.
        small_images: A 3×3 first layer without stride or pooling, for images of about 32×32.

    Attributes:
        channels: Channels of what comes out.

    References:
        He et al., Deep Residual Learning for Image Recognition, CVPR 2016. Dilation: Chen et al., Rethinking Atrous
        Convolution for Semantic Image Segmentation, 2017, Section 3.
    """

    def __init__(
        self, depth: int = 50, *, output_stride: int = 32, pool: bool = True, small_images: bool = False
    ) -> None:
        super().__init__()
        if depth not in DEPTHS:
            raise ProblemError(f"depth must be one of {', '.join(map(str, DEPTHS))}, got {depth!r}.")
        if output_stride not in (8, 16, 32):
            raise ProblemError(f"output_stride must be 8, 16 or 32, got {output_stride!r}.")
        block = Bottleneck if depth >= 50 else BasicBlock
        self.conv1 = nn.Conv2d(
            3, 64, 3 if small_images else 7, 1 if small_images else 2, 1 if small_images else 3, bias=False
        )
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool: nn.Module = nn.Identity() if small_images else nn.MaxPool2d(3, 2, 1)
        self.channels, self._dilation = 64, 1
        strides = {32: (1, 2, 2, 2), 16: (1, 2, 2, 1), 8: (1, 2, 1, 1)}[output_stride]
        layers = [
            self._layer(block, 64 * 2**stage, blocks, 2 if stage else 1, strides[stage])
            for stage, blocks in enumerate(DEPTHS[depth])
        ]
        self.layer1, self.layer2, self.layer3, self.layer4 = layers
        self.pool = pool
        _initialise(self)

    def _layer(
        self, block: type[BasicBlock] | type[Bottleneck], width: int, blocks: int, stride: int, used: int
    ) -> nn.Sequential:
        """One stage; a stride that is not used becomes a dilation of all that follows it."""
        before = self._dilation
        if used < stride:
            self._dilation *= stride
        modules: list[nn.Module] = []
        for index in range(blocks):
            # The convolution that would have had the stride still sees the map it saw before.
            dilations = (self._dilation if index else before, self._dilation)
            modules.append(block(self.channels, width, used if index == 0 else 1, dilations))
            self.channels = width * block.expansion
        return nn.Sequential(*modules)

    def stem(self, x: Tensor) -> Tensor:
        """Return what the first stage sees."""
        features: Tensor = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        return features

    def forward(self, x: Tensor) -> Tensor:
        """Return features [n, channels], or the map [n, channels, h, w]."""
        x = self.layer4(self.layer3(self.layer2(self.layer1(self.stem(x)))))
        return x.mean((2, 3)) if self.pool else x


class PreActivation(nn.Module):
    """A residual block that normalises first; the first block of a network does so on its skip connection, too."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, first: bool) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut = None if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self._slope, self._first = 0.1, first

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's features."""
        y = nn.functional.leaky_relu(self.bn1(x), self._slope)
        skip = x if self.shortcut is None else self.shortcut(y if self._first else x)
        y = nn.functional.leaky_relu(self.bn2(self.conv1(y)), self._slope)
        result: Tensor = skip + self.conv2(y)
        return result


class WideResNet(nn.Module):
    """WRN-28-2 without its classifier, as semi-supervised learning uses it: 32×32 images to 128 features.

    Args:
        depth: 6n + 4 layers.
        widen: How many times wider than a plain ResNet.

    Attributes:
        channels: Features that come out.

    References:
        Zagoruyko and Komodakis, Wide Residual Networks, BMVC 2016. Leaky ReLUs of slope 0.1: Oliver et al., Realistic
        Evaluation of Deep Semi-Supervised Learning Algorithms, NeurIPS 2018, Appendix A.
    """

    def __init__(self, depth: int = 28, widen: int = 2) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ProblemError(f"depth must be 6n + 4, such as 10, 16 or 28, got {depth!r}.")
        widths = [16, 16 * widen, 32 * widen, 64 * widen]
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        groups = []
        for stage in range(3):
            blocks = [
                PreActivation(
                    widths[stage] if i == 0 else widths[stage + 1],
                    widths[stage + 1],
                    2 if stage and not i else 1,
                    first=not (stage or i),
                )
                for i in range((depth - 4) // 6)
            ]
            groups.append(nn.Sequential(*blocks))
        self.block1, self.block2, self.block3 = groups
        self.channels = widths[-1]
        self.bn1 = nn.BatchNorm2d(self.channels)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return features [n, channels]."""
        x = self.block3(self.block2(self.block1(self.conv1(x))))
        return nn.functional.leaky_relu(self.bn1(x), 0.1).mean((2, 3))


def stages(network: ResNet) -> Sequence[nn.Sequential]:
    """The four stages of a ResNet."""
    return network.layer1, network.layer2, network.layer3, network.layer4


def _skip(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def _initialise(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

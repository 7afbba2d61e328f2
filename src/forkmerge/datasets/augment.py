"""Augmentations of whole batches of tensors: functions of (batch, generator), so the same step draws the same ones.

A stream's `losses` calls them with `context.generator`, which is a pure function of (seed, stream, step, micro-batch).
Numbers are drawn on the CPU and the work is done where the batch is, so all devices see the same augmentations. Each
is a few lines of torch, for which no package of augmentations is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn import functional

from forkmerge.errors import ProblemError

_TRIES = 10  # crops drawn until one fits, as torchvision's random resized crop does


def as_floats(images: Tensor, mean: float | Sequence[float] = 0.0, std: float | Sequence[float] = 1.0) -> Tensor:
    """Return bytes as (x/255 − mean)/std; images [n, channels, height, width]."""
    centre, spread = (torch.as_tensor(value, dtype=torch.float32).reshape(-1, 1, 1) for value in (mean, std))
    scale, shift = 1 / (255 * spread), -centre / spread
    return images.to(torch.float32).mul_(scale.to(images.device)).add_(shift.to(images.device))


def random_crop(
    images: Tensor, generator: Generator, padding: int = 4, fill: Literal["zeros", "reflect"] = "zeros"
) -> Tensor:
    """Move every image by up to `padding` pixels in both directions: padding and cropping to the same size.

    Args:
        images: [n, channels, height, width], of any dtype.
        generator: Draws the moves.
        padding: At most so many pixels.
        fill: What is seen outside the image.
    """
    if fill not in ("zeros", "reflect"):
        raise ProblemError(f"fill must be 'zeros' or 'reflect', got {fill!r}.")
    n, channels, *size = images.shape
    if fill == "reflect" and padding >= min(size):
        raise ProblemError(f"a padding of {padding} cannot be reflected in images of {size[0]}×{size[1]} pixels.")
    moves = torch.randint(-padding, padding + 1, (n, 2), generator=generator)
    positions, insides = [], []
    for axis, length in enumerate(size):
        at = torch.arange(length) + moves[:, axis, None]  # [n, length]
        inside = (at >= 0) & (at < length)
        at = at.abs() if fill == "reflect" else at.clamp(min=0)
        at = torch.where(at >= length, 2 * (length - 1) - at, at) if fill == "reflect" else at.clamp(max=length - 1)
        positions.append(at.to(images.device))
        insides.append(inside.to(images.device))
    rows, columns = positions[0][:, None, :, None], positions[1][:, None, None, :]
    first = torch.arange(n, device=images.device)[:, None, None, None]
    second = torch.arange(channels, device=images.device)[None, :, None, None]
    moved = images[first, second, rows, columns]
    if fill == "reflect":
        return moved
    return moved * (insides[0][:, None, :, None] & insides[1][:, None, None, :])


def random_flip(images: Tensor, generator: Generator, probability: float = 0.5) -> Tensor:
    """Mirror images [n, …, width], left to right, each with a probability."""
    chosen = torch.rand(len(images), generator=generator) < probability
    mask = chosen.to(images.device).view(-1, *[1] * (images.dim() - 1))
    return torch.where(mask, images.flip(-1), images)


def cut_out(images: Tensor, generator: Generator, size: int) -> Tensor:
    """Set a square of every image [n, channels, height, width], drawn anywhere and cut off at the edges, to 0."""
    height, width = images.shape[-2:]
    inside = []
    for length in (height, width):
        centres = torch.randint(0, length, (len(images), 1), generator=generator)
        start = centres - size // 2
        positions = torch.arange(length)
        inside.append(((positions >= start) & (positions < start + size)).to(images.device))
    hole = inside[0][:, None, :, None] & inside[1][:, None, None, :]
    return images.masked_fill(hole, 0.0)


def random_resized_crop(
    images: Tensor,
    generator: Generator,
    size: int,
    area: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """Cut a random rectangle out of every image and bring it to size × size pixels, bilinear.

    Args:
        images: Floating values [n, channels, height, width].
        generator: Draws the rectangles.
        size: Side of the result.
        area: Share of the image, drawn uniformly.
        ratio: Width over height, drawn uniformly on a logarithmic scale.
    """
    n, _, height, width = images.shape
    draws = torch.rand(n, _TRIES, 4, generator=generator, dtype=torch.float64)
    share = area[0] + (area[1] - area[0]) * draws[..., 0]
    shape = (math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * draws[..., 1]).exp()
    wide = (share * height * width * shape).sqrt().round()
    high = (share * height * width / shape).sqrt().round()
    fits = (wide >= 1) & (wide <= width) & (high >= 1) & (high <= height)
    first = fits.int().argmax(1)[:, None]
    has_fit = fits.any(1)
    high = torch.where(has_fit, high.gather(1, first)[:, 0], float(height))
    wide = torch.where(has_fit, wide.gather(1, first)[:, 0], float(width))
    top = (draws[..., 2].gather(1, first)[:, 0] * (height - high + 1)).floor()
    left = (draws[..., 3].gather(1, first)[:, 0] * (width - wide + 1)).floor()
    matrices = torch.zeros(n, 2, 3)
    matrices[:, 0, 0], matrices[:, 1, 1] = wide / width, high / height
    matrices[:, 0, 2], matrices[:, 1, 2] = (2 * left + wide) / width - 1, (2 * top + high) / height - 1
    grid = functional.affine_grid(matrices.to(images.device), [n, 1, size, size], align_corners=False)
    # Border: half a pixel of a resized crop may lie outside the image.
    return functional.grid_sample(images, grid.to(images.dtype), padding_mode="border", align_corners=False)


def centre_crop(images: Tensor, size: int) -> Tensor:
    """Cut size × size pixels out of the middle of images."""
    height, width = images.shape[-2:]
    if size > min(height, width):
        raise ProblemError(f"images of {height}×{width} pixels have no centre crop of {size}×{size}.")
    top, left = round((height - size) / 2), round((width - size) / 2)
    return images[..., top : top + size, left : left + size]


def scale_crop_flip(
    batch: Sequence[Tensor], generator: Generator, scales: Sequence[float] = (1.0, 1.2, 1.5)
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Zoom into scenes at random and mirror half of them, with everything known about their pixels.

    A scene is cropped to 1/s of its height and width, s drawn from `scales`, and brought back to its size: images and
    normals bilinear, labels and depths by the nearest pixel. What is s times larger is s times nearer, so depths are
    divided by s. In a mirrored scene the normals' first component changes its sign.

    Args:
        batch: Images [n, 3, h, w], labels [n, h, w], depths [n, 1, h, w] and normals [n, 3, h, w].
        generator: Draws scales, places and mirrors.
        scales: How much closer a scene may come.

    References:
        Liu et al., End-to-End Multi-Task Learning with Attention, CVPR 2019, as in the authors' later code.
    """
    images, labels, depths, normals = batch
    n, _, height, width = images.shape
    which = torch.randint(len(scales), (n,), generator=generator).tolist()
    draws = torch.rand(n, 3, generator=generator, dtype=torch.float64).tolist()
    scenes: list[tuple[Tensor, ...]] = []
    for index, (at, (top, left, mirror)) in enumerate(zip(which, draws, strict=True)):
        scale = scales[at]
        high, wide = int(height / scale), int(width / scale)
        i, j = int(top * (height - high + 1)), int(left * (width - wide + 1))
        image, label, depth, normal = (
            part[index : index + 1, ..., i : i + high, j : j + wide] for part in (images, labels, depths, normals)
        )
        size = (height, width)
        scene = (
            functional.interpolate(image, size, mode="bilinear", align_corners=True),
            functional.interpolate(label[:, None].to(images.dtype), size, mode="nearest")[:, 0].to(label.dtype),
            functional.interpolate(depth, size, mode="nearest") / scale,
            functional.interpolate(normal, size, mode="bilinear", align_corners=True),
        )
        scenes.append(_mirrored(scene) if mirror < 0.5 else scene)
    image, label, depth, normal = (torch.cat(parts) for parts in zip(*scenes, strict=True))
    return image, label, depth, normal


def _mirrored(scene: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    image, *targets = scene
    return image.flip(-1), *mirrored_targets(*targets)


def mirrored_targets(labels: Tensor, depths: Tensor, normals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is known about the pixels of mirrored scenes: the normals' first component changes its sign."""
    label, depth, normal = (part.flip(-1) for part in (labels, depths, normals))
    return label, depth, torch.cat([-normal[:, :1], normal[:, 1:]], 1)

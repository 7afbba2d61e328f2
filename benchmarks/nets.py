"""The networks and problems that benchmarks time, each with a plain PyTorch loop beside the library's problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import forkmerge as fm

CLASSES = 10
Norm = Callable[[int], nn.Module]
"""Makes a normalisation of so many channels."""


class Block(nn.Module):
    """A basic residual block."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            norm(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            norm(outputs),
        )
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def group_norm(channels: int) -> nn.Module:
    """A normalisation without running statistics."""
    return nn.GroupNorm(4, channels)


def resnet(width: int = 16, norm: Norm = nn.BatchNorm2d) -> nn.Sequential:
    """The eight blocks of a ResNet-18, for 32×32 images; width 64 gives its 11.2M parameters."""
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    blocks: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), norm(width), nn.ReLU()]
    for stage in range(4):
        blocks.append(Block(widths[stage], widths[stage + 1], 1 if stage == 0 else 2, norm))
        blocks.append(Block(widths[stage + 1], widths[stage + 1], 1, norm))
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Embedding(nn.Module):
    """Categorical fields through one embedding table, then an MLP: a small recommender."""

    def __init__(self, rows: int = 2000, fields: int = 16, size: int = 16) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, size)
        self.body = nn.Sequential(nn.Linear(fields * size, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.table(x).flatten(1))


class MultiTask(nn.Module):
    """A shared encoder and one head per task: linear, or a tower with hidden layers."""

    def __init__(self, encoder: nn.Module, widths: Sequence[int], tasks: Sequence[str]) -> None:
        super().__init__()
        self.encoder = encoder
        self.heads = nn.ModuleDict({task: tower(widths) for task in tasks})


def tower(widths: Sequence[int]) -> nn.Module:
    """Linear layers from width to width, then the classes."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES))


class Case:
    """One thing to time: data, network, and the same training as a library problem and as a plain loop.

    Args:
        name: How tables call it.
        encoder: Makes the encoder.
        widths: Width of its output, then of the hidden layers of each head.
        inputs: All training inputs.
        tasks: How many tasks.
        batch: Examples per batch.
        own_inputs: Whether every task reads its own batch.
    """

    def __init__(
        self,
        name: str,
        encoder: Callable[[], nn.Module],
        widths: Sequence[int],
        inputs: Tensor,
        tasks: int,
        batch: int,
        own_inputs: bool = False,
    ) -> None:
        self.name, self.batch, self.own_inputs = name, batch, own_inputs
        self.tasks = [f"task{k}" for k in range(tasks)]
        self.inputs = inputs
        generator = torch.Generator().manual_seed(1)
        self.labels = [torch.randint(0, CLASSES, (len(inputs),), generator=generator) for _ in self.tasks]
        self._encoder, self._widths = encoder, widths

    def model(self) -> MultiTask:
        """A fresh network, the same every time."""
        torch.manual_seed(0)
        return MultiTask(self._encoder(), self._widths, self.tasks)

    def problem(self) -> fm.Problem:
        """The library's view of it."""
        if self.own_inputs:
            streams = [
                fm.Stream(TensorDataset(self.inputs, y), self._losses, [task], self.batch)
                for task, y in zip(self.tasks, self.labels, strict=True)
            ]
        else:
            streams = [fm.Stream(TensorDataset(self.inputs, *self.labels), self._losses, self.tasks, self.batch)]
        score = fm.Evaluation(TensorDataset(self.inputs[:8], self.labels[0][:8]), fm.accuracy, self._predict)
        return fm.Problem(self.tasks[0], streams, score)

    def plain_steps(self, model: MultiTask, optimizer: torch.optim.Optimizer, steps: int) -> None:
        """The hand-written equal-weight loop that everything is compared with."""
        for _ in range(steps):
            losses = self.plain_losses(model)[0]
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            optimizer.step()

    def plain_losses(self, model: MultiTask) -> tuple[list[Tensor], list[Tensor]]:
        """One random batch, its losses and the representations they start from."""
        losses, features = [], []
        index = torch.randint(0, len(self.inputs), (self.batch,))
        z = None
        for task, labels in zip(self.tasks, self.labels, strict=True):
            if z is None or self.own_inputs:
                index = torch.randint(0, len(self.inputs), (self.batch,))
                z = model.encoder(self.inputs[index])
                features.append(z)
            losses.append(cross_entropy(model.heads[task](z), labels[index]))
        return losses, features

    def _losses(self, model: Any, batch: Any, tasks: Sequence[str], context: fm.Context) -> dict[str, Tensor]:
        x, *labels = batch
        z = context.shared(model.encoder(x))
        known = tasks if self.own_inputs else self.tasks
        return {t: cross_entropy(model.heads[t](z), y) for t, y in zip(known, labels, strict=True) if t in tasks}

    def _predict(self, model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return model.heads[self.tasks[0]](model.encoder(x)), y


def conv_case(tasks: int, own_inputs: bool = False) -> Case:
    """A ResNet-18-like network at 32×32."""
    images = torch.randn(256, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    name = f"conv K={tasks}" + (", own inputs" if own_inputs else "")
    return Case(name, resnet, [128], images, tasks, 32, own_inputs)


def mlp_case(tasks: int, own_inputs: bool = False) -> Case:
    """Embedding and MLP."""
    rows = torch.randint(0, 2000, (4096, 16), generator=torch.Generator().manual_seed(0))
    name = f"MLP K={tasks}" + (", own inputs" if own_inputs else "")
    return Case(name, Embedding, [128, 64], rows, tasks, 256, own_inputs)


def large_embedding_case(tasks: int) -> Case:
    """The same with an embedding table of five million parameters."""
    rows = torch.randint(0, 312_500, (4096, 16), generator=torch.Generator().manual_seed(0))
    return Case(f"5M embedding K={tasks}", lambda: Embedding(312_500), [128, 64], rows, tasks, 256)


IMAGE_TASKS = ("target", "coarse", "noisy")


def image_model(width: int = 16, tasks: Sequence[str] = IMAGE_TASKS) -> MultiTask:
    """A ResNet-18-like network with a linear head per task, the same every time."""
    torch.manual_seed(0)
    return MultiTask(resnet(width), [8 * width], tasks)


def images(count: int, seed: int, size: int = 8, noise: float = 2.5) -> list[Tensor]:
    """Images of ten noisy patterns, and labels: the class, a permutation of it, and one that is wrong half the time."""
    patterns = torch.randn(CLASSES, 3, size, size, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(CLASSES, (count,), generator=generator)
    inputs = patterns[target] + noise * torch.randn(count, 3, size, size, generator=generator)
    wrong = torch.rand(count, generator=generator) < 0.5
    noisy = torch.where(wrong, torch.randint(CLASSES, (count,), generator=generator), target)
    return [inputs, target, (7 * target) % CLASSES, noisy]


def image_losses(model: Any, batch: Any, tasks: Sequence[str], context: fm.Context) -> dict[str, Tensor]:
    """One pass through the encoder for all tasks asked for."""
    inputs, *labels = batch
    z = context.shared(model.encoder(inputs))
    pairs = zip(IMAGE_TASKS, labels, strict=True)
    return {task: cross_entropy(model.heads[task](z), y) for task, y in pairs if task in tasks}


def image_predict(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """The target's logits and labels."""
    return model.heads["target"](model.encoder(batch[0])), batch[1]


def image_problem(training: int, validation: int, batch: int = 64, size: int = 8, noise: float = 2.5) -> fm.Problem:
    """Three tasks on shared images; everything a worker process needs stands at module level."""
    stream = fm.Stream(TensorDataset(*images(training, 1, size, noise)), image_losses, IMAGE_TASKS, batch)
    held_out = TensorDataset(*images(validation, 2, size, noise)[:2])
    return fm.Problem("target", {"images": stream}, fm.Evaluation(held_out, fm.accuracy, image_predict))

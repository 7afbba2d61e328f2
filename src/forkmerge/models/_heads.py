"""An encoder and what stands on it: a head per task, or one for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from forkmerge.errors import ProblemError, unknown_name


class Classifier(nn.Module):
    """An encoder with linear heads: one per task or domain, or one that all share.

    Args:
        encoder: Inputs to features [n, channels]; anything with an attribute `channels`, or a width given below.
        classes: Classes of every task, `{task: number}`.
        shared_head: Whether one head serves all tasks, which must then have the same classes.
        channels: Features of the encoder, where it does not say.

    Example:
        >>> from forkmerge.models import WideResNet
        >>> model = Classifier(WideResNet(10, 1), {"photo": 7, "sketch": 7})
        >>> model(Tensor(2, 3, 32, 32), "sketch").shape
        torch.Size([2, 7])
    """

    def __init__(
        self,
        encoder: nn.Module,
        classes: Mapping[str, int],
        *,
        shared_head: bool = False,
        channels: int | None = None,
    ) -> None:
        super().__init__()
        width = channels or getattr(encoder, "channels", None)
        if not isinstance(width, int):
            raise ProblemError(f"{type(encoder).__name__} does not say how many features it has: pass channels=….")
        if not classes or (shared_head and len(set(classes.values())) > 1):
            raise ProblemError(f"one head for all tasks needs tasks with the same classes, got {dict(classes)}.")
        self.encoder = encoder
        self._tasks = dict.fromkeys(classes, "all") if shared_head else {task: task for task in classes}
        self.heads = nn.ModuleDict({name: nn.Linear(width, classes[task]) for task, name in self._tasks.items()})

    def head(self, task: str) -> nn.Module:
        """Return the head of a task."""
        if task not in self._tasks:
            raise ProblemError(unknown_name("task", task, self._tasks))
        return self.heads[self._tasks[task]]

    def forward(self, x: Tensor, task: str) -> Tensor:
        """Return a task's logits."""
        logits: Tensor = self.head(task)(self.encoder(x))
        return logits


class Backbone(nn.Module):
    """A model of Hugging Face's transformers as an encoder: pixels to its pooled features.

    Args:
        model: An image model with `pooler_output` or `last_hidden_state`, made from a config or pre-trained.

    Attributes:
        channels: Features that come out.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        config: Any = getattr(model, "config", None)
        sizes = getattr(config, "hidden_sizes", None)
        channels = sizes[-1] if sizes else getattr(config, "hidden_size", None)
        if not isinstance(channels, int):
            raise ProblemError(
                f"{type(model).__name__} has no config with hidden_size or hidden_sizes: pass a model of transformers, "
                "or any module with Classifier(…, channels=…)."
            )
        self.model, self.channels = model, channels

    def forward(self, x: Tensor) -> Tensor:
        """Return features [n, channels]."""
        output: Any = self.model(pixel_values=x)
        pooled = getattr(output, "pooler_output", None)
        features: Tensor = output.last_hidden_state if pooled is None else pooled
        if pooled is None and features.dim() == 3:
            return features[:, 0]  # the class token
        return features.mean((2, 3)) if features.dim() == 4 and features.shape[2] > 1 else features.flatten(1)

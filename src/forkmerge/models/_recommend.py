"""Recommendation: fields through one shared embedding, and towers or experts for the tasks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from forkmerge.errors import ProblemError


class Fields(nn.Module):
    """All categorical fields in one embedding table, and numerical ones through a linear layer, as one vector.

    Args:
        sizes: Categories of every categorical field; codes run from 0.
        numerical: How many numerical fields.
        width: Features per field; all numerical fields together get one more.

    Attributes:
        channels: Features that come out.
    """

    offsets: Tensor

    def __init__(self, sizes: Sequence[int], numerical: int = 0, width: int = 128) -> None:
        super().__init__()
        if not sizes and not numerical:
            raise ProblemError("a recommender needs at least one field, got none.")
        self.table = nn.Embedding(sum(sizes), width) if sizes else None
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.register_buffer("offsets", torch.tensor(starts, dtype=torch.long))
        self.numbers = nn.Linear(numerical, width) if numerical else None
        self.channels = width * (len(sizes) + (numerical > 0))
        if self.table is not None:
            nn.init.xavier_uniform_(self.table.weight)

    def forward(self, categorical: Tensor, numerical: Tensor | None = None) -> Tensor:
        """Return [n, channels] from codes [n, fields] and numbers [n, numerical]."""
        parts = []
        if self.table is not None:
            parts.append(self.table(categorical + self.offsets).flatten(1))
        if self.numbers is not None:
            parts.append(self.numbers(numerical))
        return torch.cat(parts, 1)


class ESMM(nn.Module):
    """One shared embedding and an independent tower per task; conversions may be a product of two towers.

    p(click and buy) = p(click) · p(buy | click): with `entire_space`, the probability of every task after the first is
    the product of its tower's and the first task's. Without it every tower answers for its own task, as in the paper's
    comparison.

    Args:
        sizes: Categories of every categorical field.
        numerical: How many numerical fields.
        tasks: Names of the tasks.
        width: Features per field.
        hidden: Widths of a tower's hidden layers.
        dropout: In the towers.
        entire_space: Whether tasks after the first are conditional on it.

    Note:
        The paper gives the width of features and nothing else. The default towers are ours: of the widths of MTReclib's
        (512, 256, then 128, 64) the first two.

    References:
        Ma et al., Entire Space Multi-Task Model, SIGIR 2018, Eq. 4.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        numerical: int,
        tasks: Sequence[str],
        *,
        width: int = 128,
        hidden: Sequence[int] = (512, 256),
        dropout: float = 0.2,
        entire_space: bool = False,
    ) -> None:
        super().__init__()
        self.encoder = Fields(sizes, numerical, width)
        self.heads = nn.ModuleDict({task: tower(self.encoder.channels, hidden, dropout) for task in tasks})
        self._first, self._entire_space = next(iter(tasks)), entire_space

    def forward(
        self, categorical: Tensor, numerical: Tensor | None = None, tasks: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Return the logits [n] of the tasks asked for."""
        return self.from_features(self.encoder(categorical, numerical), tasks)

    def from_features(self, features: Tensor, tasks: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return the logits [n] of the tasks asked for, from the shared embedding."""
        logits = {task: self.heads[task](features).squeeze(1) for task in tasks or self.heads}
        if not self._entire_space:
            return logits
        first = logits.get(self._first)
        if first is None:
            first = self.heads[self._first](features).squeeze(1)
        return {task: logit if task == self._first else _both(first, logit) for task, logit in logits.items()}


class MMoE(nn.Module):
    """Multi-gate mixture of experts: experts that all tasks share, a gate and a tower per task.

    Args:
        sizes: Categories of every categorical field.
        numerical: How many numerical fields.
        tasks: Names of the tasks.
        width: Features per field.
        experts: How many.
        bottom: Widths of an expert's layers.
        hidden: Widths of a tower's hidden layers.
        dropout: In experts and towers.

    Note:
        The paper gives no sizes. The defaults are those of MTReclib, which it builds on.

    References:
        Ma et al., Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts, KDD 2018,
        Eq. 5 to 8.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        numerical: int,
        tasks: Sequence[str],
        *,
        width: int = 128,
        experts: int = 8,
        bottom: Sequence[int] = (512, 256),
        hidden: Sequence[int] = (128, 64),
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.encoder = Fields(sizes, numerical, width)
        self.experts = nn.ModuleList(layers(self.encoder.channels, bottom, dropout) for _ in range(experts))
        self.gates = nn.ModuleDict({task: nn.Linear(self.encoder.channels, experts) for task in tasks})
        self.heads = nn.ModuleDict({task: tower(bottom[-1], hidden, dropout) for task in tasks})

    def forward(
        self, categorical: Tensor, numerical: Tensor | None = None, tasks: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Return the logits [n] of the tasks asked for."""
        features = self.encoder(categorical, numerical)
        outputs = torch.stack([expert(features) for expert in self.experts], 1)
        result = {}
        for task in tasks or self.heads:
            shares = torch.softmax(self.gates[task](features), 1)
            result[task] = self.heads[task]((shares[:, :, None] * outputs).sum(1)).squeeze(1)
        return result


def layers(inputs: int, widths: Sequence[int], dropout: float) -> nn.Sequential:
    """Return linear layers with normalisation, ReLU and dropout."""
    modules: list[nn.Module] = []
    for width in widths:
        modules += [nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout)]
        inputs = width
    return nn.Sequential(*modules)


def tower(inputs: int, widths: Sequence[int], dropout: float) -> nn.Sequential:
    """Return hidden layers and one logit."""
    return nn.Sequential(*layers(inputs, widths, dropout), nn.Linear(widths[-1] if widths else inputs, 1))


def _both(first: Tensor, second: Tensor) -> Tensor:
    """The logit of a product of two probabilities, without computing either: log p − log(1 − p), p = σ(a) σ(b)."""
    logsigmoid = nn.functional.logsigmoid
    log_p = logsigmoid(first) + logsigmoid(second)
    # 1 − σ(a) σ(b) = σ(−a) + σ(a) σ(−b), a sum of positive terms.
    return log_p - torch.logaddexp(logsigmoid(-first), logsigmoid(first) + logsigmoid(-second))

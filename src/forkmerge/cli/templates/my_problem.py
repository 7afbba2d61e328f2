"""A problem of your own, in one file.

It runs as it stands, on made-up data, in a few seconds:

    forkmerge run my_problem:recipe --dry-run    what it will do and cost
    forkmerge run my_problem:recipe              do it; then see `forkmerge runs` and `forkmerge show RUN`

Change the three numbered parts, from the top.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

import forkmerge as fm

# 1. The data: one data set per task, anything with __len__ and __getitem__. The target needs examples for training,
#    validation (merges are chosen on them) and, if you like, testing (read once, after training is over).
#    Here: "species" is the target and has few labels; "size" is an auxiliary that looks at the same features, and
#    some of its labels are missing; "noise" has random labels, so there is nothing to learn from it.


def load_data(labels: int) -> dict[str, TensorDataset]:
    """Return every data set by name. Replace the body by reading your own files."""
    generator = torch.Generator().manual_seed(0)
    to_features = torch.randn(20, 6, generator=generator)
    to_species = torch.randn(6, 4, generator=generator)
    to_size = torch.randn(6, 2, generator=generator)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(count, 20, generator=generator)
        return inputs, torch.tanh(inputs @ to_features)

    def species(count: int) -> TensorDataset:
        inputs, features = draw(count)
        return TensorDataset(inputs, (features @ to_species).argmax(dim=1))

    inputs, features = draw(2000)
    sizes = features @ to_size
    sizes[torch.rand(2000, generator=generator) < 0.3] = torch.nan  # missing labels
    noise_inputs, _ = draw(2000)
    return {
        "species": species(labels),
        "species, validation": species(200),
        "species, test": species(1000),
        "size": TensorDataset(inputs, sizes),
        "noise": TensorDataset(noise_inputs, torch.randint(4, (2000,), generator=generator)),
    }


# 2. The model and the losses. A loss function gets the model, a batch and the names of the tasks wanted, and returns
#    {task: scalar}. Where a batch has no label for a task, leave the task out. If several tasks share their inputs,
#    put them into one stream: its loss function then computes the encoder once and returns several losses.


class Net(nn.Module):
    """An encoder that all tasks share, and a head for each."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.heads = nn.ModuleDict({"species": nn.Linear(32, 4), "size": nn.Linear(32, 2), "noise": nn.Linear(32, 4)})

    def forward(self, inputs: Tensor, task: str = "species") -> Tensor:
        """Return the output of a task's head; without a task, the target's, as validation asks for it."""
        outputs: Tensor = self.heads[task](self.encoder(inputs))
        return outputs


def classify(model: nn.Module, batch: Any, tasks: Any, context: fm.Context) -> dict[str, Tensor]:
    """Losses of "species" and "noise", each of which has a stream of its own: `tasks` holds one name."""
    inputs, labels = batch
    return {task: cross_entropy(model(inputs, task), labels) for task in tasks}


def regress(model: nn.Module, batch: Any, tasks: Any, context: fm.Context) -> dict[str, Tensor]:
    """Loss of "size", on the examples that have a label."""
    inputs, sizes = batch
    has_label = ~sizes.isnan().any(dim=1)
    if not has_label.any():
        return {}
    return {"size": mse_loss(model(inputs[has_label], "size"), sizes[has_label])}


# 3. The recipe: what `forkmerge run` asks for. Its arguments can be set from outside: --set arguments.labels=30


def recipe(labels: int = 60) -> fm.Recipe:
    """Return the problem and how to train on it."""
    data = load_data(labels)
    problem = fm.Problem(
        target="species",
        streams=[
            fm.Stream(data["species"], classify, tasks="species", batch_size=32),
            fm.Stream(data["size"], regress, tasks="size", batch_size=32),
            fm.Stream(data["noise"], classify, tasks="noise", batch_size=32),
        ],
        # A metric is `metric(predictions, labels) -> number` or a torchmetrics object.
        validation=fm.Evaluation(data["species, validation"], metrics=fm.accuracy, batch_size=500),
        test=fm.Evaluation(data["species, test"], metrics=fm.accuracy, batch_size=500),
    )
    return fm.Recipe(
        problem=problem,
        model=Net,
        optimizer=fm.OptimizerOf("Adam", lr=1e-3),
        steps=500,
        # Two branches at a time, at first the target alone and that of all tasks; whoever wins a merge, every 50 steps,
        # stays, and the others take turns.
        # To compare, run again with --algorithm SingleTask or --algorithm Joint.
        algorithm=fm.ForkMerge(interval=50),
        # A network this small gains nothing from more threads; leave it out for a large one.
        options={"threads": 1},
    )

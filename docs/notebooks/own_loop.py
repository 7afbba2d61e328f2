# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From your own loop to a verdict
#
# The loop is yours, ForkMerge goes around it, and the end is a verdict on test data. The
# [tutorial](../tutorial.md) explains every step.
#
# Here the target is noisy measurements of a function at 40 points. `dense` measures the same function elsewhere, and
# `other` another function.

# %%
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import forkmerge as fm

torch.manual_seed(0)
torch.set_num_threads(1)


def measured(count: int, phase: float = 0.0) -> TensorDataset:
    x = torch.rand(count, 1) * 4 - 2
    return TensorDataset(x, torch.sin(3 * x + phase) + 0.3 * torch.randn(count, 1))


data = {"sparse": measured(40), "dense": measured(400), "other": measured(400, phase=3.0)}
validation, test = measured(200), measured(1000)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


# %% [markdown]
# ## The loop as it is, around it a fork

# %%
loaders = {task: DataLoader(dataset, batch_size=20, shuffle=True) for task, dataset in data.items()}


def train(model, optimizer, task_weights, epochs, batches=iter):
    for _ in range(epochs):
        for parts in zip(*(batches(loaders[task]) for task in task_weights), strict=False):
            weighted = zip(task_weights.values(), parts, strict=True)
            loss = sum(weight * mse_loss(model(x), y) for weight, (x, y) in weighted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def score(model):
    x, y = validation[:]
    return -mse_loss(model(x), y).item()


model = make_model()
branches = {
    "alone": {"sparse": 1.0},
    "+ dense": {"sparse": 1.0, "dense": 1.0},
    "+ other": {"sparse": 1.0, "other": 1.0},
}
forked = fm.fork(model, torch.optim.Adam(model.parameters(), lr=1e-2), branches)
for _ in range(3):
    for branch in forked:
        train(branch.model, branch.optimizer, branch.task_weights, epochs=20, batches=branch.paired)
    outcome = forked.merge(score)
forked.merged_into(model)
outcome

# %% [markdown]
# ## Did it help?
#
# The score cannot say, for coefficients were chosen by it. The same problem, described once, is trained with ForkMerge
# and on the target alone, and both are compared on test data:


# %%
def losses(model, batch, tasks, context):
    x, y = batch
    return {task: mse_loss(model(x), y) for task in tasks}


problem = fm.Problem(
    target="sparse",
    streams=[fm.Stream(dataset, losses, task, batch_size=20) for task, dataset in data.items()],
    validation=fm.Evaluation(validation, fm.absolute_error),
    test=fm.Evaluation(test, fm.absolute_error),
)
run = fm.ForkMerge("per_auxiliary", interval=40, floor=True).fit(
    problem, model=make_model, optimizer=fm.OptimizerOf("Adam", lr=1e-2), steps=120, threads=1
)
run

# %%
verdict = fm.give_verdict(run, problem)
verdict

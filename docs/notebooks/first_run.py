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
# # A first run
#
# This page is a notebook: open `docs/notebooks/first_run.py` in Jupyter with
# [jupytext](https://jupytext.readthedocs.io), or run it as a program. `pip install 'forkmerge[demo,report]'` installs
# what it needs.
#
# The target is to tell digits apart, with 60 labels. Three other data sets might help: MNIST, MNIST with wrong labels,
# and photographs. We do not say which.

# %%
import torch

import forkmerge as fm
from forkmerge.datasets import digits

torch.set_num_threads(1)  # a network this small gains nothing from more
problem = digits.problem(seed=1)
problem

# %% [markdown]
# One branch is trained on the target alone, and one with each of the others. Every 50 steps the branches are merged by
# what validates best on the target, and all go on from the merge. `floor=True` also trains the target alone to the end,
# for comparison, and returns that model if it validates better.

# %%
run = fm.ForkMerge("per_auxiliary", interval=50, floor=True).fit(
    problem, model=digits.DigitsNet, optimizer=fm.OptimizerOf("Adam", lr=1e-3), steps=150, seed=1, threads=1
)
run

# %% [markdown]
# *Coefficients* are the shares that branches had in a merge, and *relevance* is the weight of every task that they
# amount to. As numbers:

# %%
{task: round(weight, 2) for task, weight in run.relevance.items()}

# %% [markdown]
# Whether it helped is asked of test data, which nothing has looked at before:

# %%
verdict = fm.give_verdict(run, problem)
verdict

# %% [markdown]
# One seed and 150 steps say little; the [tutorial](../tutorial.md) goes on from here.

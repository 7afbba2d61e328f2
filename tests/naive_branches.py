"""Fork, train, merge as anybody would write it in plain torch: the slow twin of rates and tails of branches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from forkmerge.problem import example_order, randomness
from problems import TASKS, examples


def naive_branches(
    net: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    branches: Mapping[str, tuple[Mapping[str, float], float]],
    coefficients: Sequence[Mapping[str, float]],
    *,
    steps: int,
    interval: int,
    tail: float = 0.0,
    anneals: bool = True,
    scheduler: Any = None,
    inputs_and_labels: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> nn.Module:
    """Branches of `shared_problem`, each with its weights and factor on the rate, merged with coefficients by round."""
    inputs, labels = inputs_and_labels or examples(16, 1)
    with randomness.random_state_kept():
        randomness.set_random_state(randomness.derive(0, "model"))
        merged = net()
        models = {name: copy.deepcopy(merged) for name in branches}
        optimizers = {name: optimizer(model) for name, model in models.items()}
        schedulers = {name: scheduler(used) if scheduler else None for name, used in optimizers.items()}
        for index, start in enumerate(range(0, steps, interval)):
            end = min(start + interval, steps)
            last = round(tail * (end - start))
            for name, (weights, scale) in branches.items():
                model, used = models[name].train(), optimizers[name]
                for step in range(start, end):
                    in_tail = step >= end - last
                    chosen = example_order.batch_indices(len(inputs), 8, step, 0, "all")
                    randomness.set_random_state(randomness.derive(0, "all", "forward", step))
                    features = model.body(inputs[chosen])
                    total = torch.zeros(())
                    for task, weight in ({"tgt": weights["tgt"]} if in_tail else weights).items():
                        loss = cross_entropy(model.heads[task](features), labels[chosen, TASKS.index(task)])
                        total = total + loss * weight
                    used.zero_grad()
                    total.backward()
                    rates = [group["lr"] for group in used.param_groups]
                    for group in used.param_groups:
                        group["lr"] *= scale * ((end - step) / last if in_tail and anneals else 1)
                    used.step()
                    for group, rate in zip(used.param_groups, rates, strict=True):
                        group["lr"] = rate
                    if schedulers[name]:
                        schedulers[name].step()
            shares = coefficients[index]
            states = {name: copy.deepcopy(model.state_dict()) for name, model in models.items()}
            heaviest = max(shares, key=shares.__getitem__)
            blend = {
                key: sum(share * states[name][key] for name, share in shares.items() if share)
                if value.is_floating_point()
                else states[heaviest][key]
                for key, value in merged.state_dict().items()
            }
            merged.load_state_dict(blend)
            for model in models.values():
                model.load_state_dict(blend)
    return merged

"""The same loop with ForkMerge: `train` is the same; what changes is who calls it."""

import torch
from setting import loaders, net, validate
from torch.nn.functional import cross_entropy

import forkmerge as fm

torch.manual_seed(0)
train_loaders, valid_loader = loaders()
model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=750)
branches = {
    "alone": {"digits": 1.0},
    "+ faded": {"digits": 1.0, "faded": 1.0},
    "+ mislabelled": {"digits": 1.0, "mislabelled": 1.0},
}


def train(model, optimizer, scheduler, task_weights, batches, epochs):
    for _ in range(epochs):
        for batch in zip(*(batches(train_loaders[task]) for task in task_weights), strict=False):
            loss = sum(
                weight * cross_entropy(model(x), y) for weight, (x, y) in zip(task_weights.values(), batch, strict=True)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()


forked = fm.fork(model, optimizer, branches, scheduler=scheduler)
for _ in range(5):
    for branch in forked:
        train(branch.model, branch.optimizer, branch.scheduler, branch.task_weights, branch.paired, epochs=50)
    outcome = forked.merge(score=lambda candidate: validate(candidate, valid_loader))
    print({name: round(value, 2) for name, value in outcome.coefficients.items()}, f"{outcome.score:.3f}")
forked.merged_into(model)

print(f"ForkMerge: {validate(model, valid_loader):.3f}")

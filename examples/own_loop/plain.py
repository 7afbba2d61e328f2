"""A plain PyTorch loop that trains a target and two auxiliary tasks jointly."""

import torch
from setting import loaders, net, validate
from torch.nn.functional import cross_entropy

torch.manual_seed(0)
train_loaders, valid_loader = loaders()
model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=750)
task_weights = {"digits": 1.0, "faded": 1.0, "mislabelled": 1.0}


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


for _ in range(5):
    train(model, optimizer, scheduler, task_weights, batches=iter, epochs=50)

print(f"joint training: {validate(model, valid_loader):.3f}")

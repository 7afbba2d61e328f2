"""ForkMerge in a loop with Lightning Fabric: branches are set up once, and the rest is `fm.fork`."""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import forkmerge as fm


def examples(count, seed):
    """Inputs, and labels of a target, of an auxiliary that says the same with less noise, and of one that misleads."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, generator=draw)
    clean = inputs[:, 0] + inputs[:, 1]
    target = (clean + torch.randn(count, generator=draw) > 0).long()
    return TensorDataset(inputs, target, (clean > 0).long(), (clean < 0).long())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, inputs):
        return self.body(inputs)


TASKS = ("target", "cleaner", "opposite")
BRANCHES = {"alone": {"target": 1.0}, **{f"+ {task}": {"target": 1.0, task: 1.0} for task in TASKS[1:]}}

fabric = Fabric(accelerator="cpu", devices=1)
fabric.seed_everything(0, verbose=False)
train_loader = fabric.setup_dataloaders(DataLoader(examples(60, 1), batch_size=20, shuffle=True))
valid_loader = fabric.setup_dataloaders(DataLoader(examples(300, 2), batch_size=300))
model = Net()
forked = fm.fork(model, torch.optim.Adam(model.parameters(), lr=3e-3), BRANCHES)
trained = {branch.name: fabric.setup(branch.model, branch.optimizer) for branch in forked}


def score(candidate):
    inputs, target, *_ = next(iter(valid_loader))
    return -cross_entropy(candidate(inputs), target).item()


for _ in range(4):
    for branch in forked:
        branch_model, optimizer = trained[branch.name]
        for _ in range(4):
            for inputs, *labels in branch.paired(train_loader):
                outputs = branch_model(inputs)
                losses = {task: cross_entropy(outputs, y) for task, y in zip(TASKS, labels, strict=True)}
                optimizer.zero_grad()
                fabric.backward(sum(weight * losses[task] for task, weight in branch.task_weights.items()))
                optimizer.step()
    outcome = forked.merge(score)
    print({name: round(share, 2) for name, share in outcome.coefficients.items()}, f"{outcome.score:.3f}")
fabric.print(f"relevance of the tasks: {outcome.relevance}")

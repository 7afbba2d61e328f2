"""What both loops share: a target with 60 labels, a helpful and a harmful auxiliary task, a model, a validation."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def loaders():
    """Digits as the target; digits with missing pixels (helpful) and with wrong labels (harmful) as auxiliaries."""
    digits = load_digits()
    inputs = torch.tensor(digits.images / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, valid, rest = order[:60], order[60:260], order[260:1260]
    visible = torch.rand(inputs.shape, generator=torch.Generator().manual_seed(2)) > 0.6
    data = {
        "digits": TensorDataset(inputs[train].flatten(1), labels[train]),
        "faded": TensorDataset((inputs * visible)[rest].flatten(1), labels[rest]),
        "mislabelled": TensorDataset(inputs[rest].flatten(1), (labels[rest] + 1) % 10),
    }
    train_loaders = {task: DataLoader(dataset, batch_size=20, shuffle=True) for task, dataset in data.items()}
    return train_loaders, DataLoader(TensorDataset(inputs[valid].flatten(1), labels[valid]), batch_size=100)


def net():
    """One network for all tasks: they share the ten classes."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def validate(model, loader):
    """Accuracy of the target task."""
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return right / len(loader.dataset)

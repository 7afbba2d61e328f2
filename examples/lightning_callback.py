"""ForkMerge in a Lightning Trainer: the module returns its task losses by name, and a callback does the rest.

Digits with 60 labels are the target. "large" (is it 5 or more?) is an auxiliary task that knows something of them,
"noise" is one that does not.
"""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from forkmerge.integrations.lightning import ForkMergeCallback

CLASSES = {"digit": 10, "large": 2, "noise": 10}
BRANCHES = {
    "alone": {"digit": 1.0},
    "+ large": {"digit": 1.0, "large": 1.0},
    "+ noise": {"digit": 1.0, "noise": 1.0},
}


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1))
        self.heads = nn.ModuleDict({task: nn.Linear(64, classes) for task, classes in CLASSES.items()})

    def training_step(self, batch, batch_idx):
        images, *labels = batch
        features = self.body(images)
        losses = {
            task: cross_entropy(head(features), y) for (task, head), y in zip(self.heads.items(), labels, strict=True)
        }
        return {"loss": sum(losses.values()), **losses}

    def validation_step(self, batch, batch_idx):
        images, digits = batch
        self.log("val_accuracy", (self.heads["digit"](self.body(images)).argmax(1) == digits).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)}


def loaders():
    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).flatten(1)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, valid = order[:60], order[60:360]
    noise = torch.randint(10, (60,), generator=torch.Generator().manual_seed(1))
    known = TensorDataset(images[train], labels[train], (labels[train] >= 5).long(), noise)
    return (
        DataLoader(known, batch_size=20, shuffle=True, generator=torch.Generator().manual_seed(2)),
        DataLoader(TensorDataset(images[valid], labels[valid]), batch_size=150),
    )


def fit(*callbacks):
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        max_epochs=40,
        accelerator="cpu",
        callbacks=list(callbacks),
        log_every_n_steps=1,
        check_val_every_n_epoch=40,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), *loaders())
    return trainer.callback_metrics["val_accuracy"].item()


if __name__ == "__main__":
    print(f"all tasks, as ever: {fit():.3f}")
    forkmerge = ForkMergeCallback(BRANCHES, every=30, monitor="val_accuracy", mode="max")
    accuracy = fit(forkmerge)
    for merge in forkmerge.merges:
        print({name: round(share, 2) for name, share in merge.coefficients.items()}, f"{merge.score:.3f}")
    print(f"ForkMerge: {accuracy:.3f}")

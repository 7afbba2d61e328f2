"""ForkMerge in a Lightning Trainer: the bits of the plain loop, resumed inside a round, and limits by name."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import forkmerge as fm
from _asserts import assert_other_bits, assert_same_bits, bits
from forkmerge.integrations.lightning import ForkMergeCallback
from problems import examples

BRANCHES = {
    "alone": {"tgt": 1.0},
    "joint": {"tgt": 1.0, "aux": 0.5},
    "fast": {"task_weights": {"tgt": 1}, "lr_scale": 2},
}
TRAINING, HELD_OUT = TensorDataset(*examples(24, 1)), TensorDataset(*examples(22, 2))
SHARES = fm.Fixed((0.5, 0.3, 0.2))


class TwoTasks(pl.LightningModule):
    """A module as anybody would write it: BatchNorm, two heads, a schedule, a score."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.heads = nn.ModuleDict({"tgt": nn.Linear(8, 3), "aux": nn.Linear(8, 3)})
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=3)
        self.drawn: list[float] = []

    def losses(self, batch: Any) -> dict[str, Tensor]:
        inputs, labels = batch
        hidden = self.body(inputs)
        return {task: cross_entropy(head(hidden), labels[:, i]) for i, (task, head) in enumerate(self.heads.items())}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self.losses(batch)
        self.drawn.append(torch.rand(1).item())
        self.log("train_tgt", losses["tgt"])
        return {"loss": losses["tgt"] + losses["aux"], **losses}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        output = self.heads["tgt"](self.body(inputs))
        self.accuracy(output, labels[:, 0])
        self.log_dict({"val_loss": cross_entropy(output, labels[:, 0]), "val_accuracy": self.accuracy})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loaders() -> tuple[Any, Any]:
    return DataLoader(TRAINING, 8), DataLoader(HELD_OUT, 8)


def trainer(*callbacks: Any, **options: Any) -> pl.Trainer:
    silent = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    if not any(isinstance(each, pl.callbacks.ModelCheckpoint) for each in callbacks):
        silent["enable_checkpointing"] = False
    return pl.Trainer(**{"accelerator": "cpu", "max_steps": 10, "callbacks": list(callbacks), **silent, **options})


def callback(**options: Any) -> ForkMergeCallback:
    defaults = {"every": 4, "monitor": "val_loss", "mode": "min", "search": SHARES}
    return ForkMergeCallback(BRANCHES, **{**defaults, **options})


def fitted(module: pl.LightningModule, *callbacks: Any, path: Any = None, **options: Any) -> pl.Trainer:
    run = trainer(*callbacks, **options)
    run.fit(module, *loaders(), ckpt_path=path)
    return run


def mean_loss(module: Any) -> float:
    sums = [(cross_entropy(module.heads["tgt"](module.body(x)), y[:, 0]).item(), len(x)) for x, y in loaders()[1]]
    return -sum(loss * size for loss, size in sums) / sum(size for _, size in sums)


def plain_loop(steps: int = 10, every: int = 4, **options: Any) -> tuple[list[Any], Any]:
    """The same training without Lightning."""
    module = TwoTasks()
    setting = module.configure_optimizers()
    optimizer, scheduler = setting["optimizer"], setting["lr_scheduler"]["scheduler"]
    forked = fm.fork(module, optimizer, BRANCHES, scheduler=scheduler, **{"search": SHARES, **options})
    merges = []
    for index in range(steps):
        batch = list(loaders()[0])[index % 3]
        for branch in forked:
            losses = branch.model.losses(batch)
            branch.optimizer.zero_grad()
            sum(weight * losses[task] for task, weight in branch.task_weights.items()).backward()
            branch.optimizer.step()
            branch.scheduler.step()
        if (index + 1) % every == 0 or index + 1 == steps:
            merges.append(forked.merge(mean_loss))
    return merges, forked.merged_into(TwoTasks())


@pytest.mark.parametrize("options", [{}, {"search": fm.Greedy()}, {"optimizer_state": "average"}])
def test_it_has_the_bits_of_the_plain_loop(options: dict[str, Any]) -> None:
    module, used = TwoTasks(), callback(**options)
    run = fitted(module, used)
    merges, expected = plain_loop(**options)
    assert [merge.coefficients for merge in used.merges] == [merge.coefficients for merge in merges]
    assert [m.score for m in used.merges] == pytest.approx([m.score for m in merges], rel=1e-6)
    assert_same_bits(module, expected)
    assert run.global_step == 10
    assert run.lr_scheduler_configs[0].scheduler.last_epoch == 10
    assert {"optimizer_step", "training_step", "log"}.isdisjoint(vars(module))


class Stop(pl.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 7:
            raise RuntimeError("killed")


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty")  # a resumed run's is not
def test_killed_inside_a_round_it_resumes_to_the_same_bits(tmp_path: Path) -> None:
    whole = TwoTasks()
    fitted(whole, used := callback())

    def saves() -> Any:
        return pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=6, filename="{step}")

    with pytest.raises(RuntimeError, match="killed"):
        fitted(TwoTasks(), callback(), saves(), Stop())
    resumed, again = TwoTasks(), callback()
    fitted(resumed, again, saves(), path=tmp_path / "step=6.ckpt")
    assert_same_bits(resumed, whole)
    assert again.merges == used.merges[1:]
    checkpoint = torch.load(tmp_path / "step=6.ckpt", weights_only=True)
    weights = {name: tensor for name, tensor in checkpoint["state_dict"].items() if not name.startswith("accuracy")}
    first, merged = plain_loop(4)
    assert len(first) == 1
    assert_same_bits(weights, merged)  # the last merge, not a branch


def test_a_training_that_has_ended_goes_on_from_a_checkpoint_written_afterwards(tmp_path: Path) -> None:
    whole, first, longer = TwoTasks(), TwoTasks(), TwoTasks()
    fitted(whole, callback(every=3), max_steps=12)
    run = fitted(first, callback(every=3), max_steps=6)
    run.save_checkpoint(tmp_path / "six.ckpt")
    fitted(longer, callback(every=3), path=tmp_path / "six.ckpt", max_steps=12)
    assert_same_bits(longer, whole)
    with torch.no_grad():
        first.heads["tgt"].bias.add_(1)  # the module is the user's again
    run.save_checkpoint(tmp_path / "changed.ckpt")


def test_batches_are_read_once_and_branches_draw_the_same_numbers() -> None:
    reads: list[int] = []

    class Counted(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            reads.append(index)
            return super().__getitem__(index)

    module = TwoTasks()
    trainer(callback(), max_steps=3).fit(module, DataLoader(Counted(*examples(24, 1)), 8), loaders()[1])
    assert len(reads) == 24
    assert [module.drawn[i] for i in (0, 3, 6)] == [module.drawn[i] for i in (2, 5, 8)]
    assert len(set(module.drawn)) == 3


class Watch(pl.Callback):
    def __init__(self) -> None:
        self.validated: list[Any] = []
        self.metrics: dict[str, Any] = {}

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.validated.append((bits(pl_module), dict(trainer.callback_metrics)))


def test_validation_sees_the_last_merge_and_scoring_leaves_no_trace() -> None:
    watch = Watch()
    run = fitted(TwoTasks(), used := callback(every=3), watch, max_steps=6)
    assert len(watch.validated) == 2
    assert_other_bits(watch.validated[0][0], watch.validated[1][0])
    for (_, metrics), merge in zip(watch.validated, used.merges, strict=True):
        assert metrics["val_loss"].item() == pytest.approx(-merge.score, rel=1e-5)
        assert set(metrics) >= {"val_loss", "val_accuracy", "train_tgt", "forkmerge/score"}
    assert run.callback_metrics["forkmerge/coefficient/alone"].item() == 0.5


def test_a_torchmetrics_score_is_that_of_all_examples() -> None:
    module, watch = TwoTasks(), Watch()
    fitted(module, used := callback(every=3, monitor="val_accuracy", mode="max"), watch, max_steps=3)
    assert used.merges[0].score == pytest.approx(watch.validated[0][1]["val_accuracy"].item())


def test_what_training_step_logs_is_the_first_branch_s() -> None:
    losses = []
    for branches in (BRANCHES, {"alone": {"tgt": 1.0}}):
        used = ForkMergeCallback(branches, every=9, monitor="val_loss", mode="min")
        losses.append(fitted(TwoTasks(), used, max_steps=3).callback_metrics["train_tgt"].item())
    assert losses[0] == losses[1]


class TestRefusals:
    def refused(self, match: str, module: Any = None, used: Any = None, **options: Any) -> None:
        with pytest.raises(fm.ProblemError, match=match):
            fitted(module or TwoTasks(), used or callback(), **options)

    def test_what_lightning_does_otherwise(self) -> None:
        manual = TwoTasks()
        manual.automatic_optimization = False
        self.refused("manual optimization has none of", manual)

        class TwoOptimizers(TwoTasks):
            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.body.parameters()), torch.optim.SGD(self.heads.parameters())

        with pytest.raises(RuntimeError, match="multiple optimizers"):  # Lightning's own
            fitted(TwoOptimizers(), callback())
        self.refused(r"accumulate_grad_batches is 2: pass 1 and larger batches", accumulate_grad_batches=2)

    @pytest.mark.parametrize(
        ("fact", "match"),
        [
            (
                {"optimizers": [1, 2]},
                "needs one optimizer, configure_optimizers gave 2: put all",
            ),
            ({"world_size": 2}, "runs on one device, the trainer has 2: pass devices=1"),
            (
                {"precision_plugin": SimpleNamespace(scaler=1)},
                "gradient scaler to branches: pass precision='bf16-mixed'",
            ),
        ],
    )
    def test_what_this_machine_or_lightning_itself_does_not_come_to(self, fact: Any, match: str) -> None:
        facts = {"optimizers": [1], "world_size": 1, "accumulate_grad_batches": 1, "precision_plugin": None, **fact}
        with pytest.raises(fm.ProblemError, match=match):
            callback().on_train_start(SimpleNamespace(**facts, enable_validation=True), TwoTasks())

    def test_modules_that_do_not_say_enough(self) -> None:
        class OneLoss(TwoTasks):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return self.losses(batch)["tgt"]

        self.refused("training_step returned Tensor: let it return every task's loss under its name", OneLoss())
        wrong = ForkMergeCallback({"a": {"tgt": 1, "aus": 1}}, every=2, monitor="val_loss", mode="min")
        self.refused(r"unknown task 'aus'\. Did you mean 'aux'\?", used=wrong)
        self.refused(r"unknown logged value 'val_los'\. Did you mean 'val_loss'", used=callback(monitor="val_los"))

    def test_no_validation(self) -> None:
        class Unvalidated(pl.LightningModule):
            training_step, losses = TwoTasks.training_step, TwoTasks.losses
            configure_optimizers = TwoTasks.configure_optimizers

            def __init__(self) -> None:
                super().__init__()
                self.body, self.heads, self.drawn = nn.Linear(6, 8), TwoTasks().heads, []

        with pytest.raises(fm.ProblemError, match="by validation_step on validation batches: give the module one"):
            trainer(callback()).fit(Unvalidated(), loaders()[0])
        with (
            pytest.warns(UserWarning, match="have no `val_dataloader`"),  # Lightning's own
            pytest.raises(fm.ProblemError, match="pass val_dataloaders to fit"),
        ):
            trainer(callback()).fit(TwoTasks(), loaders()[0])

    def test_bad_options(self) -> None:
        with pytest.raises(fm.ProblemError, match="mode must be max"):
            callback(mode="maximum")
        with pytest.raises(fm.ProblemError, match="every must be a positive integer, got 0"):
            callback(every=0)

    def test_without_lightning_the_name_is_there_and_construction_says_what_to_type(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import importlib

        module = sys.modules[ForkMergeCallback.__module__]
        with monkeypatch.context() as patch:
            for name in [n for n in sys.modules if n.split(".")[0] == "lightning"]:
                patch.setitem(sys.modules, name, None)
            patch.setattr("forkmerge.errors.find_spec", lambda name: None)
            patch.delitem(sys.modules, module.__name__)
            fresh = importlib.import_module(module.__name__)
            with pytest.raises(fm.ProblemError, match=r"needs lightning: type pip install 'forkmerge\[lightning\]'"):
                fresh.ForkMergeCallback(BRANCHES, every=1, monitor="x", mode="max")
        sys.modules[module.__name__] = module

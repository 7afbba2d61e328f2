"""What a run gives back to the system, and what it holds once whatever the number of branches."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forkmerge as fm
from _asserts import assert_other_bits, assert_same_bits
from forkmerge.algorithms.events import CheckpointWritten
from forkmerge.algorithms.rounds import Rounds
from forkmerge.engine.training import release_memory
from forkmerge.engine.training.release_memory import MappedRows, give_back, thrifty
from paths import ROOT
from problems import ADAM, SGD, conv_net, fit, frozen_net, noisy_net, seeded, tied_net

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says and does all this")


@pytest.fixture
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_memory, "SMALLEST", 1)


@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_mapped_row_is_an_ordinary_tensor_that_keeps_its_values(tmp_path: Path, dtype: torch.dtype) -> None:
    rows, row = MappedRows(tmp_path), torch.arange(3000).to(dtype)
    held = rows.hold(row)
    row.zero_()
    held[0] = 7
    rows.rest()
    assert held[0] == 7
    assert torch.equal(held[1:], torch.arange(1, 3000).to(dtype))
    assert not list(tmp_path.iterdir())
    del rows
    gc.collect()
    assert held[0] == 7


@pytest.mark.usefixtures("_any_size")
def test_without_a_folder_or_room_a_row_is_copied_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left")

    row = torch.ones(9)
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    for rows in (MappedRows(None), MappedRows(tmp_path)):
        held = rows.hold(row)
        rows.rest()
        assert torch.equal(held, row)
        assert held.data_ptr() != row.data_ptr()


@linux
def test_mapped_memory_is_not_resident_while_it_rests(tmp_path: Path) -> None:
    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssFile")) << 10

    size = 32 << 20
    rows = MappedRows(tmp_path)
    held = rows.hold(torch.ones(size // 4))
    before = resident()
    rows.rest()
    assert before - resident() > 0.9 * size
    assert held.sum() == size // 4


@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize("net", [noisy_net, tied_net, conv_net, frozen_net])
def test_a_run_whose_last_merge_rests_on_disk_has_the_same_bits(net: Any, tmp_path: Path) -> None:
    algorithm = fm.ForkMerge("per_auxiliary", interval=3)
    assert_same_bits(fit(algorithm, net=net), fit(algorithm, net=net, folder=tmp_path / "run"))


@pytest.mark.usefixtures("_any_size")
def test_the_last_merge_is_kept_when_every_branch_diverges(tmp_path: Path) -> None:
    def explode(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 5 else float("inf"))

    runs = [
        fit(fm.ForkMerge("mixed", interval=5), steps=10, scheduler=explode, folder=folder)
        for folder in (None, tmp_path / "run")
    ]
    assert any("every branch was faulty" in note for note in runs[1].notes)
    assert all(torch.isfinite(parameter).all() for parameter in runs[1].model.parameters())
    assert_same_bits(*runs)


def test_large_models_alone_are_trained_thriftily_and_an_error_ends_that(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(release_memory, "_libc", lambda name: lambda *words: asked.append(words))
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    with pytest.raises(KeyError), thrifty(release_memory.LARGE):
        raise KeyError
    assert [size for _, size in asked] == [1 << 21, 1 << 25]
    with thrifty(release_memory.LARGE - 1):
        assert len(asked) == 2  # small models are left alone
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    with thrifty(release_memory.LARGE):
        assert len(asked) == 2  # and so is the user's own choice


def test_giving_back_frees_nothing_that_is_in_use() -> None:
    kept = [torch.full((1 << 18,), float(k)) for k in range(8)]
    del kept[::2]
    give_back(1 << 30)
    assert [tensor[-1].item() for tensor in kept] == [1.0, 3.0, 5.0, 7.0]


@pytest.mark.parametrize("branches", [2, 5])
def test_a_frozen_backbone_is_held_once_whatever_the_number_of_branches(
    branches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = frozen_net()
            self.register_parameter("weights", nn.Parameter(torch.randn(1000, 1000), requires_grad=False))

        def forward(self, x: torch.Tensor, task: str = "tgt") -> torch.Tensor:
            return self.net(x, task)

        @property
        def body(self) -> nn.Module:
            return self.net.body

        @property
        def heads(self) -> nn.ModuleDict:
            return self.net.heads

    held: list[int] = []
    merge = Rounds._merge

    def count(self: Rounds) -> Any:
        states = self.state.states()
        rows = [row for state in states for row in (*state.rows.values(), *state.optimizer_rows.values())]
        held.append(sum(row.numel() for row in rows) + sum(b.numel() for s in states for b in s.buffers.values()))
        return merge(self)

    monkeypatch.setattr(Rounds, "_merge", count)
    model = seeded(Wide)
    address = model.weights.data_ptr()
    mixtures = {f"b{k}": {"tgt": 1.0, "aux": 0.1 * k} for k in range(branches)}
    fit(fm.ForkMerge(mixtures, interval=3), net=model, optimizer=ADAM)
    assert model.weights.data_ptr() == address
    assert held
    assert max(held) < branches * 2000  # nothing of the backbone's million


def _grouped(model: nn.Module) -> torch.optim.Optimizer:
    heads, body = model.heads.parameters(), model.body.parameters()  # type: ignore[union-attr, operator]
    return torch.optim.SGD([{"params": list(body), "lr": 0.01}, {"params": list(heads)}], lr=0.3, momentum=0.9)


@pytest.mark.parametrize(
    ("net", "options"),
    [
        (tied_net, {}),
        (frozen_net, {"optimizer": ADAM}),
        (noisy_net, {"optimizer": _grouped}),
        (noisy_net, {"precision": "bfloat16"}),
        (conv_net, {"channels_last": True}),
    ],
    ids=["tied", "frozen", "grouped", "bfloat16", "channels_last"],
)
def test_every_kind_of_parameter_survives_a_whole_run_and_its_resumption(
    net: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    def stop(event: Any) -> None:
        if isinstance(event, CheckpointWritten) and event.step == 3:
            raise KeyboardInterrupt

    options = {"optimizer": SGD, "steps": 6, **options}
    algorithm = fm.ForkMerge("per_auxiliary", interval=3)
    whole = fit(algorithm, net=net, **options)
    with pytest.raises(KeyboardInterrupt):
        fit(algorithm, net=net, folder=tmp_path / "run", on_event=stop, **options)
    again = fit(algorithm, net=net, folder=tmp_path / "run", resume=True, **options)
    assert_same_bits(whole, again)
    assert_other_bits(whole, seeded(net))


@linux
def test_the_memory_of_a_run_is_what_its_branches_need() -> None:
    """The benchmark's own measurement on a model of 34 MB; half a model is left for the C library's fragments."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, str(ROOT / "benchmarks" / "memory.py"), "--case", "2", "SGD", "run", "56", folder]
        done = subprocess.run(words, env=environment, check=True, capture_output=True, text=True, timeout=200)
    assert json.loads(done.stdout)["peak"] <= 2 * (1 + 1) + 2 + 0.5

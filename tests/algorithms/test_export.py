"""What leaves a run: weights that plain torch loads, and a card that says how they came about."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import forkmerge as fm
from forkmerge.algorithms.export import export_run
from forkmerge.algorithms.measure_test_split import measure_test
from problems import ADAM, Net, evaluation, noisy_net, plain_net, seeded, shared_problem, tied_net


def train(folder: Path, model: Any = plain_net, algorithm: fm.Algorithm | None = None, **options: Any) -> fm.Run:
    chosen = algorithm or fm.ForkMerge("per_auxiliary", interval=4)
    problem = shared_problem(test=evaluation(40, seed=3))
    run = chosen.fit(problem, model=model, optimizer=ADAM, steps=8, folder=folder, **options)
    measure_test(run, problem, folder)
    return run


@pytest.mark.parametrize("make", [plain_net, noisy_net, tied_net], ids=["plain", "BatchNorm", "tied"])
def test_the_exported_weights_load_strictly_and_are_the_run_s(make: Any, tmp_path: Path) -> None:
    run = train(tmp_path / "run", model=make)
    out = export_run(tmp_path / "run", tmp_path / "out")
    other = seeded(make, seed=5)
    other.load_state_dict(load_file(out / "model.safetensors"), strict=True)
    assert run.model is not None
    expected = run.model.state_dict()
    assert other.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())


def test_loading_needs_torch_and_safetensors_and_nothing_of_this_library(tmp_path: Path) -> None:
    train(tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    code = (
        "import sys; sys.modules['forkmerge'] = None\n"
        "from safetensors.torch import load_file\n"
        "print(len(load_file('out/model.safetensors')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(seeded(plain_net).state_dict())


def test_the_card_tells_how_the_weights_came_about(tmp_path: Path) -> None:
    source = {"settings": {"recipe": "a:b"}, "folders": [], "command": "forkmerge run a:b --seed 3"}
    run = train(tmp_path / "a run", source=source, seed=3)
    out = export_run(tmp_path / "a run", tmp_path / "out")
    card, text = json.loads((out / "card.json").read_text()), (out / "README.md").read_text()
    assert [r["coefficients"] for r in card["rounds"]] == run.coefficients
    assert card["relevance"] == run.relevance
    assert card["command"] == "forkmerge run a:b --seed 3"
    assert card["environment"]["torch"] == torch.__version__
    assert card["test"] == run.test
    assert card["settings"]["training"]["steps"] == 8
    assert card["model"]["kind"] == f"{Net.__module__}:{Net.__qualname__}"
    assert text.startswith("# a run\n")
    for part in ("forkmerge run a:b --seed 3", "| aux | 1 | 1 | 0 |", "load_file(", "torch | " + torch.__version__):
        assert part in text, part
    for r in run.rounds:
        assert "| " + " | ".join(f"{value:.2f}" for value in r.coefficients.values()) + " |" in text
    assert "Mitigating Negative Transfer in Auxiliary-Task Learning" in text


def test_the_card_of_a_run_from_python_and_of_one_branch_say_so(tmp_path: Path) -> None:
    train(tmp_path / "run", algorithm=fm.SingleTask())
    text = (export_run(tmp_path / "run", tmp_path / "out") / "README.md").read_text()
    assert "SingleTask(…).fit(…) in a Python program" in text
    assert "those of the last step" in text
    assert "Coefficients" not in text


def test_a_refitted_run_shows_the_coefficients_once(tmp_path: Path) -> None:
    train(tmp_path / "run", algorithm=fm.ForkMerge("mixed", interval=4, refit=True))
    text = (export_run(tmp_path / "run", tmp_path / "out") / "README.md").read_text()
    assert "The refit repeated them" in text
    assert text.count("| 8 |") == 1


def test_a_run_that_is_not_finished_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "run")
    (tmp_path / "run/result.json").unlink()
    with pytest.raises(fm.StoreError, match="is not finished: continue it with `forkmerge resume"):
        export_run(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_refused_and_an_empty_one_taken(tmp_path: Path) -> None:
    train(tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").touch()
    (tmp_path / "file").touch()
    for name in ("full", "file"):
        with pytest.raises(fm.StoreError, match="exists and is not an empty folder"):
            export_run(tmp_path / "run", tmp_path / name)
    assert os.listdir(tmp_path / "full") == ["mine"]
    (tmp_path / "empty").mkdir()
    export_run(tmp_path / "run", tmp_path / "empty")
    assert sorted(os.listdir(tmp_path / "empty")) == ["README.md", "card.json", "model.safetensors"]


def test_a_damaged_model_is_not_exported(tmp_path: Path) -> None:
    train(tmp_path / "run")
    model = tmp_path / "run/model.safetensors"
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    with pytest.raises(fm.StoreError, match="is damaged"):
        export_run(tmp_path / "run", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_a_failed_export_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "run")

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("forkmerge.algorithms.export.write_file", fail)
    with pytest.raises(fm.StoreError, match="No space left on device"):
        export_run(tmp_path / "run", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["run"]

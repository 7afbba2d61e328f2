"""The config a run's folder holds: folders that cannot be used, and runs that were started differently."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forkmerge as fm
from _asserts import assert_same_bits
from disk_faults import Faults
from forkmerge.algorithms.resolved_config import _with_former_options, open_run, resume_with
from forkmerge.engine.executors import shared_memory, worker_team
from forkmerge.engine.storage.run_folder import status
from paths import TESTS
from problems import (
    ADAM,
    Augmented,
    Stopped,
    counting_steps,
    fit,
    frozen_net,
    plain_net,
    seeded,
    shared_problem,
    stop_at,
)
from run_folders import as_earlier_version


class TestFolders:
    def test_a_folder_that_exists_is_refused_with_both_ways_out(self, monkeypatch: Any, tmp_path: Path) -> None:
        (tmp_path / "mine").write_text("precious")
        with counting_steps(monkeypatch) as trained, pytest.raises(fm.StoreError, match="exists and is not an empty"):
            fit(folder=tmp_path)
        assert trained == []
        assert [item.name for item in tmp_path.iterdir()] == ["mine"]

    def test_a_finished_run_is_not_overwritten(self, tmp_path: Path) -> None:
        fit(folder=tmp_path / "run", steps=2)
        with pytest.raises(fm.StoreError, match=r"choose another folder or continue it with `forkmerge resume"):
            fit(folder=tmp_path / "run", steps=2)

    def test_a_folder_below_a_file_cannot_be_made(self, monkeypatch: Any, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with counting_steps(monkeypatch) as trained, pytest.raises(fm.StoreError, match="cannot create the run folder"):
            fit(folder=tmp_path / "file" / "run")
        assert trained == []

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_folder_that_cannot_be_written(self, monkeypatch: Any, tmp_path: Path) -> None:
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
        try:
            with counting_steps(monkeypatch) as trained, pytest.raises(fm.StoreError, match="Permission denied"):
                fit(folder=tmp_path / "run")
            assert trained == []
        finally:
            tmp_path.chmod(stat.S_IRWXU)

    def test_resuming_or_keeping_branches_needs_a_folder(self, monkeypatch: Any) -> None:
        with counting_steps(monkeypatch) as trained:
            with pytest.raises(fm.StoreError, match="resume=True needs the folder of the run: pass folder="):
                fit(resume=True)
            with pytest.raises(fm.ProblemError, match="keep_branches=True needs a folder to keep them in"):
                fit(fm.ForkMerge("mixed", keep_branches=True))
        assert trained == []

    def test_resuming_a_folder_that_is_no_run_is_refused(self, monkeypatch: Any, tmp_path: Path) -> None:
        (tmp_path / "mine").write_text("precious")
        with counting_steps(monkeypatch) as trained, pytest.raises(fm.StoreError, match="is not a run folder"):
            fit(folder=tmp_path, resume=True)
        assert trained == []


def frozen_seeded() -> nn.Module:
    return seeded(frozen_net)


class TestOtherOptions:
    @pytest.fixture
    def killed(self, tmp_path: Path) -> Path:
        with pytest.raises(Stopped):
            fit(fm.ForkMerge("mixed", interval=4), net=frozen_seeded, folder=tmp_path / "run", on_event=stop_at(6))
        return tmp_path / "run"

    in_sixes = shared_problem(validation=replace(shared_problem().target_validation, batch_size=6))

    @pytest.mark.parametrize(
        ("options", "difference"),
        [
            ({"steps": 16}, r"training\.steps was 12 and is 16 now"),
            ({"seed": 1}, r"training\.seed was 0 and is 1 now"),
            ({"optimizer": ADAM}, r"training\.optimizer was 'SGD\(lr=0\.3.*' and is 'Adam\(lr=0\.01\)' now"),
            ({"clip_norm": 1.0}, r"training\.clip_norm was None and is 1\.0 now"),
            ({"scheduler": fm.SchedulerOf("StepLR", step_size=3)}, r"training\.scheduler was None and is 'StepLR"),
            ({"threads": 2}, r"training\.threads was 1 and is 2 now"),
            ({"algorithm": fm.ForkMerge("mixed", interval=3)}, r"algorithm\.interval was 4 and is 3 now"),
            ({"algorithm": fm.SingleTask(interval=4)}, r"algorithm\.name was 'ForkMerge' and is 'SingleTask' now"),
            (
                {"algorithm": fm.ForkMerge("mixed", interval=4, search=fm.Grid(7))},
                r"algorithm\.search was None and is .*7",
            ),
            ({"problem": shared_problem(weights="sampling")}, r"problem\.weights was 'loss' and is 'sampling' now"),
            ({"problem": shared_problem(Augmented(17))}, r"problem\.streams\.all\.examples was 16 and is 17 now"),
            (
                {"problem": in_sixes},
                r"problem\.validation\.batch_size was \d+ and is 6 now",
            ),
            ({"net": plain_net}, r"model\.\w+ was"),
            ({"net": lambda: seeded(frozen_net, 9)}, r"model\.fixed was '\w+' and is '\w+' now"),
        ],
    )
    def test_a_run_that_was_started_differently_names_the_difference(
        self, killed: Path, options: dict[str, Any], difference: str, monkeypatch: Any
    ) -> None:
        before = {path: path.read_bytes() for path in killed.rglob("*") if path.is_file()}
        settings = {"algorithm": fm.ForkMerge("mixed", interval=4), "net": frozen_seeded, **options}
        with (
            counting_steps(monkeypatch) as trained,
            pytest.raises(fm.StoreError, match="started differently") as caught,
        ):
            fit(folder=killed, resume=True, **settings)
        assert trained == []
        caught.match(difference)
        assert {path: path.read_bytes() for path in killed.rglob("*") if path.is_file()} == before
        assert status(killed) == "interrupted", "the lock is free again"

    def test_a_run_begun_before_these_were_noted_goes_on(self, killed: Path) -> None:
        config = json.loads((killed / "config.json").read_text())
        assert config["training"].pop("statistics") == "all"
        assert config["problem"]["validation"].pop("batch_size") > 0
        assert config["algorithm"].pop("prune_keeps") == "target"
        assert config["algorithm"].pop("search_by") is None
        assert config["algorithm"].pop("rule") == "argmax"
        assert config["algorithm"].pop("tail") is None
        assert config["algorithm"].pop("tail_anneal") == "linear"
        as_earlier_version(killed, **{key: config[key] for key in ("training", "problem", "algorithm")})
        assert fit(fm.ForkMerge("mixed", interval=4), net=frozen_seeded, folder=killed, resume=True).model is not None

    def test_but_not_with_an_option_that_has_another_value_now(self, killed: Path) -> None:
        config = json.loads((killed / "config.json").read_text())
        del config["algorithm"]["prune_keeps"]
        as_earlier_version(killed, algorithm=config["algorithm"])
        with pytest.raises(fm.StoreError, match=r"algorithm\.prune_keeps was 'target' and is 'largest' now"):
            fit(fm.ForkMerge("mixed", interval=4, prune_keeps="largest"), net=frozen_seeded, folder=killed, resume=True)

    def test_branches_that_were_given_before_they_had_options_go_on(self, tmp_path: Path) -> None:
        mixtures = [fm.Mixture("alone", {"tgt": 1.0}), fm.Mixture("joint", {"tgt": 1.0, "odd": 1.0})]
        for given, options in ((mixtures, ("lr_scale", "auxiliary_streams")), (fm.PerAuxiliary(), ("joint",))):
            folder, algorithm = tmp_path / str(len(options)), fm.ForkMerge(given, interval=4)
            with pytest.raises(Stopped):
                fit(algorithm, folder=folder, on_event=stop_at(9))
            config = json.loads((folder / "config.json").read_text())
            described = config["algorithm"]["mixtures"]
            for item in described.get("branches", [described]):
                for option in options:
                    del item[option]
            as_earlier_version(folder, algorithm=config["algorithm"])
            assert_same_bits(fit(algorithm, folder=folder, resume=True), fit(algorithm))

    def test_threads_stay_those_of_the_start_unless_asked_for(self, killed: Path, monkeypatch: Any) -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
        monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # or the tests after this one would have 4
        run = fit(fm.ForkMerge("mixed", interval=4), net=frozen_seeded, folder=killed, resume=True, threads=None)
        assert run.environment["threads"] == 1

    def test_another_environment_warns_with_both_and_leaves_a_note(self, killed: Path) -> None:
        config = json.loads((killed / "config.json").read_text())
        as_earlier_version(killed, environment={**config["environment"], "torch": "1.0.0", "cpu": "AVX9"})
        message = rf"resumed in another environment, the bits may differ: torch 1\.0\.0 → {torch.__version__}"
        with pytest.warns(UserWarning, match=message.replace("+", r"\+")) as caught:
            run = fit(fm.ForkMerge("mixed", interval=4), net=frozen_seeded, folder=killed, resume=True)
        assert len(caught) == 1
        assert str(caught[0].message) in run.notes
        assert caught[0].filename == str(TESTS / "problems.py"), "it points at the call of fit"


def test_a_full_disk_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, folder = fit(fm.SingleTask()), tmp_path / "run"
    with monkeypatch.context() as patch:
        faults = Faults(patch)
        faults.arm(16, "before", OSError(errno.ENOSPC, "No space left on device"))
        message = rf"No space left on device\. What was written is whole: .*fit\(…, folder='{folder}', resume=True\)\."
        with pytest.raises(fm.StoreError, match=message):
            fit(fm.SingleTask(), folder=folder)
    assert_same_bits(fit(fm.SingleTask(), folder=folder, resume=True).model, whole.model)


def test_a_machine_without_a_free_file_ends_the_run_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, folder, received = fit(workers=2), tmp_path / "run", count(1)

    def receive(connection: Any) -> Any:
        if next(received) == 9:
            raise OSError(errno.EMFILE, "Too many open files")
        return shared_memory.receive(connection)

    with monkeypatch.context() as patch:
        patch.setattr(worker_team, "receive", receive)
        message = rf"too many open files. Raise .* ulimit -n, .* whole: .*folder='{folder}', resume=True\)\."
        with pytest.raises(fm.ResourceError, match=message):
            fit(workers=2, folder=folder)
    assert_same_bits(fit(workers=2, folder=folder, resume=True).model, whole.model)


def test_a_run_from_a_recipe_says_the_command() -> None:
    assert resume_with("a b", {"settings": {}}) == "continue with: forkmerge resume 'a b'"


def test_a_disk_that_is_too_small_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=2_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(fm.StoreError, match=r"run will need about 0.0.* MB, and 0.002 MB are free there: free some"):
        fit(fm.ForkMerge("mixed", interval=4), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("algorithm", [], r"\[\] is no object"),
        ("algorithm", {"name": 3}, "3 is no text"),
        ("problem", {"target": "tgt"}, "missing 1 required positional argument: 'validation'"),
        ("training", {"steps": "12", "seed": 0, "threads": 1}, "'12' is no whole number"),
        ("source", {"settings": []}, r"\[\] is no object"),
        ("environment", None, "None is no object"),
    ],
)
def test_a_config_that_does_not_say_what_it_must_is_refused_by_name(
    tmp_path: Path, key: str, value: Any, said: str
) -> None:
    fit(folder=tmp_path / "run", steps=2)
    as_earlier_version(tmp_path / "run", **{key: value})
    for call in (lambda: open_run(tmp_path / "run"), lambda: fit(folder=tmp_path / "run", steps=2, resume=True)):
        with pytest.raises(fm.StoreError, match=rf"run/config\.json is not a SavedConfig: .*{said}\.$"):
            call()
    assert status(tmp_path / "run") == "finished"


def test_a_run_with_the_checkpoints_of_another_does_not_go_on(tmp_path: Path, monkeypatch: Any) -> None:
    for seed in (0, 1):
        with pytest.raises(Stopped):
            fit(fm.ForkMerge("mixed", interval=4), folder=tmp_path / str(seed), on_event=stop_at(6), seed=seed)
    shutil.rmtree(tmp_path / "1/checkpoints")
    shutil.copytree(tmp_path / "0/checkpoints", tmp_path / "1/checkpoints")
    with counting_steps(monkeypatch) as trained, pytest.raises(fm.StoreError, match="was written by another run"):
        fit(fm.ForkMerge("mixed", interval=4), folder=tmp_path / "1", resume=True, seed=1)
    assert trained == []
    shutil.copy(tmp_path / "1/config.json", tmp_path / "0/config.json")
    with pytest.raises(fm.StoreError, match=r"0/checkpoints/\d+ was written by another run"):
        fit(fm.ForkMerge("mixed", interval=4), folder=tmp_path / "0", resume=True, seed=1)


def test_a_form_of_forkmerge_that_an_earlier_version_described_without_branches_named_is_the_same() -> None:
    stored = {"name": "Averaged", "algorithm": {"kind": "ForkMerge", "mixtures": None, "turns": "rotation"}, "runs": 2}
    assert _with_former_options(stored)["algorithm"]["turns"] is None
    named = {"kind": "ForkMerge", "mixtures": {"kind": "PerAuxiliary"}, "turns": "rotation"}
    assert _with_former_options(named)["turns"] == "rotation"
    later = {"kind": "ForkMerge", "mixtures": None, "turns": "rotation", "validation_examples": None}
    assert _with_former_options(later)["turns"] == "rotation"

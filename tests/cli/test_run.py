"""The command as a user meets it: what it prints, where, with which exit code, and what survives a kill."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import forkmerge as fm
from command_line import TINY, error_of, invoke
from forkmerge.cli.commands import app
from forkmerge.engine.storage.json_files import read_object, write_object
from forkmerge.engine.storage.run_folder import RunFolder


def model_bytes(folder: str) -> bytes:
    return Path(folder, "model.safetensors").read_bytes()


def test_a_new_user_gets_from_nothing_to_an_exported_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    written = invoke("new", "own_data.py").stdout
    assert "forkmerge run own_data:recipe" in written
    assert "my_problem" not in Path("own_data.py").read_text()
    quick = ("run", "own_data:recipe", "--steps", "20", "--set", "algorithm.interval=10")
    assert "search 40" in invoke(*quick, "--dry-run").stdout
    assert not Path("runs").exists()
    folder = "runs/own_data-forkmerge-seed0"
    shown = invoke(*quick).stdout
    assert re.search(r"test +accuracy 0\.\d+", shown)
    assert re.search(r"verdict +(better|worse|no difference shown)", shown)
    assert re.search(r"accuracy 0\.\d+ → 0\.\d+ \(.*\]\); 95 % over 1000 test examples", shown)
    assert re.search(r"one seed, at 2\.[05] times the steps of single-task training", shown)
    same = "--set steps=20 --set algorithm.interval=10"  # what was run, its branches and settings, with more seeds
    assert f"compare own_data:recipe --methods stl,recipe --seeds 5 {same}`" in shown
    assert folder in shown
    row = next(line for line in invoke("runs").stdout.splitlines() if "own_data" in line)
    assert re.search(r"ForkMerge +species +finished +20 +accuracy", row)
    assert "verdict" in invoke("show", folder).stdout
    plain = invoke(*quick, "--no-reference").stdout
    assert "relevance" in plain
    assert "verdict" not in plain
    assert "whether it helped was not measured: without --no-reference it is" in plain
    unasked = invoke(*quick, "--set", "algorithm.floor=false").stdout
    assert "whether it helped was not measured: with --set algorithm.floor=true it is" in unasked
    assert invoke("export", folder, "out").stdout.split() == [
        "out/README.md",
        "out/card.json",
        "out/model.safetensors",
    ]
    sys.modules.pop("own_data")


def test_a_run_is_named_after_problem_algorithm_and_seed_and_counted_on(tiny: Any) -> None:
    invoke("run", "tiny:recipe", "--steps", "2")
    invoke("run", "tiny:recipe", "--steps", "2")
    invoke("run", "tiny:recipe", "--steps", "2", "--algorithm", "SingleTask", "--seed", "7")
    Path("other.toml").write_text('recipe = "tiny:recipe"\nsteps = 2\n[algorithm]\nname = "Joint"\n')
    invoke("run", "other.toml", "--workers", "1")
    assert sorted(os.listdir("runs")) == [
        "other-joint-seed0",
        "tiny-forkmerge-seed0",
        "tiny-forkmerge-seed0-2",
        "tiny-singletask-seed7",
    ]


def test_json_is_all_there_is_on_standard_output_and_progress_is_on_standard_error(tiny: Any) -> None:
    done = invoke("run", "tiny:recipe", "--json", "--out", "r")
    data = json.loads(done.stdout)
    assert data["folder"] == "r"
    assert set(data["test"]) == {"accuracy"}
    assert fm.Run.from_json({key: data[key] for key in data if key != "folder"}).steps == 24
    assert "building the recipe" in done.stderr
    assert "search 3/3  step 24  score" in done.stderr
    assert json.loads(invoke("run", "tiny:recipe", "--dry-run", "--json").stdout)["branch_steps"]["total"] == 64
    (row,) = json.loads(invoke("runs", ".", "--json").stdout)
    assert (row["name"], row["status"], row["test_metrics"]) == ("r", "finished", data["test"])
    assert json.loads(invoke("show", "r", "--json").stdout)["run"]["rounds"] == data["rounds"]
    assert json.loads(invoke("resume", "r", "--json").stdout)["status"] == "finished"
    assert "out/model.safetensors" in json.loads(invoke("export", "r", "out", "--json").stdout)["files"]


def test_options_reach_the_run(tiny: Any) -> None:
    Path("p.toml").write_text(
        'recipe = "tiny:recipe"\n[algorithm]\nname = "ForkMerge"\ninterval = 6\n[training]\nclip_norm = 2.0\n'
    )
    words = ["run", "p.toml", "--target", "aux", "--steps", "12", "--seed", "5", "--json", "--out"]
    assert "'aux' has no validation data" in invoke(*words, "r", code=2).stderr
    words[words.index("aux")] = "tgt"
    changes = ["--set", "algorithm.search=binary", "--set", "training.accumulate=2", "--set", "arguments.examples=9"]
    data = json.loads(invoke(*words, "r", *changes).stdout)
    assert (data["steps"], data["seed"]) == (12, 5)
    settings = data["settings"]
    assert settings["algorithm"]["search"]["kind"] == "Binary"
    assert settings["algorithm"]["interval"] == 6
    assert (settings["training"]["clip_norm"], settings["training"]["accumulate"]) == (2.0, 2)
    assert settings["problem"]["streams"]["tgt+aux"]["examples"] == 9
    other = json.loads(invoke(*words, "s", "--algorithm", "Joint").stdout)["settings"]["algorithm"]
    assert (other["name"], other["interval"]) == ("Joint", None)  # another algorithm, so none of the file's options


def stop_at(count: int, stop: Callable[[], None]) -> Callable[[int], None]:
    """Call `stop` in the `count`-th loss, once."""
    seen = 0

    def on_step(step: int) -> None:
        nonlocal seen
        seen += 1
        if seen == count:
            stop()

    return on_step


def interrupt() -> None:
    raise KeyboardInterrupt


def send(number: int, times: int = 1) -> None:
    for _ in range(times):
        os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("stop", "code"),
    [(lambda: send(signal.SIGINT), 130), (lambda: send(signal.SIGTERM), 143)],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_an_interrupt_writes_a_checkpoint_after_the_step_and_the_resumed_run_has_the_same_bits(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, stop: Callable[[], None], code: int
) -> None:
    whole = invoke("run", "tiny:recipe", "--out", "whole")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        patch.setattr(tiny, "_on_step", stop_at(30, stop))
        cut = invoke("run", "tiny:recipe", "--out", "a cut", code=code)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    position = "step 16 of 'alone', 12 of 'aux'"
    assert cut.stderr.splitlines()[-1] == (
        f"interrupted; the last checkpoint is at {position}. Continue with: forkmerge resume 'a cut'"
    )
    assert f"it continues from {position} with: forkmerge resume 'a cut'" in invoke("show", "a cut").stdout
    resumed = invoke("resume", "a cut")
    assert f"continuing from the checkpoint at {position}" in resumed.stderr
    assert model_bytes("a cut") == model_bytes("whole")
    assert resumed.stdout.splitlines()[:6] == whole.stdout.splitlines()[:6]


TWICE = [(lambda: send(signal.SIGINT, 2), 130), (lambda: send(signal.SIGTERM, 2), 143), (interrupt, 130)]


@pytest.mark.parametrize(("stop", "code"), TWICE, ids=["Ctrl-C", "SIGTERM", "raised"])
def test_a_second_interrupt_ends_at_once_and_the_resumed_run_has_the_same_bits(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, stop: Callable[[], None], code: int
) -> None:
    whole = invoke("run", "tiny:recipe", "--out", "whole")
    handler = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(tiny, "_on_step", stop_at(30, stop))
        cut = invoke("run", "tiny:recipe", "--out", "a cut", code=code)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert cut.stderr.splitlines()[-1] == (
        "interrupted; the last checkpoint is at step 8. Continue with: forkmerge resume 'a cut'"
    )
    assert "interrupted" in invoke("runs", ".").stdout
    shown = invoke("show", "a cut").stdout
    assert "ForkMerge on 'tgt': interrupted at step 16 of 24" in shown
    assert "it continues from step 8 with: forkmerge resume 'a cut'" in shown
    resumed = invoke("resume", "a cut")
    assert "continuing from the checkpoint at step 8" in resumed.stderr
    assert model_bytes("a cut") == model_bytes("whole")
    assert resumed.stdout.splitlines()[:6] == whole.stdout.splitlines()[:6]


def test_interrupted_before_the_first_checkpoint_it_says_so(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tiny, "_on_step", stop_at(1, interrupt))  # while the losses are being checked
        cut = invoke("run", "tiny:recipe", "--out", "r", code=130)
    assert cut.stderr.splitlines()[-1] == "interrupted before anything was written."
    assert not Path("r").exists()


def test_a_finished_run_is_shown_again_and_its_test_split_measured_if_a_kill_prevented_it(tiny: Any) -> None:
    recipe = fm.load_recipe("tiny:recipe")
    recipe.fit(folder="r")
    assert json.loads(invoke("show", "r", "--json").stdout)["test_metrics"] is None
    first = invoke("resume", "r")
    assert "r is finished already." in first.stderr
    assert re.search(r"test +accuracy", first.stdout)
    assert json.loads(invoke("show", "r", "--json").stdout)["test_metrics"]["accuracy"] > 0.5


def test_a_run_from_python_says_how_to_continue_it(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny.recipe()
    monkeypatch.setattr(tiny, "_on_step", stop_at(30, interrupt))
    with pytest.raises(KeyboardInterrupt):
        recipe.fit(folder="r")
    assert "r was started from Python: continue it with fit(…, folder='r', resume=True)" in error_of("resume", "r")
    assert "resume=True" in invoke("show", "r").stdout


def cut_short(tiny: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tiny, "_on_step", stop_at(36, interrupt))
        invoke("run", "tiny:recipe", "--out", "r", *words, code=130)


def test_code_that_changed_since_the_start_is_named(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_short(tiny, monkeypatch)
    Path("tiny.py").write_text(TINY + "# changed\n")
    assert "warning: the file of tiny:recipe has changed since r was started" in invoke("resume", "r").stderr


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    invoke("run", "tiny:recipe", "--out", "whole")
    cut_short(tiny, monkeypatch)
    newest = max(Path("r/checkpoints").iterdir())
    os.truncate(newest / "state.safetensors", 10)
    looked = invoke("show", "r")
    assert f"warning: skipped the damaged checkpoint {newest}" in looked.stderr
    assert "it continues from step 8 " in looked.stdout
    resumed = invoke("resume", "r")
    assert f"warning: skipped the damaged checkpoint {newest}" in resumed.stderr
    assert "note: skipped the damaged checkpoint" in resumed.stdout
    assert model_bytes("r") == model_bytes("whole")


def test_resume_refuses_what_runs_and_what_was_started_differently(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_short(tiny, monkeypatch)
    with RunFolder.open("r"):
        assert "already running in another process" in error_of("resume", "r")
        assert re.search(r"\brunning\b", invoke("runs", ".").stdout)
    Path("tiny.py").write_text(TINY.replace("lr=0.01", "lr=0.02"))
    sys.modules.pop("tiny")
    result = invoke("resume", "r", code=2)
    assert "training.optimizer was 'Adam(lr=0.01)' and is 'Adam(lr=0.02)' now" in result.stderr


def test_kept_branches_say_beforehand_what_disk_they_take(tiny: Any) -> None:
    done = invoke("run", "tiny:recipe", "--set", "algorithm.keep_branches=true", "--out", "r")
    assert re.match(r"the branches of every round are kept: .*B on disk in all", done.stderr)


def test_a_killed_run_of_two_processes_resumes_to_the_same_bits_and_leaves_no_process(tiny: Any) -> None:
    words = ["run", "tiny:recipe", "--steps", "96", "--set", "training.threads=1"]
    environment = {**os.environ, "TINY_SLEEP": "0.01", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "forkmerge.cli", *words, "--workers", "2", "--out", "killed"]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    record, deadline = Path("killed/record.jsonl"), time.monotonic() + 60
    while not (record.exists() and record.read_text().count('"round"') > 2) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.random() / 2)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)  # its workers hold the pipe open until they have ended, too
    assert process.returncode == -signal.SIGKILL
    assert not Path("killed/result.json").exists()
    invoke("resume", "killed", "--workers", "1")
    invoke(*words, "--out", "whole")
    assert model_bytes("killed") == model_bytes("whole")


@pytest.fixture
def cut(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that this user has started, interrupted after its first round."""
    monkeypatch.setattr(tiny, "_on_step", stop_at(40, interrupt))
    invoke("run", "tiny:recipe", "--out", "cut", "--set", "arguments.examples=12", code=130)
    monkeypatch.setattr(tiny, "_on_step", lambda step: None)
    return Path("cut")


@pytest.fixture
def foreign(cut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same run, as another user has it, or another machine."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state of another"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return cut


def test_own_runs_resume_without_a_question_also_moved_or_copied(cut: Path) -> None:
    shutil.copytree(cut, "copied")
    cut.rename("moved")
    for folder in ("copied", "moved"):
        invoke("resume", folder)
    assert model_bytes("copied") == model_bytes("moved")


def test_the_code_of_somebody_else_s_run_is_named_and_not_run_without_a_flag(
    foreign: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []
    monkeypatch.setattr(tiny, "recipe", lambda examples: called.append(examples))
    said = error_of("resume", foreign)
    assert said == (
        "cut was not started by you on this machine. To continue it is to run tiny:recipe with the arguments "
        f"{{'examples': 12}}, from {Path.cwd()} or what is installed: if you trust it, add --trust."
    )
    assert called == []


def test_with_the_flag_it_goes_on_and_says_so_when_it_is_interrupted(
    foreign: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "_on_step", stop_at(3, interrupt))
    again = invoke("resume", foreign, "--trust", code=130)
    assert "resume cut --trust" in again.stderr
    monkeypatch.setattr(tiny, "_on_step", lambda step: None)
    assert "accuracy" in invoke("resume", foreign, "--trust").stdout


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 1), ("", 1)])
def test_on_a_terminal_it_is_asked(answer: str, code: int, foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkmerge.cli.run.can_ask", lambda: True)
    result = CliRunner().invoke(app, ["resume", "cut"], input=f"{answer}\n")
    assert result.exit_code == code
    assert "cut was not started by you on this machine." in result.stderr
    assert "Do you trust it? [y/N]" in result.stderr
    assert (foreign / "result.json").exists() == (code == 0)


def test_a_run_whose_recipe_was_exchanged_is_not_one_s_own(cut: Path) -> None:
    shutil.rmtree(cut / "checkpoints")
    config = read_object(cut / "config.json")
    config["source"]["settings"]["recipe"] = "os:abort"
    write_object(cut / "config.json", config)
    assert "To continue it is to run os:abort with the arguments" in error_of("resume", cut)


def test_a_finished_run_of_somebody_else_is_shown_without_its_code(
    foreign: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoke("resume", foreign, "--trust")
    result = read_object(foreign / "result.json")
    result["result"]["test"] = None
    write_object(foreign / "result.json", result)
    recipe = tiny.recipe
    monkeypatch.setattr(tiny, "recipe", None)
    shown = invoke("resume", foreign)
    assert "accuracy" in shown.stdout
    assert "its test split may be unread: to look, add --trust and run tiny:recipe" in shown.stderr
    monkeypatch.setattr(tiny, "recipe", recipe)
    assert "test split" not in invoke("resume", foreign, "--trust").stderr


def test_show_report_export_and_compare_of_records_run_no_code_of_a_recipe(cut: Path, tiny: Any) -> None:
    invoke("resume", cut)
    invoke(
        "compare", "tiny:recipe", "--methods", "ew", "--seeds", "1", "--workers", "1", "--set", "steps=2", "--out", "c"
    )
    invoke("compare", "c", "--records", "c.json")
    Path("tiny.py").write_text("raise SystemExit('it was run')")
    sys.modules.pop("tiny")
    for words in (
        *(("show", "cut"), ("runs", "."), ("report", "cut"), ("export", "cut", "out")),
        *(("compare", "c"), ("compare", "c.json"), ("report", "c"), ("report", "c.json")),
    ):
        invoke(*words)
    assert "tiny" not in sys.modules


def test_a_reference_that_diverges_is_no_verdict_and_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_data", raising=False)
    invoke("new", "own_data.py")
    path = tmp_path / "own_data.py"
    loss = "cross_entropy(model(inputs, task), labels)"
    late = f'{loss} * (float("nan") if context.step >= 15 else 1.0)'
    path.write_text(path.read_text().replace(loss, late))
    shown = invoke("run", "own_data:recipe", "--steps", "20", "--set", "algorithm.interval=10").stdout
    assert "whether it helped cannot be said: single-task training, to compare with, ended in numbers" in shown
    assert "validation  accuracy" in shown, "that of the merge which is returned"


@pytest.mark.parametrize("name", ["Joint", "PostTrain", "SingleTask"])
def test_any_other_algorithm_says_that_whether_it_helped_was_not_measured_and_how_to_know(tiny: Any, name: str) -> None:
    shown = invoke("run", "tiny:recipe", "--algorithm", name).stdout
    more = f"forkmerge compare tiny:recipe --methods stl,recipe --seeds 5 --set algorithm.name={name}"
    told = f"whether it helped was not measured: `{more}` says it."
    assert (told in shown) == (name != "SingleTask"), shown


def without_test_split(folder: Path, examples: int) -> None:
    """Write the example of a new user without its test split, and with that many validation examples."""
    invoke("new", "own_data.py")
    text = (folder / "own_data.py").read_text().replace("species(200)", f"species({examples})")
    line = next(line for line in text.splitlines(keepends=True) if 'data["species, test"], metrics' in line)
    (folder / "own_data.py").write_text(text.replace(line, ""))


def test_without_a_test_split_the_verdict_is_of_validation_examples_that_the_search_did_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_data", raising=False)
    without_test_split(tmp_path, 200)
    quick = ("run", "own_data:recipe", "--steps", "20", "--set", "algorithm.interval=10")
    shown = invoke(*quick, "--out", "a")
    assert "no test split: 40 of 200 validation examples are kept from the search" in shown.stderr
    assert re.search(
        r"accuracy 0\.\d+ → 0\.\d+ \(.*\]\); 95 % over 40 validation examples that the search did not see", shown.stdout
    )
    assert re.search(r"held out +accuracy 0\.\d+", shown.stdout)
    assert not re.search(r"^ +test ", shown.stdout, re.MULTILINE), "there is no test split"
    assert re.search("more certainty: .*--seeds 5 .*--set hold_out=0.2", shown.stdout), (
        "it is compared on such ones, too"
    )
    assert re.search(r"accuracy 0\.\d+ \(held out\)", invoke("runs", ".").stdout)
    invoke("export", "a", "out")
    assert "Validation examples that the search did not see, measured once" in Path("out/README.md").read_text()
    assert json.loads(Path("a/config.json").read_text())["source"]["settings"]["hold_out"] == 0.2
    all_of_them = invoke(*quick, "--no-reference", "--out", "b")
    assert "kept from the search" not in all_of_them.stderr


def test_few_validation_examples_are_all_searched_with_unless_somebody_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_data", raising=False)
    without_test_split(tmp_path, 60)
    quick = ("run", "own_data:recipe", "--steps", "20", "--set", "algorithm.interval=10")
    shown = invoke(*quick, "--out", "a")
    assert "kept from the search" not in shown.stderr
    assert "cannot be said without a test split" in shown.stdout
    assert "--set hold_out=0.2" in shown.stdout
    assert (
        "95 % over 12 validation examples that the search did not see"
        in invoke(*quick, "--out", "b", "--set", "hold_out=0.2").stdout
    )

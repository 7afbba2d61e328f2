"""What can be typed: help without torch, one line for a mistake, options that reach what they are for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import forkmerge as fm
from command_line import TINY, error_of, invoke
from forkmerge.cli.commands import app


@pytest.mark.parametrize("words", ["--help", "--version", "run --help", "methods --help", "compare --help", "new x.py"])
def test_torch_is_not_imported_before_it_is_needed(words: str, tmp_path: Path) -> None:
    code = (
        "import sys; from forkmerge.cli import main\n"
        f"sys.argv = ['forkmerge', *{words.split()!r}]\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'sklearn'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_every_command_explains_itself_and_the_version_is_the_package_s() -> None:
    assert invoke("--version").stdout == f"forkmerge {fm.__version__}\n"
    listed = invoke("--help").stdout
    for name in _COMMANDS:
        assert name in listed


_COMMANDS = ("demo", "run", "resume", "runs", "show", "export", "new", "compare", "methods", "diagnose", "report")


@pytest.mark.parametrize("name", _COMMANDS)
def test_help_shows_every_word_of_every_option_and_no_type_of_a_flag(name: str) -> None:
    """What rich takes for markup, such as [compare] or [default: …], was lost, and flags were <bool>."""
    shown = " ".join(invoke(name, "--help").stdout.split())
    assert "<bool>" not in shown
    assert "<int range>" not in shown
    entry = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]  # a group
    for text in (entry.help, *(getattr(option, "help", None) for option in entry.params)):
        assert _joined(text or "") in _joined(shown)


def _joined(text: str) -> str:
    return "".join(text.split())  # lines are folded, also at hyphens


def test_help_speaks_of_the_command_by_the_name_it_was_called_by(tmp_path: Path) -> None:
    """What is printed can be pasted: through ./run, from an environment that is not active, as a module."""
    environment = {key: value for key, value in os.environ.items() if key != "FORKMERGE_COMMAND"}
    script = tmp_path / "bin" / "forkmerge"
    script.parent.mkdir()
    script.write_text("import forkmerge.cli\nforkmerge.cli.main()\n")

    def usage(*words: object, **more: str) -> str:
        called = [sys.executable, *map(str, words), "methods", "--help"]
        done = subprocess.run(called, env={**environment, **more}, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()[0]

    assert usage(script).startswith(f"Usage: {script} methods ")
    assert usage("-m", "forkmerge.cli").startswith(f"Usage: {sys.executable} -m forkmerge.cli methods ")
    assert usage("-m", "forkmerge.cli", FORKMERGE_COMMAND="./run").startswith("Usage: ./run methods ")
    script.chmod(0o755)
    assert usage(script, PATH=str(script.parent)).startswith("Usage: forkmerge methods ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run no.toml", "cannot read no.toml: No such file or directory."),
        ("run tiny.py", "neither a .toml file nor 'module:function'"),
        ("run tiny:recip", "unknown function 'recip'. Did you mean 'recipe'? Known: data, losses, recipe, broken."),
        ("run nothere:recipe", "no module named 'nothere'"),
        ("run tiny:recipe --target tg", "Did you mean 'tgt'?"),
        ("run tiny:recipe --algorithm forkmerge", "Did you mean 'ForkMerge'?"),
        ("run tiny:recipe --set algorithm.intervall=3", "unknown key 'intervall'. Did you mean 'interval'?"),
        ("run tiny:recipe --set stepps=3", "unknown key 'stepps'. Did you mean 'steps'?"),
        ("run tiny:recipe --set training.clip=3", "unknown key 'clip'. Did you mean 'clip_norm'?"),
        ("run tiny:recipe --set arguments.example=3", "It takes: examples."),
        ("run tiny:recipe --set steps=many", "steps must be a positive integer, got 'many'."),
        ("run tiny:recipe --steps 0 --dry-run", "steps must be a positive integer, got 0."),
        ("run tiny:recipe --set optimizer.lr=-1", "Adam(lr=-1) cannot be made: Invalid learning rate: -1"),
        ("run tiny:recipe --set optimizer.lr=fast", "Adam(lr='fast') cannot be made: "),
        ("run tiny:recipe --set scheduler.name=StepLR", "StepLR() cannot be made: missing 1 required positional"),
        ("run tiny:recipe --set training.clip_norm=x", "clip_norm must be a positive number, or None, got 'x'."),
        ("run tiny:recipe --set training.paired=maybe", "paired must be True or False, got 'maybe'."),
        ("run tiny:recipe --set training=5", "[training] must be a table"),
        ("run tiny:recipe --set optimizer=5", "[optimizer] must be a table"),
        ("run tiny:recipe --set algorithm=5", "[algorithm] must be a table"),
        ("run tiny:recipe --set arguments=5", "[arguments] must be a table"),
        ("run tiny:recipe --set seed=x", "seed must be an integer, got 'x'."),
        ("run tiny:recipe --set seed=x --dry-run", "seed must be an integer, got 'x'."),
        ("run tiny:recipe --algorithm PostTrain --set seed=x", "seed must be an integer, got 'x'."),
        ("run tiny:recipe --set training.threads=100000", "threads must be at most "),
        ("run tiny:recipe --set training.threads=100000 --dry-run", "threads must be at most "),
        (f"run tiny:recipe --steps {10**400} --dry-run", "steps must be at most "),
        ("run tiny:recipe --out .", "exists and is not an empty folder"),
        ("show .", "is not a run folder"),
        ("resume .", "is not a run folder"),
        ("export . out", "is not a run folder"),
        ("runs nowhere", "nowhere is not a folder."),
    ],
)
def test_a_mistake_is_one_clear_line(tiny: Any, words: str, message: str) -> None:
    assert message in error_of(*words.split())
    assert not Path("runs").exists()


def test_an_error_in_the_user_s_own_code_is_shown_without_our_frames(tiny: Any) -> None:
    shown = invoke("run", "tiny:broken", code=1).stderr
    assert "ValueError: a mistake of the user's own" in shown
    assert "tiny.py" in shown
    assert "src/forkmerge/" not in shown
    assert shown.splitlines()[-1].endswith("all frames: forkmerge --debug run tiny:broken")


def test_it_says_where_in_training_it_came_from(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(step: int) -> None:
        if step == 3:
            raise KeyError("labels")

    monkeypatch.setattr(tiny, "_on_step", fail)
    shown = invoke("run", "tiny:recipe", code=1).stderr
    assert "KeyError: 'labels'" in shown
    assert "src/forkmerge/" not in shown
    assert "forkmerge: in the losses of stream 'tgt+aux' (tasks tgt); examples " in shown
    assert "the batch is [float32[4, 4], int64[4]]" in shown
    assert "forkmerge: at step 3 of branch" in shown


def test_no_memory_left_in_the_user_s_own_code_is_one_line_that_says_how_to_go_on(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "_on_step", lambda step: step < 3 or torch.empty(1 << 50, dtype=torch.uint8))
    *_, line = invoke("run", "tiny:recipe", "--out", "run", code=75).stderr.splitlines()
    assert line.startswith("error: the command cannot go on: cannot allocate memory. Free some memory")
    assert "in the losses of stream 'tgt+aux'" in line
    assert "at step 3 of branch" in line
    assert line.endswith("what was written is whole: continue with: forkmerge resume run")
    monkeypatch.setattr(tiny, "_on_step", lambda step: None)
    invoke("resume", "run")


def test_debug_keeps_all_frames(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORKMERGE_DEBUG", raising=False)
    with monkeypatch.context() as patch:
        patch.setenv("FORKMERGE_DEBUG", "0")
        with pytest.raises(ValueError, match="a mistake of the user's own"):
            invoke("--debug", "run", "tiny:broken")
        with pytest.raises(ValueError, match="a mistake of the user's own"):
            invoke("run", "tiny:broken")  # it is in the environment now, for worker processes


def test_an_error_in_a_worker_process_is_shown_the_same_way(tiny: Any) -> None:
    Path("tiny.py").write_text(TINY.replace("_on_step(context.step)", "assert context.step != 3, 'a bad step'"))
    shown = invoke("run", "tiny:recipe", "--workers", "2", code=1).stderr
    assert "AssertionError: a bad step" in shown
    assert "src/forkmerge/" not in shown
    assert "forkmerge: in the losses of stream 'tgt+aux'" in shown
    assert "forkmerge: at step 3 of branch" in shown


def test_a_run_of_any_length_is_estimated_at_once(tiny: Any) -> None:
    """Rounds that are alike are counted, not listed."""
    shown = invoke("run", "tiny:recipe", "--steps", 10**14, "--set", "algorithm.interval=7", "--dry-run", "--json")
    cost = json.loads(shown.stdout)
    assert cost["merges"] == -(-(10**14) // 7)
    assert cost["branch_steps"]["search"] == 2 * 10**14


def test_the_demo_is_given_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: dict[str, Any] = {}

    def run_demo(**options: Any) -> int:
        passed.update(options)
        return 3

    monkeypatch.setattr("forkmerge.cli.demo.run_demo", run_demo)
    invoke("demo", "--seeds", "2", "--workers", "1", "--out", "d", "--json", code=3)
    typed = "demo --seeds 2 --workers 1 --out d --json"
    assert passed == {"seeds": 2, "workers": 1, "out": Path("d"), "as_json": True, "typed": typed}


def test_a_machine_that_has_run_out_of_something_has_an_exit_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*arguments: Any, **options: Any) -> None:
        raise fm.ResourceError("no worker process can be started: cannot allocate memory.")

    monkeypatch.setattr("forkmerge.cli.run.start_run", short)
    result = invoke("run", "my_problem:recipe", code=75)
    assert "error: no worker process can be started" in result.stderr

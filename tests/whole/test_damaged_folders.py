"""What has changed in the folder of a run, a comparison or a diagnosis is named, and never shown as a fact."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import forkmerge as fm
import report_samples as samples
from _asserts import facts
from forkmerge.algorithms.checkpoint import RunState
from forkmerge.algorithms.run_record import Run
from forkmerge.algorithms.saved_run import list_saved_runs
from forkmerge.analysis.diagnosis.diagnosis import PLAN, RESULT
from forkmerge.analysis.diagnosis.pieces import FORMAT
from forkmerge.cli.commands import app
from forkmerge.engine.storage.atomic_files import fingerprint
from forkmerge.engine.storage.json_codec import seal
from forkmerge.engine.storage.json_files import interpreting, write_versioned
from forkmerge.engine.storage.run_folder import RunFolder
from forkmerge.experiments.comparison import plan_comparison, run_comparison
from forkmerge.experiments.recipe import load_recipe
from forkmerge.experiments.results_file import write_records
from forkmerge.report import save_result
from problems import Stopped, fit, stop_at
from run_folders import as_earlier_version, without_checksums

FLIPS, REPLACEMENTS = 60, 30
SHOW, SHOW_JSON, REPORT, EXPORT = ["show"], ["show", "--json"], ["report"], ["export", "out"]
FILES: dict[tuple[str, str], list[list[str]]] = {
    ("runs/finished", "config.json"): [SHOW, SHOW_JSON, REPORT, EXPORT],
    ("runs/finished", "record.jsonl"): [SHOW, SHOW_JSON, REPORT],
    ("runs/finished", "result.json"): [SHOW, SHOW_JSON, REPORT, EXPORT],
    ("runs/finished", "analysis/curve.json"): [REPORT],
    ("runs/interrupted", "config.json"): [SHOW, SHOW_JSON, REPORT],
    ("runs/interrupted", "record.jsonl"): [SHOW, SHOW_JSON, REPORT],
    ("comparison", "plan.json"): [["compare"], ["compare", "--json"], REPORT],
    ("comparison", "tgt/ew-seed0.json"): [["compare"], ["compare", "--json"], REPORT],
    ("records.json", ""): [["compare"], ["compare", "--json"]],
    ("diagnosis", RESULT): [REPORT],
}
"""Files, and the commands that read them."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, an interrupted one, a comparison and a diagnosis."""
    folder = tmp_path_factory.mktemp("made")
    fit(folder=folder / "runs/finished", source={"settings": {"recipe": "a:b"}, "command": "forkmerge run a:b"})
    save_result(folder / "runs/finished", "curve", samples.saved_results()[0])
    with pytest.raises(Stopped):
        fit(folder=folder / "runs/interrupted", on_event=stop_at(8))
    with pytest.raises(Stopped):
        load_recipe("compare_problem:recipe").fit(folder=folder / "runs/recipe", on_event=stop_at(4))
    run_comparison(plan_comparison("compare_problem:recipe", methods="ew,forkmerge", seeds=2), folder / "comparison")
    write_records(folder / "comparison", folder / "records.json")
    write_versioned(folder / "diagnosis" / PLAN, FORMAT, {"about": {}, "plan": {}, "costs": {}})
    write_versioned(folder / "diagnosis" / RESULT, FORMAT, {"diagnosis": samples.diagnosis()})
    return folder


@pytest.fixture(autouse=True)
def quick_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typer.testing, "_get_command", cache(typer.main.get_command))


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def call(folder: str, words: list[str]) -> str | None:
    """What a command prints and writes; None where it names a damage in one line. Anything else is an error."""
    command, *options = words
    result = CliRunner().invoke(app, [command, folder, *options])
    if isinstance(result.exception, SystemExit) and result.exit_code == 2:
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ")
        assert folder in line
        return None
    if result.exception is not None:
        raise result.exception
    written = [path for path in map(Path, (f"{folder}/report.html", "out/README.md", "out/card.json")) if path.exists()]
    text = "".join(path.read_text() for path in written)
    shutil.rmtree("out", ignore_errors=True)
    for path in written:
        path.unlink(missing_ok=True)
    return result.stdout + text


def is_warned_of(folder: str, page: str) -> bool:
    """Whether a page says, beside the facts of a finished run, that its record is damaged."""
    return re.search(rf"(line \d+ of )?{folder}/record\.jsonl (is|holds) ", page) is not None


def flips(text: bytes, seed: str, count: int = FLIPS) -> Iterator[bytes]:
    draw = random.Random(seed)
    for _ in range(count):
        changed = bytearray(text)
        changed[draw.randrange(len(text))] ^= 1 << draw.randrange(8)
        yield bytes(changed)


@pytest.mark.parametrize(("folder", "file"), FILES)
def test_a_flipped_bit_is_named_or_changes_no_fact(folder: str, file: str, here: Path) -> None:
    path = here / folder / file
    text, times, named = path.read_bytes(), (path.stat().st_atime, path.stat().st_mtime), 0
    expected = [call(folder, words) for words in FILES[folder, file]]
    assert None not in expected
    rows = list_saved_runs(here / "runs")
    for changed in flips(text, file):
        path.write_bytes(changed)
        os.utime(path, times)
        shown = [call(folder, words) for words in FILES[folder, file]]
        for page, before in zip(shown, expected, strict=True):
            assert page in (None, before) or is_warned_of(folder, page)
        named += shown != expected
        for row, before in zip(list_saved_runs(here / "runs"), rows, strict=True):
            assert row == before or row["status"] == "unreadable"
    assert named > 0.9 * FLIPS


WRONG: tuple[Any, ...] = ([], None, {}, "x", -1, 0, 1e300, True, [[]], [None], {"x": None}, "\x1b[31m\ud800")


def replaced(data: Any, value: Any, pick: Callable[[int], int]) -> Any:
    """The data with one item, anywhere in it, taken away or in its place a value."""
    items = list(data.items() if isinstance(data, dict) else enumerate(data)) if isinstance(data, dict | list) else []
    if not items or pick(3) == 0:
        return value
    key, item = items[pick(len(items))]
    copy: Any = dict(data) if isinstance(data, dict) else list(data)
    if isinstance(copy, dict) and pick(4) == 0:
        del copy[key]
    else:
        copy[key] = replaced(item, value, pick)
    return copy


@pytest.mark.parametrize(("folder", "file"), FILES)
def test_wrong_content_without_a_checksum_is_no_traceback(folder: str, file: str, here: Path) -> None:
    if folder.startswith("runs"):
        as_earlier_version(here / folder)
    path, draw = here / folder / file, random.Random(file)
    texts = path.read_bytes().splitlines() if path.suffix == ".jsonl" else [path.read_bytes()]
    objects = [without_checksums(text) for text in texts]
    for turn in range(REPLACEMENTS):
        changed, place = list(objects), draw.randrange(len(objects))
        changed[place] = replaced(objects[place], WRONG[turn % len(WRONG)], draw.randrange)
        path.write_text("".join(f"{json.dumps(data)}\n" for data in changed))
        for words in FILES[folder, file]:
            call(folder, words)
        list_saved_runs(here / "runs")


@pytest.mark.parametrize(("folder", "file"), FILES)
def test_wholly_wrong_content_is_named(folder: str, file: str, here: Path) -> None:
    for text in ("[]", "null", "{", "[" * 100_000, '{"a":' * 700 + "1" + "}" * 700, '{"format": 1}', '"x"'):
        (here / folder / file).write_text(text + "\n")
        for words in FILES[folder, file]:
            if (folder, file) != ("runs/finished", "record.jsonl") or words == REPORT:
                page = call(folder, words)
                assert page is None or is_warned_of(folder, page), (words, text[:10])


@pytest.mark.parametrize("folder", ["runs/finished", "runs/interrupted"])
def test_a_record_that_was_cut_off_is_named_and_the_rest_is_not_taken_for_all(folder: str, here: Path) -> None:
    path = here / folder / "record.jsonl"
    text, times = path.read_bytes(), (path.stat().st_atime, path.stat().st_mtime)
    commands = FILES[folder, "record.jsonl"]
    expected = [call(folder, words) for words in commands]
    rows = list_saved_runs(here / "runs")
    newest = max((here / folder / "checkpoints").iterdir()) / "manifest.json"
    written = json.loads(newest.read_bytes())["content"]["record_offset"]
    for line in range(text[:written].count(b"\n")):
        whole = b"".join(text.splitlines(keepends=True)[:line])
        for left in (whole, whole + b'{"event"'):
            path.write_bytes(left)
            os.utime(path, times)
            for words, before in zip(commands, expected, strict=True):
                page = call(folder, words)
                assert page is None if folder == "runs/interrupted" else page == before or is_warned_of(folder, page)
            for row, before in zip(list_saved_runs(here / "runs"), rows, strict=True):
                assert row == before or row["status"] == "unreadable"


@pytest.mark.parametrize("file", ["config.json", "record.jsonl"])
def test_a_run_with_a_flipped_bit_is_resumed_to_the_same_end_or_refused_by_name(
    file: str, here: Path, made: Path
) -> None:
    def resume(changed: bytes | None = None) -> dict[str, Any] | None:
        folder = here / "runs/recipe"
        shutil.rmtree(folder)
        shutil.copytree(made / "runs/recipe", folder)
        if changed is not None:
            (folder / file).write_bytes(changed)
        text = call("runs/recipe", ["resume", "--json"])
        return None if text is None else facts(Run.from_json(json.loads(text)))

    expected = resume()
    count = FLIPS if file == "config.json" else 30  # these are resumed to their end
    ends = [resume(changed) for changed in flips((made / "runs/recipe" / file).read_bytes(), file, count)]
    assert expected is not None
    assert all(end in (None, expected) for end in ends)
    assert ends.count(None) > 0.9 * FLIPS if file == "config.json" else None not in ends


def test_every_other_run_is_listed_beside_a_bad_one(here: Path) -> None:
    (here / "runs/interrupted/config.json").write_text("[" * 100_000)
    rows = {row["name"]: row for row in list_saved_runs(here / "runs")}
    assert rows["finished"]["status"] == "finished"
    assert rows["interrupted"]["status"] == "unreadable"
    assert "interrupted/config.json is not JSON" in rows["interrupted"]["changed"]


def _sealed(checkpoint: Path, **changes: Any) -> None:
    """Change the manifest of a checkpoint and give it the checksum that it should have."""
    content = json.loads((checkpoint / "manifest.json").read_bytes())["content"]
    whole = changes.pop("whole", None)
    (checkpoint / "manifest.json").write_bytes(seal({**content, **changes} if whole is None else whole[0]))


@pytest.mark.parametrize("value", [[], None, "x", {}, -5, 1.5])
@pytest.mark.parametrize("key", ["whole", "files", "record_offset"])
def test_a_manifest_with_a_good_checksum_and_wrong_content_is_no_traceback(key: str, value: Any, here: Path) -> None:
    for checkpoint in (here / "runs/interrupted/checkpoints").iterdir():
        _sealed(checkpoint, **{key: [value] if key == "whole" else value})
    told = ""
    try:
        told = "".join(fit(folder=here / "runs/interrupted", resume=True).notes)
    except fm.StoreError as error:
        told = str(error)
    assert f"{here}/runs/interrupted/checkpoints" in told


@pytest.mark.parametrize("value", [[], None, "x", {}, -5])
def test_a_state_with_a_good_checksum_and_wrong_content_is_named(value: Any, here: Path) -> None:
    folder = here / "runs/interrupted"
    whole = {path: path.read_bytes() for path in folder.glob("checkpoints/*/*.json")}
    newest = max((folder / "checkpoints").iterdir())
    state = json.loads((newest / "state.json").read_bytes())
    for key in state:
        for path, data in whole.items():
            path.write_bytes(data)
        (newest / "state.json").write_text(json.dumps({**state, key: value}))
        files = {name: fingerprint(newest / name) for name in ("state.safetensors", "state.json")}
        _sealed(newest, files=files)
        told = str(folder)
        try:
            with RunFolder.open(folder, lock=False) as opened, interpreting(folder, "a checkpoint"):
                RunState.from_value(opened.load())
        except fm.StoreError as error:
            told = str(error)
        assert str(folder) in told

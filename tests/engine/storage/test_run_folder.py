"""A run folder survives kills at every moment, full disks and damage, and says what it found."""

from __future__ import annotations

import errno
import inspect
import json
import math
import os
import pickle
import random
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from disk_faults import Faults, Killed, each_fault
from forkmerge.engine.storage import atomic_files, json_codec
from forkmerge.engine.storage.atomic_files import fingerprint
from forkmerge.engine.storage.json_files import checksum, with_checksum
from forkmerge.engine.storage.run_folder import NoStore, RunFolder, list_runs, status
from forkmerge.errors import StoreError
from run_folders import CONFIG, advance, as_earlier_version, lines, make_run, names, same, state, without_checksums

STATE_FILES = ["state.safetensors", "state.json", "manifest.json"]


def indented(data: Any) -> str:
    return json.dumps(data, indent=2, separators=(",", ": ")) + "\n"


def abandon(folder: RunFolder) -> None:
    """What the operating system does to a killed process."""
    assert folder._lock is not None
    assert folder._record is not None
    folder._record.close()
    folder._lock.close()


def test_a_checkpoint_comes_back_bitwise_with_its_config_and_record(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 3)
    with RunFolder.open(tmp_path / "run") as folder:
        assert folder.config == CONFIG
        assert type(folder.config["betas"]) is tuple
        assert same(folder.load(), state(3))
        assert folder.warnings == []
        assert list(folder.records()) == lines(3)


def test_a_new_run_has_nothing_to_load(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "deep" / "run", {}) as folder:
        assert folder.load() is None
        assert list(folder.records()) == []


def test_the_files_of_a_run_are_written_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs, and older versions, read these bytes."""
    run = tmp_path / "run"
    monkeypatch.setattr(secrets, "token_hex", lambda count: f"{count} random bytes")
    with RunFolder.create(run, {"steps": 10, "clip": math.inf}) as folder:
        folder.record({"event": "step", "loss": math.nan})
        folder.save({"step": 1, "w": torch.zeros(2)}, 1)
        folder.keep_branches({"step": 1}, 12)
        folder.finish({"score": 0.5}, {"w": torch.zeros(2)})
    config = {"steps": 10, "clip": {"$": "float", "v": "7ff0000000000000"}, "run_id": "8 random bytes"}
    assert (run / "config.json").read_text() == indented(with_checksum(config))
    line = '{"run_id": "8 random bytes","event": "step","loss": null,"crc32": "b6052c15"}\n'
    assert (run / "record.jsonl").read_text() == line
    files = {name: fingerprint(run / "checkpoints/00000001" / name) for name in STATE_FILES[:2]}
    assert (run / "checkpoints/00000001/state.json").read_text() == '{"step": 1,"w": {"$": "tensor","v": "w"}}\n'
    identity = {"run_id": "8 random bytes", "config": checksum(config)}
    manifest = {"format": 1, **identity, "record_offset": len(line), "files": files}
    assert (run / "checkpoints/00000001/manifest.json").read_bytes() == json_codec.seal(manifest)
    result = {"format": 1, "files": {"model.safetensors": fingerprint(run / "model.safetensors")}}
    assert (run / "result.json").read_text() == indented(with_checksum({**result, "result": {"score": 0.5}}))
    assert names(run) == {
        *("config.json", "record.jsonl", "lock", "result.json", "model.safetensors"),
        *("checkpoints", "checkpoints/00000001", *(f"checkpoints/00000001/{name}" for name in STATE_FILES)),
        *("branches", "branches/00000012", *(f"branches/00000012/{name}" for name in STATE_FILES)),
    }


def test_the_two_newest_checkpoints_stay(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", {}) as folder:
        for step in (1, 2, 9, 100_000_000):
            folder.save(state(step), step)
            kept = sorted(int(item.name) for item in (tmp_path / "run/checkpoints").iterdir())
            assert kept == [index for index in (1, 2, 9, 100_000_000) if index <= step][-2:]
        assert same(folder.load(), state(100_000_000))


def test_a_checkpoint_of_the_same_index_is_replaced_and_an_older_one_refused(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", {}) as folder:
        folder.save("zeroth", 0)
        assert folder.load() == "zeroth"
        folder.save("first", 3)
        folder.save("second", 3)
        assert folder.load() == "second"
        with pytest.raises(StoreError, match=r"checkpoint 2 is older than the newest, 3: call load"):
            folder.save("late", 2)


def test_every_file_is_synced_before_its_folder_gets_a_name_and_the_manifest_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, Any]] = []

    def spy(name: str, key: Callable[..., Any]) -> None:
        real = getattr(atomic_files, name)

        def call(*arguments: Any) -> None:
            events.append((name, key(*arguments)))
            real(*arguments)

        monkeypatch.setattr(atomic_files, name, call)

    folder = RunFolder.create(tmp_path / "run", {})
    folder.record({"step": 1})
    spy("write", lambda file, data: os.fstat(file.fileno()).st_ino)
    spy("_fsync", lambda descriptor: os.fstat(descriptor).st_ino)
    spy("_save_tensors", lambda path, tensors: path.name)
    spy("_rename", lambda source, target: target.name)
    folder.save(state(1), 1)
    folder.close()
    paths = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    by_inode = {path.stat().st_ino: path.name for path in paths}
    assert [(name, by_inode.get(key, key)) for name, key in events] == [
        ("_fsync", "record.jsonl"),
        ("_save_tensors", "state.safetensors"),
        ("_fsync", "state.safetensors"),
        ("write", "state.json"),
        ("_fsync", "state.json"),
        ("write", "manifest.json"),
        ("_fsync", "manifest.json"),
        ("_fsync", "00000001"),
        ("_rename", "00000001"),
        ("_fsync", "checkpoints"),
        ("_fsync", "run"),
    ]


@pytest.mark.parametrize("index", [3, 4], ids=["replacing", "pruning"])
@pytest.mark.parametrize("mode", ["before", "torn", "after"])
def test_a_kill_at_any_moment_of_a_save_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, faults: Faults, mode: str, index: int
) -> None:
    template = make_run(tmp_path / "template", 3)
    faults.mode, run, live = mode, tmp_path / "run", []

    def step() -> None:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(template, run)
        live.append(RunFolder.open(run))
        live[-1].record({"step": 4})
        live[-1].save(state(5), index)

    steps = []
    for at in each_fault(faults, Killed(), step):
        abandon(live[-1])
        before = names(run)
        with RunFolder.open(run) as folder:
            value = folder.load()
            assert value is not None, at
            steps.append(value["step"])
            cut = {2: 2, 3: 3, 5: 5}[value["step"]]
            expected = lines(cut) if cut < 5 else [*lines(4), {"step": 4}]
            assert list(folder.records()) == expected, at
            assert same(value, state(value["step"])), at
            assert folder.warnings == [], "a kill is not damage"
            assert not [name for name in names(run) if ".tmp-" in name], at
            if value["step"] == 3:
                assert index == 3 or f"checkpoints/{index:08d}" not in before
            advance(folder, 6)
            assert same(folder.load(), state(6)), at
    live[-1].close()
    assert set(steps) == ({2, 3, 5} if index == 3 else {3, 5})
    assert steps == sorted(steps, key=lambda step: {3: 0, 2: 1, 5: 2}[step])


@pytest.mark.parametrize("mode", ["before", "torn"])
def test_a_full_disk_is_a_named_error_that_leaves_no_rubbish_and_no_harm(
    tmp_path: Path, faults: Faults, mode: str
) -> None:
    faults.mode = mode
    full = OSError(errno.ENOSPC, "No space left on device")
    with RunFolder.create(tmp_path / "run", {}) as folder:
        advance(folder, 1)
        for at in each_fault(faults, full, lambda: folder.save(state(2), 2)):
            assert not [name for name in names(folder.path) if ".tmp-0" in name], at
            value = folder.load()
            assert value is not None
            assert value["step"] in (1, 2)
            assert same(value, state(value["step"]))
        faults.arm(1, mode, full)
        with pytest.raises(StoreError, match=r"cannot write .*00000003: No space left on device"):
            folder.save(state(3), 3)


@pytest.mark.parametrize("mode", ["before", "torn", "after"])
def test_a_kill_at_any_moment_of_the_end_leaves_a_finished_or_an_interrupted_run(
    tmp_path: Path, faults: Faults, mode: str
) -> None:
    template = make_run(tmp_path / "template", 2)
    with RunFolder.open(template) as folder:
        folder.finish({"score": 0.1}, {"w": torch.zeros(3)})
    faults.mode, run, live = mode, tmp_path / "run", []

    def end() -> None:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(template, run)
        live.append(RunFolder.open(run))
        live[-1].finish({"score": 0.2}, {"w": torch.ones(3)})

    states = set()
    for at in each_fault(faults, Killed(), end):
        abandon(live[-1])
        states.add(status(run))
        with RunFolder.open(run) as folder:
            result = folder.result()
            if result is None:
                assert same(folder.load(), state(2)), at
            else:
                expected = {0.1: torch.zeros(3), 0.2: torch.ones(3)}[result["score"]]
                assert torch.equal(folder.model_tensors()["w"], expected), at
            folder.finish({"score": 0.3}, {"w": torch.ones(1)})
        assert status(run) == "finished"
    live[-1].close()
    assert states == {"interrupted", "finished"}


@pytest.mark.parametrize("mode", ["before", "torn", "after"])
def test_a_kill_during_create_leaves_a_folder_to_create_or_to_open(tmp_path: Path, faults: Faults, mode: str) -> None:
    faults.mode, run = mode, tmp_path / "run"

    def start() -> None:
        shutil.rmtree(run, ignore_errors=True)
        RunFolder.create(run, CONFIG).close()

    for _ in each_fault(faults, Killed(), start):
        begun = (run / "config.json").exists()
        with RunFolder.open(run) if begun else RunFolder.create(run, CONFIG) as folder:
            assert folder.config == CONFIG
            assert folder.load() is None


def damages(size: int) -> dict[str, Callable[[Path], Any]]:
    """Ways to spoil a file of `size` bytes: chosen and random places, always the same ones."""

    def flip(position: int, mask: int) -> Callable[[Path], Any]:
        def spoil(path: Path) -> None:
            data = bytearray(path.read_bytes())
            data[position] ^= mask
            path.write_bytes(data)

        return spoil

    def cut(length: int) -> Callable[[Path], Any]:
        return lambda path: os.truncate(path, length)

    ways: dict[str, Callable[[Path], Any]] = {"missing": Path.unlink}
    for length in {0, 1, size // 2, size - 1}:
        ways[f"cut to {length}"] = cut(length)
    ways["one byte more"] = lambda path: path.write_bytes(path.read_bytes() + b"\n")
    ways["zeros"] = lambda path: path.write_bytes(b"\0" * size)
    draw = random.Random(size)
    for position in {0, 7, 8, size // 2, size - 1, *(draw.randrange(size) for _ in range(12))}:
        ways[f"flip at {position}"] = flip(position, 1 << draw.randrange(8))
    return ways


@pytest.mark.parametrize("name", STATE_FILES)
def test_a_damaged_newest_checkpoint_is_named_set_aside_and_the_previous_one_used(tmp_path: Path, name: str) -> None:
    template = make_run(tmp_path / "template", 3)
    for way, spoil in damages((template / "checkpoints/00000003" / name).stat().st_size).items():
        run = tmp_path / way
        shutil.copytree(template, run)
        spoil(run / "checkpoints/00000003" / name)
        with RunFolder.open(run) as folder:
            assert same(folder.load(), state(2)), way
            assert list(folder.records()) == lines(2), way
            (warning,) = folder.warnings
            assert str(run / "checkpoints/00000003") in warning
            assert f": {name}: " in warning
            assert (run / "checkpoints/00000003.damaged").is_dir()
            advance(folder, 3)
            assert same(folder.load(), state(3)), way
            assert list(folder.records()) == lines(3), way
        shutil.rmtree(run)


def test_the_reason_for_a_damaged_checkpoint_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    text = run / "checkpoints/00000002/state.json"
    size = text.stat().st_size
    os.truncate(text, 5)
    (run / "checkpoints/00000001/state.safetensors").unlink()
    with RunFolder.open(run) as folder:
        assert folder.load() is None
        assert folder.warnings == [
            f"skipped the damaged checkpoint {run}/checkpoints/00000002: state.json: it holds 5 bytes, {size} expected",
            f"skipped the damaged checkpoint {run}/checkpoints/00000001: state.safetensors: No such file or directory",
        ]
        assert (run / "record.jsonl").stat().st_size == 0


def test_a_checkpoint_damaged_twice_replaces_the_folder_set_aside(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    with RunFolder.open(run) as folder:
        for _ in range(2):
            (run / "checkpoints/00000002/state.json").unlink()
            assert same(folder.load(), state(1))
            folder.save(state(2), 2)
    assert sorted(item.name for item in (run / "checkpoints").iterdir()) == [
        "00000001",
        "00000002",
        "00000002.damaged",
    ]


def test_a_record_shorter_than_the_checkpoint_says_is_damage(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    size = sum(map(len, (run / "record.jsonl").read_bytes().splitlines(keepends=True)[:3]))
    os.truncate(run / "record.jsonl", size - 1)
    with RunFolder.open(run) as folder:
        assert same(folder.load(), state(2))
        assert list(folder.records()) == lines(2)
        assert f"record.jsonl: it holds {size - 1} bytes, {size} expected" in folder.warnings[0]


def test_a_lost_record_ends_in_a_new_start(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    (run / "record.jsonl").unlink()
    with RunFolder.open(run) as folder:
        assert folder.load() is None
        assert len(folder.warnings) == 2


def test_a_checkpoint_of_another_format_is_refused_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", 2)
    monkeypatch.setattr("forkmerge.engine.storage.run_folder.FORMAT", 2)
    before = names(run)
    with RunFolder.open(run) as folder, pytest.raises(StoreError, match="has format 1, not 2"):
        folder.load()
    assert names(run) == before


def test_looking_at_a_run_changes_nothing_and_writing_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    os.truncate(run / "checkpoints/00000003/state.json", 5)
    (run / "checkpoints/.tmp-00000004").mkdir()
    before, record = names(run), (run / "record.jsonl").read_bytes()
    with RunFolder.open(run, lock=False) as folder:
        assert same(folder.load(), state(2))
        assert len(folder.warnings) == 1
        for method, *arguments in ("record", {}), ("save", 1, 9), ("keep_branches", 1, 1), ("finish", {}, {}):
            with pytest.raises(StoreError, match="opened for reading only"):
                getattr(folder, method)(*arguments)
    assert names(run) == before
    assert (run / "record.jsonl").read_bytes() == record


def test_what_cannot_be_saved_is_named_before_anything_is_written(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", {}) as folder:
        before = names(folder.path)
        with pytest.raises(StoreError, match=r"^scheduler\.anneal: a function cannot be saved"):
            folder.save({"scheduler": {"anneal": lambda: 0}}, 1)
        with pytest.raises(StoreError, match=r"^a: a set cannot be recorded"):
            folder.record({"a": {1}})
        assert names(folder.path) == before


def test_create_refuses_a_folder_with_anything_in_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1)
    before = names(run)
    with pytest.raises(StoreError, match=f"choose another folder or continue it with `forkmerge resume {run}`"):
        RunFolder.create(run, {})
    assert names(run) == before
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="exists and is not an empty folder"):
        RunFolder.create(tmp_path / "file", {})


def test_create_takes_an_empty_folder(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, {"a": 1}).close()
    assert without_checksums((tmp_path / "config.json").read_bytes()) == {"a": 1}


def test_create_names_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "run"
    with pytest.raises(StoreError, match=rf"cannot create the run folder {path}: Not a directory"):
        RunFolder.create(path, {})


@pytest.mark.parametrize("config", [{"x": torch.zeros(1)}, {"x": lambda: 0}], ids=["tensor", "function"])
def test_create_refuses_an_unsavable_config_before_making_the_folder(tmp_path: Path, config: Any) -> None:
    with pytest.raises(StoreError, match="x: a "):
        RunFolder.create(tmp_path / "run", config)
    assert not (tmp_path / "run").exists()


def test_open_and_status_refuse_what_is_not_a_run(tmp_path: Path) -> None:
    for look in (RunFolder.open, status):
        with pytest.raises(StoreError, match=r"is not a run folder: it holds no config\.json"):
            look(tmp_path)
    assert names(tmp_path) == set()


def test_a_comparison_in_place_of_a_run_is_named_with_what_shows_it(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    for look in (RunFolder.open, status):
        with pytest.raises(
            StoreError,
            match=rf"^{tmp_path} is a comparison: `forkmerge compare {tmp_path}` shows it, and the command that began "
            r"it goes on with it\.$",
        ):
            look(tmp_path)


def test_an_unreadable_config_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1)
    (run / "config.json").write_text("{")
    with pytest.raises(StoreError, match=r"config\.json is not JSON"):
        RunFolder.open(run)


def test_the_record_is_strict_json_and_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", {}) as folder:
        folder.record({"loss": float("nan"), "task": "é\n"})
        with (folder.path / "record.jsonl").open("ab") as file:
            file.write(b'{"loss": 1')
        assert list(folder.records()) == [{"loss": None, "task": "é\n"}]


def test_a_broken_line_inside_the_record_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1)
    (run / "record.jsonl").write_bytes(b'{"a": 1}\n{"a"\n{"a": 3}\n')
    with pytest.raises(StoreError, match=r"line 2 of .*record\.jsonl is not JSON"):
        list(RunFolder.open(run, lock=False).records())


def test_kept_branches_come_back_and_are_never_pruned(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", {}) as folder:
        with pytest.raises(StoreError, match=r"run keeps no branches of round 0\. Kept rounds: none\.$"):
            folder.load_branches(0)
        for index in range(4):
            folder.keep_branches(state(index), index)
        folder.keep_branches(state(9), 1)
        assert [folder.load_branches(index)["step"] for index in range(4)] == [0, 9, 2, 3]
        assert same(folder.load_branches(3), state(3))
        with pytest.raises(StoreError, match=r"keeps no branches of round 7\. Kept rounds: 0, 1, 2, 3\.$"):
            folder.load_branches(7)
        os.truncate(tmp_path / "run/branches/00000002/state.json", 3)
        with pytest.raises(StoreError, match=r"00000002 are damaged: state\.json: it holds 3 bytes"):
            folder.load_branches(2)


def test_branches_are_read_after_the_record_was_cut_back(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", {}) as folder:
        folder.record({"step": 1})
        folder.keep_branches(state(1), 1)
        assert folder.load() is None
        assert same(folder.load_branches(1), state(1))


def test_a_finished_run_holds_its_result_and_a_model_plain_safetensors_reads(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = torch.nn.Linear(2, 2)
    model.tied = model.weight
    with RunFolder.create(tmp_path / "run", {}) as folder:
        assert folder.result() is None
        with pytest.raises(StoreError, match="is not finished: continue it with `forkmerge resume"):
            folder.model_tensors()
        folder.finish({"score": 0.5, "worst": float("-inf")}, model.state_dict())
        assert folder.result() == {"score": 0.5, "worst": None}
        for tensors in (folder.model_tensors(), load_file(tmp_path / "run/model.safetensors")):
            assert tensors.keys() == model.state_dict().keys()
            assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize("spoil", [lambda path: os.truncate(path, 40), Path.unlink], ids=["cut", "missing"])
def test_a_damaged_model_is_named(tmp_path: Path, spoil: Callable[[Path], Any]) -> None:
    with RunFolder.create(tmp_path / "run", {}) as folder:
        folder.finish({}, {"w": torch.ones(3)})
        spoil(tmp_path / "run/model.safetensors")
        with pytest.raises(StoreError, match=r"run is damaged: model\.safetensors: "):
            folder.model_tensors()


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was unpickled")

    for module, name in [(pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")]:
        monkeypatch.setattr(module, name, refuse)
    run = make_run(tmp_path / "run", 2)
    with RunFolder.open(run) as folder:
        assert same(folder.load(), state(2))
        folder.keep_branches(state(1), 1)
        assert same(folder.load_branches(1), state(1))
        folder.finish({}, {"w": torch.ones(3)})
        assert torch.equal(folder.model_tensors()["w"], torch.ones(3))


def test_asking_for_the_status_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1)
    (run / "lock").unlink()
    assert status(run) == "interrupted"
    with RunFolder.open(run) as folder:
        assert status(run) == "running"
        folder.finish({}, {})
        assert status(run) == "finished"


def test_runs_are_listed_directly_and_one_level_below(tmp_path: Path) -> None:
    expected = [make_run(tmp_path / name, 0) for name in ("a", "group/b", "group/c")]
    make_run(tmp_path / "one/two/too-deep", 0)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    assert list_runs(tmp_path) == expected
    assert list_runs(expected[0]) == expected[:1]
    assert list_runs(tmp_path / "absent") == []


def test_no_store_has_every_method_of_a_run_folder_and_keeps_nothing() -> None:
    for name, method in inspect.getmembers(RunFolder, inspect.isfunction):
        # Not `isascii`: what tests/mutants.py adds to a class.
        if name.isascii() and (not name.startswith("_") or name in ("__enter__", "__exit__")):
            twin = inspect.signature(getattr(NoStore, name))
            assert list(twin.parameters) == list(inspect.signature(method).parameters), name
    with NoStore() as store:
        store.record({"a": 1})
        store.save(object(), 1)
        store.keep_branches(1, 1)
        store.finish({}, {})
        assert store.load() is None
        assert store.result() is None
        assert list(store.records()) == []
        with pytest.raises(StoreError, match=r"^the branches of round 1 were not kept: give the run a folder\.$"):
            store.load_branches(1)
        with pytest.raises(StoreError, match=r"^the model was not kept: give the run a folder\.$"):
            store.model_tensors()


def test_what_the_disk_refuses_is_said_for_every_operation(tmp_path: Path, faults: Faults) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    run = tmp_path / "run"
    with RunFolder.create(run, {}) as folder:
        operations: dict[str, Callable[[], Any]] = {
            f"append to {run}/record.jsonl": lambda: folder.record({"a": 1}),
            f"write {run}/checkpoints/00000001": lambda: folder.save(1, 1),
            f"write {run}/branches/00000002": lambda: folder.keep_branches(1, 2),
            f"write {run}/model.safetensors": lambda: folder.finish({}, {}),
            f"continue from {run}": folder.load,
        }
        for doing, operation in operations.items():
            faults.arm(1, "before", full)
            with pytest.raises(StoreError, match=rf"^cannot {doing}: No space left on device\.$"):
                operation()
            faults.disarm()
        (run / "record.jsonl").unlink()
        with pytest.raises(StoreError, match=rf"^cannot read {run}/record\.jsonl: No such file or directory\.$"):
            list(folder.records())
    (run / "lock").unlink()
    (run / "lock").mkdir()
    with pytest.raises(StoreError, match=rf"^cannot open the run folder {run}: Is a directory\.$"):
        RunFolder.open(run)
    with pytest.raises(StoreError, match=rf"^cannot read {run}/lock: Is a directory\.$"):
        status(run)


def flipped(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_a_config_that_has_changed_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1)
    flipped(run / "config.json", (run / "config.json").read_text().index("10") + 1)
    for lock in (False, True):
        with pytest.raises(StoreError, match=r"run/config\.json is damaged: it does not match its own checksum"):
            RunFolder.open(run, lock=lock)
    for text in (
        "[]",
        '{"$": "tuple", "v": [3]}',
        '{"a": {"$": "str", "v": [1e999]}}',
        '{"a": {"$": "tensor", "v": "x"}}',
    ):
        (run / "config.json").write_text(text)
        with pytest.raises(StoreError, match=r"run/config\.json (holds no JSON object|is not the config of a run)"):
            RunFolder.open(run)


def test_a_line_of_the_record_that_has_changed_is_named_and_a_torn_one_is_not(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    record = run / "record.jsonl"
    text = record.read_bytes()
    for position, line in ((text.index(b": 2") + 2, 2), (len(text) - 1, 4), (text.index(b"\n"), 1)):
        record.write_bytes(text)
        flipped(record, position)
        with (
            pytest.raises(StoreError, match=rf"^line {line} of {record} is "),
            RunFolder.open(run, lock=False) as folder,
        ):
            list(folder.records())
    record.write_bytes(text[:-1])
    with RunFolder.open(run, lock=False) as folder:
        assert list(folder.records()) == lines(3)


def test_a_result_that_has_changed_is_named_and_its_model_not_used(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", {}) as folder:
        folder.finish({"score": 0.5}, {"w": torch.ones(3)})
        path = tmp_path / "run/result.json"
        text = path.read_text()
        flipped(path, text.index("0.5"))
        for read in (folder.result, folder.model_tensors):
            with pytest.raises(StoreError, match=r"run/result\.json is damaged: it does not match its own checksum"):
                read()
        path.write_text('{"format": 1, "files": {}, "result": []}')
        assert folder.result() == {}
        with pytest.raises(StoreError, match=r"result\.json is not the result of a run: it lacks 'model\.safetensors'"):
            folder.model_tensors()
        path.write_text('{"result": 3, "files": {"model.safetensors": 3}}')
        for read in (folder.result, folder.model_tensors):
            with pytest.raises(StoreError, match=r"result\.json is not the result of a run: "):
                read()


def test_a_run_with_the_config_or_the_checkpoints_of_another_is_refused_by_name(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, 2) for name in "ab"]
    for name in ("config.json", "checkpoints"):
        mixed = tmp_path / f"mixed {name}"
        shutil.copytree(runs[0], mixed)
        atomic_files.remove(mixed / name)
        (shutil.copytree if name == "checkpoints" else shutil.copy)(runs[1] / name, mixed / name)
        before = names(mixed)
        with RunFolder.open(mixed) as folder, pytest.raises(StoreError) as caught:
            folder.load()
        caught.match(rf"^{mixed}/checkpoints/00000002 was written by another run than this folder's: put each back")
        assert names(mixed) == before


def test_a_run_whose_config_was_exchanged_is_refused_by_name(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    with RunFolder.open(run) as folder:
        folder.keep_branches(state(1), 1)
    config = json.loads((run / "config.json").read_text())
    config.pop("sha256")
    (run / "config.json").write_text(json.dumps(with_checksum({**config, "steps": 11})))
    with RunFolder.open(run) as folder:
        for read in (folder.load, lambda: folder.load_branches(1)):
            with pytest.raises(
                StoreError, match=r"0000000[12] was written with another config\.json than this folder's"
            ):
                read()


def test_a_copy_of_a_run_goes_on_and_so_does_one_of_an_earlier_version(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    shutil.copytree(run, tmp_path / "copy")
    earlier = as_earlier_version(shutil.copytree(run, tmp_path / "earlier"))
    for path in (tmp_path / "copy", earlier):
        with RunFolder.open(path) as folder:
            assert same(folder.load(), state(2))
            assert list(folder.records()) == lines(2)
            advance(folder, 3)
        with RunFolder.open(path) as folder:
            assert folder.warnings == []
            assert same(folder.load(), state(3))
            assert list(folder.records()) == lines(3)
    for own, other in ((run, earlier), (earlier, run)):
        mixed = shutil.copytree(own, tmp_path / f"{own.name} with the checkpoints of the other")
        shutil.rmtree(mixed / "checkpoints")
        shutil.copytree(other / "checkpoints", mixed / "checkpoints")
        with RunFolder.open(mixed) as folder, pytest.raises(StoreError, match="was written by another run"):
            folder.load()


def test_a_record_of_another_run_is_not_taken_for_its_own(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "one", 2), make_run(tmp_path / "other", 3)
    with RunFolder.open(one, lock=False) as folder:
        assert list(folder.records()) == lines(3)
        shutil.copy(other / "record.jsonl", one / "record.jsonl")
        with pytest.raises(StoreError, match=r"record\.jsonl was written by another run"):
            list(folder.records())


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_a_folder_that_is_gone_is_noticed_at_the_next_write(how: str, tmp_path: Path) -> None:
    """The open record would take every further line, and nobody would ever see one."""
    path = tmp_path / "run"
    with RunFolder.create(path, {"a": 1}) as run:
        run.record({"event": "start"})
        path.rename(tmp_path / "elsewhere")
        if how == "removed":
            shutil.rmtree(tmp_path / "elsewhere")
        if how == "replaced":
            RunFolder.create(path, {"a": 2}).close()
        for write in (
            lambda: run.record({"event": "x"}),
            lambda: run.rounds.append(1, {}),
            lambda: run.save({"b": 1}, 1),
            lambda: run.finish({}, {}),
        ):
            with pytest.raises(StoreError, match=r"removed, moved or replaced .* move it back .* start again"):
                write()
        assert how == "replaced" or not path.exists()
        if how == "moved":
            (tmp_path / "elsewhere").rename(path)
            run.record({"event": "back"})

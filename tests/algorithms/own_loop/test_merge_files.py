"""Models on disk merge to the bits of models in memory, in pieces, and nothing half is ever left under a name."""

from __future__ import annotations

import gc
import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import forkmerge as fm
from forkmerge.engine.storage import weight_files
from forkmerge.engine.storage.weight_files import INDEX, WHOLE, StoredTensor
from tensor_bits import same_bits

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64)


def state(seed: int) -> dict[str, Tensor]:
    """Every kind of tensor: floats of all widths, whole numbers, a scalar, an empty one, a mask, odd numbers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {str(dtype)[6:]: torch.randn(7, 5, generator=generator).to(dtype) for dtype in DTYPES}
    odd = torch.randn(6, generator=generator)
    odd[:4] = torch.tensor([-math.inf, math.inf, math.nan, -0.0])
    whole = torch.randint(100, (3,), generator=generator)
    scalar = torch.randn((), generator=generator)
    return {**tensors, "odd": odd, "whole": whole, "flag": whole > 50, "scalar": scalar, "empty": torch.zeros(0, 3)}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "PIECE", 4)


@pytest.fixture
def states(tmp_path: Path) -> dict[str, dict[str, Tensor]]:
    made = {name: state(seed) for seed, name in enumerate("abc")}
    for name, tensors in made.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    return made


def paths(folder: Path, names: str = "abc") -> dict[str, Path]:
    return {name: folder / f"{name}.safetensors" for name in names}


def write_shards(folder: Path, tensors: dict[str, Tensor], cut: int = 4) -> Path:
    folder.mkdir()
    names = list(tensors)
    parts = {"model-1.safetensors": names[:cut], "model-2.safetensors": names[cut:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("vector", [(0.5, 0.3, 0.2), (0.2, 0.8, 0.0), (0.0, 1.0, 0.0), (1 / 3, 1 / 3, 1 / 3)])
def test_a_merge_of_files_has_the_bits_of_a_merge_in_memory(states: Any, tmp_path: Path, vector: Any) -> None:
    coefficients = dict(zip("abc", vector, strict=True))
    outcome = fm.merge_files(paths(tmp_path), tmp_path / "out.safetensors", coefficients=coefficients)
    assert outcome.coefficients == coefficients
    assert same_bits(load_file(tmp_path / "out.safetensors"), fm.merge_states(states, coefficients))


def test_at_most_one_piece_per_checkpoint_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "PIECE", 1000)
    for seed, name in enumerate("abc"):
        generator = torch.Generator().manual_seed(seed)
        save_file({f"w{i}": torch.randn(50_000, generator=generator) for i in range(3)}, paths(tmp_path)[name])
    held, most = 0, 0
    read = StoredTensor.read

    def forget(count: int) -> None:
        nonlocal held
        held -= count

    def counted(self: StoredTensor, start: int, stop: int) -> Tensor:
        nonlocal held, most
        tensor = read(self, start, stop)
        held += tensor.nbytes
        most = max(most, held)
        weakref.finalize(tensor, forget, tensor.nbytes)
        return tensor

    monkeypatch.setattr(StoredTensor, "read", counted)
    gc.disable()  # nothing waits for a collection
    try:
        fm.merge_files(paths(tmp_path), tmp_path / "out", coefficients={"a": 0.5, "b": 0.3, "c": 0.2})
    finally:
        gc.enable()
    # The pieces of one merge, and while the next are read, the last: of 600 kB per checkpoint.
    assert 3 * 4000 <= most <= 2 * 3 * 4000


def test_a_checkpoint_of_coefficient_0_is_not_read(
    states: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = StoredTensor.read

    def refusing(self: StoredTensor, start: int, stop: int) -> Tensor:
        assert self.file.name != "b.safetensors"
        return read(self, start, stop)

    monkeypatch.setattr(StoredTensor, "read", refusing)
    fm.merge_files(paths(tmp_path), tmp_path / "out", coefficients={"a": 0.5, "b": 0.0, "c": 0.5})


class TestFolders:
    def test_shards_stay_shards_with_an_index_and_the_first_models_config(self, states: Any, tmp_path: Path) -> None:
        one = write_shards(tmp_path / "one", states["a"])
        other = write_shards(tmp_path / "other", states["b"], cut=7)
        (one / "config.json").write_text("{}")
        (one / "modeling.py").write_text("raise SystemExit")
        (one / "tokenizer.json").symlink_to(tmp_path / "a.safetensors")
        coefficients = {"one": 0.75, "other": 0.25}
        out = tmp_path / "out"
        fm.merge_files({"one": one, "other": other}, out, coefficients=coefficients)
        assert {p.name for p in out.iterdir()} == {"model-1.safetensors", "model-2.safetensors", INDEX, "config.json"}
        index = json.loads((out / INDEX).read_text())
        assert index["weight_map"] == json.loads((one / INDEX).read_text())["weight_map"]
        merged = {}
        for file in set(index["weight_map"].values()):
            merged.update(load_file(out / file))
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in merged.values())
        expected = fm.merge_states({"one": states["a"], "other": states["b"]}, coefficients)
        assert same_bits(merged, {name: expected[name] for name in merged})
        assert merged.keys() == expected.keys()

    def test_shards_merge_into_one_file_and_files_into_a_folder(self, states: Any, tmp_path: Path) -> None:
        shards = write_shards(tmp_path / "shards", states["a"])
        mixed = {"a": shards, "b": tmp_path / "b.safetensors"}
        expected = fm.merge_states({name: states[name] for name in "ab"}, {"a": 0.5, "b": 0.5})
        fm.merge_files(mixed, tmp_path / "out.safetensors", coefficients={"a": 0.5, "b": 0.5})
        assert same_bits(load_file(tmp_path / "out.safetensors"), expected)
        fm.merge_files(paths(tmp_path, "ab"), tmp_path / "out", coefficients={"a": 0.5, "b": 0.5})
        assert [path.name for path in (tmp_path / "out").iterdir()] == [WHOLE]

    def test_a_transformers_model_of_several_shards_can_be_merged_and_loaded(self, tmp_path: Path) -> None:
        from transformers import BertConfig, BertForSequenceClassification

        models = {}
        for seed, name in enumerate(("one", "other")):
            torch.manual_seed(seed)
            config = BertConfig(
                vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
            )
            models[name] = BertForSequenceClassification(config)
            models[name].save_pretrained(tmp_path / name, max_shard_size="4KB")
        assert len(list((tmp_path / "one").glob("*.safetensors"))) > 1
        coefficients = {"one": 0.75, "other": 0.25}
        fm.merge_files({n: tmp_path / n for n in models}, tmp_path / "out", coefficients=coefficients)
        merged = BertForSequenceClassification.from_pretrained(tmp_path / "out")
        expected = fm.merge_states({name: model.state_dict() for name, model in models.items()}, coefficients)
        assert same_bits(dict(merged.state_dict()), expected)


class TestSearch:
    """Of three points on a line, w = 0, 1 and 4, the score wants w = 0.5."""

    @pytest.fixture
    def points(self, tmp_path: Path) -> dict[str, Path]:
        for name, value in {"a": 0.0, "b": 1.0, "c": 4.0}.items():
            save_file({"w": torch.full((9,), value)}, paths(tmp_path)[name])
        return paths(tmp_path)

    @staticmethod
    def score_path(path: Path) -> float:
        return TestSearch.score_state(load_file(path))

    @staticmethod
    def score_state(tensors: dict[str, Tensor]) -> float:
        return -(tensors["w"] - 0.5).abs().sum().item()

    def test_scores_of_paths_and_of_states_find_the_same_merge_as_scores_of_models(
        self, points: dict[str, Path], tmp_path: Path
    ) -> None:
        by_path = fm.merge_files(points, tmp_path / "one.safetensors", score=self.score_path)
        by_state = fm.merge_files(points, tmp_path / "two.safetensors", score_state=self.score_state)
        assert by_path == by_state
        assert by_path.coefficients["b"] > 0
        assert by_path.score > max(by_path.branch_scores.values())
        assert by_path.score == self.score_path(tmp_path / "one.safetensors")
        assert same_bits(load_file(tmp_path / "one.safetensors"), load_file(tmp_path / "two.safetensors"))

    def test_candidates_lie_beside_out_while_they_are_scored_and_checkpoints_where_they_are(
        self, points: dict[str, Path], tmp_path: Path
    ) -> None:
        seen = []

        def score(path: Path) -> float:
            seen.append(path)
            return self.score_path(path / WHOLE if path.is_dir() else path)

        fm.merge_files(points, tmp_path / "new" / "out", score=score, search="greedy")
        assert seen[:3] == list(points.values())
        assert len(seen) > 3
        assert all(path.is_relative_to(tmp_path / "new") and not path.exists() for path in seen[3:])
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]

    def test_a_score_that_fails_leaves_nothing(self, points: dict[str, Path], tmp_path: Path) -> None:
        calls = 0

        def score(path: Path) -> float:
            nonlocal calls
            calls += 1
            if calls == 5:
                raise OverflowError
            return 0.0

        with pytest.raises(OverflowError):
            fm.merge_files(points, tmp_path / "new" / "out", score=score)
        assert not list((tmp_path / "new").iterdir())

    def test_sums_need_a_fork_point_which_files_have_none_of(self, points: dict[str, Path], tmp_path: Path) -> None:
        with pytest.raises(fm.ProblemError, match=r"Sums needs what the branches were forked from"):
            fm.merge_files(points, tmp_path / "out", score=self.score_path, search="sums")

    @pytest.mark.parametrize("value", [math.nan, "much"])
    def test_a_score_by_which_nothing_can_be_chosen_is_refused(
        self, points: dict[str, Path], tmp_path: Path, value: Any
    ) -> None:
        with pytest.raises(fm.ProblemError, match=r"NaN|one number"):
            fm.merge_files(points, tmp_path / "out", score=lambda path: value)
        assert not (tmp_path / "out").exists()


class TestRefusals:
    def test_what_does_not_fit_together_is_named(self, states: Any, tmp_path: Path) -> None:
        changes = {
            "missing": {k: v for k, v in states["a"].items() if k != "odd"},
            "float32[7]": {**states["a"], "odd": torch.zeros(7)},
            "float64[6]": {**states["a"], "odd": torch.zeros(6, dtype=torch.float64)},
        }
        for kind, tensors in changes.items():
            save_file(tensors, tmp_path / "b.safetensors")
            with pytest.raises(fm.ProblemError) as caught:
                fm.merge_files(paths(tmp_path, "ab"), tmp_path / "out", coefficients={"a": 0.5, "b": 0.5})
            assert str(caught.value) == (
                "checkpoints 'a' and 'b' cannot be merged: the tensor 'odd' is float32[6] in one and "
                f"{kind} in the other."
            )

    def test_coefficients_are_one_per_checkpoint_and_sum_to_1(self, states: Any, tmp_path: Path) -> None:
        for wrong, message in (({"a": 1.0}, "checkpoints are"), ({"a": 0.9, "b": 0.9}, "sum to 1")):
            with pytest.raises(fm.ProblemError, match=message):
                fm.merge_files(paths(tmp_path, "ab"), tmp_path / "out", coefficients=wrong)
        for options in ({}, {"score": len, "score_state": len}, {"coefficients": {"a": 1.0}, "score": len}):
            with pytest.raises(fm.ProblemError, match="one of coefficients, score and score_state"):
                fm.merge_files(paths(tmp_path, "a"), tmp_path / "out", **options)  # type: ignore[arg-type]
        with pytest.raises(fm.ProblemError, match="got \\['a'\\]"):
            fm.merge_files(["a"], tmp_path / "out", coefficients={})  # type: ignore[arg-type]
        assert not (tmp_path / "out").exists()

    def test_what_exists_is_not_replaced(self, states: Any, tmp_path: Path) -> None:
        taken = tmp_path / "a.safetensors"
        before = taken.read_bytes()
        with pytest.raises(fm.StoreError, match="choose another name"):
            fm.merge_files(paths(tmp_path, "ab"), taken, coefficients={"a": 0.5, "b": 0.5})
        assert taken.read_bytes() == before

    def test_a_full_disk_leaves_nothing(self, states: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(weight_files, "sync", full)
        with pytest.raises(fm.StoreError, match="No space left"):
            fm.merge_files(paths(tmp_path, "ab"), tmp_path / "new" / "out", coefficients={"a": 0.5, "b": 0.5})
        assert not list((tmp_path / "new").iterdir())

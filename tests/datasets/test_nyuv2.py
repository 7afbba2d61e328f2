"""NYUv2 in miniature, in the layout of MTAN and LibMTL."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import forkmerge as fm
from forkmerge.datasets import dense, nyuv2
from forkmerge.datasets.nyuv2 import Scenes
from forkmerge.models import DenseModel, ResNet
from forkmerge.problem.batch_reader import reader_of

H, W = 12, 16


def scene(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    normals = rng.normal(size=(H, W, 3))
    return {
        "image": rng.random((H, W, 3)),
        "label": rng.integers(-1, 13, (H, W)).astype(np.float64),
        "depth": rng.random((H, W, 1)) * 5 * (rng.random((H, W, 1)) > 0.2),
        "normal": normals / np.linalg.norm(normals, axis=2, keepdims=True),
    }


def write(root: Path, training: int = 6, test: int = 3) -> None:
    for part, count, offset in (("train", training, 0), ("val", test, 100)):
        for index in range(count):
            for kind, values in scene(offset + index).items():
                (root / part / kind).mkdir(parents=True, exist_ok=True)
                np.save(root / part / kind / f"{index}.npy", values)


def small_network() -> DenseModel:
    return DenseModel(ResNet(18, output_stride=8, pool=False), nyuv2.OUTPUTS, rates=(1,), width=4)


class TestScenes:
    def test_hold_what_the_files_hold(self, tmp_path: Path) -> None:
        write(tmp_path)
        images, labels, depths, normals = Scenes(tmp_path / "train").read_batch(torch.tensor([4, 1]))
        for index, seed in enumerate((4, 1)):
            wanted = scene(seed)
            assert np.allclose(images[index].permute(1, 2, 0), wanted["image"], atol=1e-6)
            assert np.array_equal(labels[index], wanted["label"])
            assert np.allclose(depths[index].permute(1, 2, 0), wanted["depth"], atol=1e-6)
            assert np.allclose(normals[index].permute(1, 2, 0), wanted["normal"], atol=1e-6)
        assert [column.dtype for column in (images, labels, depths, normals)] == [
            torch.float32,
            torch.int64,
            torch.float32,
            torch.float32,
        ]

    def test_single_scenes_are_those_of_a_batch(self, tmp_path: Path) -> None:
        write(tmp_path)
        scenes = Scenes(tmp_path / "train")
        for one, column in zip(scenes[-1], scenes.read_batch(torch.tensor([5])), strict=True):
            assert torch.equal(one, column[0])
        with pytest.raises(IndexError):
            scenes[6]

    @pytest.mark.parametrize("kind", ["image", "label", "depth", "normal"])
    def test_truncated_and_corrupt_files_are_named_at_once(self, tmp_path: Path, kind: str) -> None:
        write(tmp_path)
        path = tmp_path / "train" / kind / "3.npy"
        whole = path.read_bytes()
        for broken in (whole[:-8], whole[:50], b"", b"not an array" * 20, whole.replace(b"}", b"{", 1)):
            path.write_bytes(broken)
            with pytest.raises(fm.ProblemError, match=rf"cannot read .*{kind}/3.npy"):
                Scenes(tmp_path / "train")

    def test_an_archive_in_place_of_an_array_is_named(self, tmp_path: Path) -> None:
        write(tmp_path)
        np.savez(tmp_path / "pack.npz", np.zeros(3))
        (tmp_path / "pack.npz").replace(tmp_path / "train" / "image" / "0.npy")
        with pytest.raises(fm.ProblemError, match=r"cannot read .*image/0.npy: it is an archive"):
            Scenes(tmp_path / "train")

    def test_objects_are_refused(self, tmp_path: Path) -> None:
        write(tmp_path)
        np.save(tmp_path / "train" / "label" / "0.npy", np.array([{}], dtype=object), allow_pickle=True)
        with pytest.raises(fm.ProblemError, match=r"cannot read .*label/0.npy"):
            Scenes(tmp_path / "train")

    def test_missing_files_are_named(self, tmp_path: Path) -> None:
        write(tmp_path)
        (tmp_path / "train" / "depth" / "2.npy").unlink()
        with pytest.raises(fm.ProblemError, match=r"depth/2.npy not found.*MTAN"):
            Scenes(tmp_path / "train")

    def test_other_shapes_are_named(self, tmp_path: Path) -> None:
        write(tmp_path)
        np.save(tmp_path / "train" / "normal" / "1.npy", np.zeros((H, W, 2)))
        with pytest.raises(fm.ProblemError, match=r"normal/1.npy has shape \(12, 16, 2\): expected .* 3 channels"):
            Scenes(tmp_path / "train")

    @pytest.mark.parametrize(
        ("kind", "value", "message"),
        [
            ("label", 13.0, "holds 13, expected 0 to 12, or -1"),
            ("label", 0.5, "holds 0.5, expected"),
            ("depth", np.nan, "not finite"),
        ],
    )
    def test_impossible_values_are_named_when_read(self, tmp_path: Path, kind: str, value: float, message: str) -> None:
        write(tmp_path)
        path = tmp_path / "train" / kind / "2.npy"
        values = np.load(path)
        values[0, 0] = value
        np.save(path, values)
        scenes = Scenes(tmp_path / "train")
        with pytest.raises(fm.ProblemError, match=rf"{kind}/2.npy.*{message}"):
            scenes[2]


class TestSplit:
    def test_is_fixed_by_a_file_of_the_papers_size(self) -> None:
        indices = nyuv2.validation_indices()
        assert len(set(indices)) == len(indices) == 159
        assert indices == sorted(indices)
        assert indices[0] >= 0
        assert indices[-1] < 795

    def test_of_fewer_images_is_not_empty(self) -> None:
        for count in (1, 2, 10, 300):
            indices = nyuv2.validation_indices(count)
            assert indices
            assert max(indices) < count

    def test_training_and_validation_images_are_disjoint(self, tmp_path: Path) -> None:
        write(tmp_path, training=12)
        problem = nyuv2.problem(root=tmp_path, check_counts=False)
        (stream,) = problem.stream_map.values()
        held = problem.target_validation.dataset.indices
        assert sorted([*stream.dataset.indices, *held]) == list(range(12))
        assert reader_of(stream) is not None


def write_split(folder: Path, **parts: object) -> Path:
    path = folder / "data_split.json"
    path.write_text(json.dumps(parts))
    return path


class TestSplitOfAFile:
    def test_the_file_says_which_images_train_and_which_validate(self, tmp_path: Path) -> None:
        write(tmp_path / "nyuv2")
        write_split(tmp_path, train=[5, 0, 3], val=[4, 1])  # in the data folder; image 2 is left out
        problem = nyuv2.problem(root=tmp_path, split="data_split.json", check_counts=False)
        (stream,) = problem.stream_map.values()
        assert stream.dataset.indices == [5, 0, 3]
        assert problem.target_validation.dataset.indices == [4, 1]

    @pytest.mark.parametrize(
        ("parts", "message"),
        [
            ({"train": [0, 1, 6], "val": [2]}, "'train' holds 6, expected numbers from 0 to 5"),
            ({"train": [0, 1], "val": [-1]}, "'val' holds -1, expected numbers from 0 to 5"),
            ({"train": [0, 1], "val": [2.5]}, r"'val' holds 2\.5, expected"),
            ({"train": [0, True], "val": [2]}, "'train' holds True, expected"),
            ({"train": [0, 1, 0], "val": [2]}, "names image 0 more than once"),
            ({"train": [0, 1], "val": [1]}, "names image 1 more than once"),
            ({"train": [0, 1]}, "found no 'val'"),
            ({"train": [], "val": [1]}, "found no 'train'"),
        ],
    )
    def test_what_cannot_be_meant_is_refused(self, tmp_path: Path, parts: dict[str, object], message: str) -> None:
        write(tmp_path)
        path = write_split(tmp_path, **parts)
        with pytest.raises(fm.ProblemError, match=message):
            nyuv2.problem(root=tmp_path, split=path, check_counts=False)

    def test_the_papers_counts_are_checked(self, tmp_path: Path) -> None:
        path = write_split(tmp_path, train=list(range(636)), val=list(range(636, 795)))
        assert [len(rows) for rows in nyuv2.read_split(path, 795)] == [636, 159]
        path = write_split(tmp_path, train=list(range(600)), val=list(range(600, 795)))
        with pytest.raises(fm.ProblemError, match="'train': expected 636 as in the paper, found 600"):
            nyuv2.read_split(path, 795)

    def test_a_file_that_is_missing_or_no_json_is_named(self, tmp_path: Path) -> None:
        write(tmp_path)
        with pytest.raises(fm.ProblemError, match=r"there is no file 'elsewhere.json', here or in"):
            nyuv2.problem(root=tmp_path, split="elsewhere.json", check_counts=False)
        (tmp_path / "data_split.json").write_text("train: 1")
        with pytest.raises(fm.ProblemError, match=r"cannot read .*data_split.json"):
            nyuv2.problem(root=tmp_path, split="data_split.json", check_counts=False)


class TestProblem:
    def test_missing_data_says_what_and_where(self, tmp_path: Path) -> None:
        with pytest.raises(fm.ProblemError, match=r"train/image/0.npy.*MTAN.*FORKMERGE_DATA"):
            nyuv2.problem(root=tmp_path)

    def test_counts_of_the_paper_are_checked(self, tmp_path: Path) -> None:
        write(tmp_path)
        with pytest.raises(fm.ProblemError, match="expected 795 as in the paper, found 6"):
            nyuv2.problem(root=tmp_path)

    def test_augmentations_depend_on_the_step_and_nothing_else(self, tmp_path: Path) -> None:
        write(tmp_path)
        torch.manual_seed(0)
        model = small_network().eval()
        losses, plain = dense.SceneLosses(True), dense.SceneLosses(False)
        batch = Scenes(tmp_path / "train").read_batch(torch.arange(4))
        values = [losses(model, batch, ["depth"], fm.Context(s, s))["depth"].item() for s in (0, 0, 1)]
        assert values[0] == values[1] != values[2]
        assert plain(model, batch, ["depth"], fm.Context(0, 0)) == plain(model, batch, ["depth"], fm.Context(1, 1))

    def test_the_three_tasks_train_and_are_measured_by_the_papers_metrics(self, tmp_path: Path) -> None:
        write(tmp_path / "nyuv2")
        problem = nyuv2.problem("normal", tmp_path, batch_size=2, check_counts=False)
        assert problem.tasks == ("normal", "segmentation", "depth")
        optimizer = fm.OptimizerOf("Adam", lr=1e-4)
        run = fm.Joint().fit(problem, model=small_network, optimizer=optimizer, steps=2)
        names = {task: set(fm.measure(run.model, e)) for task, e in problem.evaluations("test").items()}
        assert names == {
            "segmentation": {"mIoU", "pixel_accuracy"},
            "depth": {"absolute_error", "relative_error"},
            "normal": {"mean_angle", "median_angle", "within_11.25", "within_22.5", "within_30"},
        }

    def test_the_recipe_is_the_papers(self, tmp_path: Path) -> None:
        write(tmp_path)
        recipe = nyuv2.recipe("depth", root=str(tmp_path), check_counts=False)
        assert (recipe.steps, recipe.algorithm.interval) == (200 * 79, 10 * 79)
        assert recipe.problem.target == "depth"

    @pytest.mark.parametrize("augmented", [True, False])
    def test_the_recipe_may_leave_images_as_they_are(self, tmp_path: Path, augmented: bool) -> None:
        write(tmp_path)
        recipe = nyuv2.recipe(root=str(tmp_path), augmented=augmented, check_counts=False)
        (stream,) = recipe.problem.stream_map.values()
        assert stream.losses == dense.SceneLosses(augmented)

    @pytest.mark.parametrize("network", ["deeplab", "mtan"])
    def test_the_networks_have_a_map_per_task(self, network: str) -> None:
        model = partial(nyuv2.make_network, network, depth=18)().eval()
        with torch.no_grad():
            maps = model(torch.zeros(1, 3, 16, 24))
        assert {task: tuple(map_.shape) for task, map_ in maps.items()} == {
            task: (1, channels, 16, 24) for task, channels in nyuv2.OUTPUTS.items()
        }

    def test_an_unknown_network_is_refused(self) -> None:
        with pytest.raises(fm.ProblemError, match="'deeplab' or 'mtan'"):
            nyuv2.make_network("unet")

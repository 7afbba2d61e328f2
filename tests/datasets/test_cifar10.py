"""CIFAR-10 from binary files, pickles and tensors, and its splits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

import forkmerge as fm
from few_label_files import expected, same, write_binary, write_python
from forkmerge.datasets import cifar10, semi, svhn


@pytest.mark.parametrize("subfolder", ["", "cifar-10-batches-bin"])
def test_is_read_from_the_binary_version(tmp_path: Path, subfolder: str) -> None:
    write_binary(tmp_path / subfolder)
    assert same(cifar10.load(tmp_path), expected())


def test_is_read_from_the_folder_that_the_environment_names(tmp_path: Path, monkeypatch) -> None:
    write_binary(tmp_path)
    monkeypatch.setenv("FORKMERGE_DATA", str(tmp_path))
    assert same(cifar10.load(), expected())


def test_is_read_from_the_python_version(tmp_path: Path) -> None:
    write_python(tmp_path / "cifar-10-batches-py")
    assert same(cifar10.load(tmp_path), expected())


@pytest.mark.parametrize("channels_last", [False, True])
def test_is_read_from_tensors(tmp_path: Path, channels_last: bool) -> None:
    folder, wanted = tmp_path / "cifar10", expected()
    folder.mkdir()
    for name, images, classes in (("train", *wanted[:2]), ("test", *wanted[2:])):
        kept = images.permute(0, 2, 3, 1).contiguous() if channels_last else images
        torch.save({"images": kept, "labels": classes} if channels_last else (kept, classes), folder / f"{name}.pt")
    assert same(cifar10.load(tmp_path), wanted)


def test_missing_files_are_named_with_where_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(fm.ProblemError, match=r"data_batch_1.bin.*University of Toronto"):
        cifar10.load(tmp_path)
    write_binary(tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(fm.ProblemError, match=r": data_batch_3.bin not found"):
        cifar10.load(tmp_path)
    with pytest.raises(fm.ProblemError, match="there is no folder"):
        cifar10.load(tmp_path / "nowhere")


def test_without_any_folder_the_message_says_what_to_set(monkeypatch) -> None:
    monkeypatch.delenv("FORKMERGE_DATA", raising=False)
    with pytest.raises(fm.ProblemError, match="set FORKMERGE_DATA"):
        cifar10.load()


def test_truncated_files_are_named(tmp_path: Path) -> None:
    write_binary(tmp_path)
    path = tmp_path / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(fm.ProblemError, match=r"data_batch_2.bin has 61,459 bytes"):
        cifar10.load(tmp_path)


def test_impossible_classes_are_refused(tmp_path: Path) -> None:
    write_binary(tmp_path)
    path = tmp_path / "test_batch.bin"
    path.write_bytes(b"\x0a" + path.read_bytes()[1:])
    with pytest.raises(fm.ProblemError, match=r"test_batch.bin: labels holds 10, expected 0 to 9"):
        cifar10.load(tmp_path)


def test_a_truncated_pickle_is_named(tmp_path: Path) -> None:
    write_python(tmp_path)
    path = tmp_path / "data_batch_4"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(fm.ProblemError, match=r"cannot read .*data_batch_4"):
        cifar10.load(tmp_path)


def test_counts_of_the_paper_are_checked(tmp_path: Path) -> None:
    write_binary(tmp_path)
    with pytest.raises(fm.ProblemError, match=r"expected 50,000 as in the paper, found 100.*check_counts=False"):
        cifar10.splits(tmp_path)


def test_a_pt_file_runs_no_code(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cifar10").mkdir()
    for name in ("train", "test"):
        torch.save({"images": Spy((os.mkdir, ("owned",)))}, tmp_path / "cifar10" / f"{name}.pt")
    with pytest.raises(fm.ProblemError, match=r"train.pt holds no tensors that can be read safely"):
        cifar10.load(tmp_path)
    assert not (tmp_path / "owned").exists()


class Spy:
    def __init__(self, call: tuple) -> None:
        self.call = call

    def __reduce__(self) -> tuple:
        return self.call


class TestSplits:
    def parts(self, folder: Path, **options: int) -> semi.SemiSplits:
        write_binary(folder)
        return cifar10.splits(folder, **{"labels": 20, "validation": 30, "check_counts": False, **options})

    def keys(self, dataset: torch.utils.data.TensorDataset) -> set[bytes]:
        return {image.numpy().tobytes() for image in dataset.tensors[0]}

    def test_are_disjoint_whole_and_balanced(self, tmp_path: Path) -> None:
        parts = self.parts(tmp_path)
        sizes = [len(part) for part in (parts.labelled, parts.unlabelled, parts.validation, parts.test)]
        assert sizes == [20, 50, 30, 20]
        three = [self.keys(part) for part in (parts.labelled, parts.unlabelled, parts.validation)]
        assert len(set.union(*three)) == 100
        assert torch.bincount(parts.labelled.tensors[1], minlength=10).tolist() == [2] * 10

    def test_keep_every_image_with_its_class(self, tmp_path: Path) -> None:
        parts, data = self.parts(tmp_path), expected()
        classes = {i.numpy().tobytes(): int(c) for i, c in zip(data.images, data.classes, strict=True)}
        for part in (parts.labelled, parts.validation):
            for image, label in part:
                assert classes[image.numpy().tobytes()] == int(label)

    def test_depend_on_the_seed_alone(self, tmp_path: Path) -> None:
        first, again, other = (self.keys(self.parts(tmp_path, seed=seed).labelled) for seed in (0, 0, 1))
        assert first == again
        assert first != other

    def test_label_all_images_where_no_number_is_given(self, tmp_path: Path) -> None:
        parts = self.parts(tmp_path, labels="all")
        assert len(parts.labelled) == len(parts.unlabelled) == 70

    def test_refuse_more_labels_than_there_are(self, tmp_path: Path) -> None:
        with pytest.raises(fm.ProblemError, match="more than the 100 images"):
            self.parts(tmp_path, labels=80)
        with pytest.raises(fm.ProblemError, match=r"class \d has \d+ training images"):
            self.parts(tmp_path, labels=69)
        with pytest.raises(fm.ProblemError, match="labels must be a positive integer"):
            self.parts(tmp_path, labels=0)

    def test_the_papers_counts_follow(self) -> None:
        assert cifar10.TRAINING - cifar10.VALIDATION - cifar10.LABELS == 41_000
        assert svhn.TRAINING - svhn.VALIDATION - svhn.LABELS == 64_931

    def test_a_supervised_run_trains_on_them(self, tmp_path: Path) -> None:
        recipe = semi.supervised_recipe(self.parts(tmp_path), "small", 3, 0)
        run = recipe.fit()
        value = fm.measure(run.model, recipe.problem.evaluations("test")[semi.TASK])["accuracy"]
        assert 0 <= value <= 1


def test_unlabelled_batches_hold_images_only(tmp_path: Path) -> None:
    write_binary(tmp_path)
    example = cifar10.splits(tmp_path, labels=10, validation=10, check_counts=False).unlabelled[0]
    assert len(example) == 1
    assert isinstance(example[0], Tensor)

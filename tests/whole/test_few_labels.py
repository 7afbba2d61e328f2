"""CIFAR-10 and SVHN from the files their authors distribute, in miniature: written here, in the true formats."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import forkmerge as fm
from forkmerge.datasets import cifar10, semi, svhn
from forkmerge.datasets._mat import read_mat
from forkmerge.datasets._pickles import read_arrays
from forkmerge.datasets.semi import Images

BATCH, SIDE = 20, 32
NAMES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def rows(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Twenty images as CIFAR-10 stores them, [20, 3072], two of every class."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (BATCH, 3 * SIDE * SIDE), dtype=np.uint8), rng.permutation(np.arange(BATCH) % 10)


def expected() -> Images:
    parts = [rows(seed) for seed in range(6)]
    images = [torch.from_numpy(data.reshape(-1, 3, SIDE, SIDE)) for data, _ in parts]
    classes = [torch.from_numpy(labels) for _, labels in parts]
    return Images(torch.cat(images[:5]), torch.cat(classes[:5]), images[5], classes[5])


def write_binary(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(NAMES):
        data, labels = rows(seed)
        (folder / f"{name}.bin").write_bytes(np.hstack([labels[:, None].astype(np.uint8), data]).tobytes())


def python2_pickle(data: np.ndarray, labels: np.ndarray) -> bytes:
    """The bytes that Python 2 wrote for {'data': array, 'labels': list, 'batch_label': str}."""
    shape = b"K" + bytes([len(data)]) + b"M\x00\x0c\x86"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87Rq\x03"
        b"(K\x01" + shape + b"cnumpy\ndtype\nq\x04U\x02u1K\x00K\x01\x87Rq\x05"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + len(data.tobytes()).to_bytes(4, "little")
    )
    numbers = b"](" + b"".join(b"K" + bytes([int(label)]) for label in labels) + b"e"
    return (
        b"\x80\x02}q\x00(U\x04data" + array + data.tobytes() + b"tbU\x06labels" + numbers
        + b"U\x0bbatch_labelU\x15training batch 1 of 5u."
    )  # fmt: skip


def write_python(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(NAMES):
        data, labels = rows(seed)
        (folder / name).write_bytes(python2_pickle(data, labels))


def same(found: Images, wanted: Images) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


class TestCifar:
    @pytest.mark.parametrize("place", ["", "cifar-10-batches-bin"])
    def test_is_read_from_the_binary_version(self, tmp_path: Path, place: str) -> None:
        write_binary(tmp_path / place)
        assert same(cifar10.load(tmp_path), expected())

    def test_is_read_from_the_folder_that_the_environment_names(self, tmp_path: Path, monkeypatch) -> None:
        write_binary(tmp_path)
        monkeypatch.setenv("FORKMERGE_DATA", str(tmp_path))
        assert same(cifar10.load(), expected())

    def test_is_read_from_the_python_version(self, tmp_path: Path) -> None:
        write_python(tmp_path / "cifar-10-batches-py")
        assert same(cifar10.load(tmp_path), expected())

    @pytest.mark.parametrize("protocol", [0, 2, 4, 5])
    def test_pickles_of_today_are_read_too(self, tmp_path: Path, protocol: int) -> None:
        data, labels = rows(0)
        path = tmp_path / "batch"
        path.write_bytes(pickle.dumps({b"data": data, "labels": labels.tolist()}, protocol=protocol))
        found = read_arrays(path)
        assert np.array_equal(found["data"], data)
        assert found["labels"] == labels.tolist()

    def test_arrays_keep_their_order_and_dtype(self, tmp_path: Path) -> None:
        path = tmp_path / "arrays"
        arrays = {
            "fortran": np.asfortranarray(np.arange(12, dtype=">f4").reshape(3, 4)),
            "flags": np.array([True, False]),
            "empty": np.zeros((0, 3), np.int64),
        }
        path.write_bytes(pickle.dumps(arrays))
        found = read_arrays(path)
        for name, array in arrays.items():
            assert np.array_equal(found[name], array)
            assert found[name].shape == array.shape

    @pytest.mark.parametrize("channels_last", [False, True])
    def test_is_read_from_tensors(self, tmp_path: Path, channels_last: bool) -> None:
        folder, wanted = tmp_path / "cifar10", expected()
        folder.mkdir()
        for name, images, classes in (("train", *wanted[:2]), ("test", *wanted[2:])):
            kept = images.permute(0, 2, 3, 1).contiguous() if channels_last else images
            torch.save({"images": kept, "labels": classes} if channels_last else (kept, classes), folder / f"{name}.pt")
        assert same(cifar10.load(tmp_path), wanted)

    def test_missing_files_are_named_with_where_to_get_them(self, tmp_path: Path) -> None:
        with pytest.raises(fm.ProblemError, match=r"data_batch_1.bin.*University of Toronto"):
            cifar10.load(tmp_path)
        write_binary(tmp_path)
        (tmp_path / "data_batch_3.bin").unlink()
        with pytest.raises(fm.ProblemError, match=r": data_batch_3.bin not found"):
            cifar10.load(tmp_path)
        with pytest.raises(fm.ProblemError, match="there is no folder"):
            cifar10.load(tmp_path / "nowhere")

    def test_without_any_folder_the_message_says_what_to_set(self, monkeypatch) -> None:
        monkeypatch.delenv("FORKMERGE_DATA", raising=False)
        with pytest.raises(fm.ProblemError, match="set FORKMERGE_DATA"):
            cifar10.load()

    def test_truncated_files_are_named(self, tmp_path: Path) -> None:
        write_binary(tmp_path)
        path = tmp_path / "data_batch_2.bin"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(fm.ProblemError, match=r"data_batch_2.bin has 61,459 bytes"):
            cifar10.load(tmp_path)

    def test_impossible_classes_are_refused(self, tmp_path: Path) -> None:
        write_binary(tmp_path)
        path = tmp_path / "test_batch.bin"
        path.write_bytes(b"\x0a" + path.read_bytes()[1:])
        with pytest.raises(fm.ProblemError, match=r"test_batch.bin: labels holds 10, expected 0 to 9"):
            cifar10.load(tmp_path)

    def test_a_truncated_pickle_is_named(self, tmp_path: Path) -> None:
        write_python(tmp_path)
        path = tmp_path / "data_batch_4"
        path.write_bytes(path.read_bytes()[:1000])
        with pytest.raises(fm.ProblemError, match=r"cannot read .*data_batch_4"):
            cifar10.load(tmp_path)

    def test_counts_of_the_paper_are_checked(self, tmp_path: Path) -> None:
        write_binary(tmp_path)
        with pytest.raises(fm.ProblemError, match=r"expected 50,000 as in the paper, found 100.*check_counts=False"):
            cifar10.splits(tmp_path)


class Spy:
    def __init__(self, call: tuple) -> None:
        self.call = call

    def __reduce__(self) -> tuple:
        return self.call


class Built:
    def __init__(self, state: object) -> None:
        self.state = state

    def __reduce__(self) -> tuple:
        return np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"), self.state


class TestHostilePickles:
    def read(self, folder: Path, value: object) -> None:
        path = folder / "data_batch_1"
        path.write_bytes(value if isinstance(value, bytes) else pickle.dumps(value))
        read_arrays(path)

    @pytest.mark.parametrize(
        "call", [(os.mkdir, ("owned",)), (eval, ("1",)), (getattr, ({}, "keys")), (np.load, ("x",)), (io.BytesIO, ())]
    )
    def test_nothing_is_called(self, tmp_path: Path, monkeypatch, call: tuple) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(fm.ProblemError, match="only arrays are read"):
            self.read(tmp_path, {"data": Spy(call)})
        assert not (tmp_path / "owned").exists()

    def test_arrays_of_objects_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(fm.ProblemError, match=r"dtype 'O8'"):
            self.read(tmp_path, {"data": np.array([{}], dtype=object)})

    def test_structured_arrays_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(fm.ProblemError, match=r"dtype 'V"):
            self.read(tmp_path, {"data": np.zeros(2, dtype=[("a", "u1"), ("b", "f4")])})

    def test_a_shape_that_does_not_fit_the_bytes_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(fm.ProblemError, match="cannot read"):
            self.read(tmp_path, {"data": Built((1, (1000,), np.dtype("u1"), False, b"123"))})

    def test_codecs_other_than_latin1_are_refused(self, tmp_path: Path) -> None:
        import _codecs

        with pytest.raises(fm.ProblemError, match=r"a call of _codecs.encode"):
            self.read(tmp_path, {"data": Spy((_codecs.encode, ("abc", "zip")))})

    def test_names_cannot_be_changed(self, tmp_path: Path) -> None:
        with pytest.raises(fm.ProblemError, match=r"a change of numpy.dtype"):
            self.read(tmp_path, b"\x80\x02}U\x04datacnumpy\ndtype\n}U\x01aK\x01sbs.")

    def test_persistent_objects_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(fm.ProblemError, match="stored elsewhere"):
            self.read(tmp_path, b"\x80\x02}U\x04dataU\x01xQs.")

    def test_something_else_than_a_dict_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(fm.ProblemError, match="holds a list"):
            self.read(tmp_path, [1])

    def test_a_pt_file_runs_no_code(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "cifar10").mkdir()
        for name in ("train", "test"):
            torch.save({"images": Spy((os.mkdir, ("owned",)))}, tmp_path / "cifar10" / f"{name}.pt")
        with pytest.raises(fm.ProblemError, match=r"train.pt holds no tensors that can be read safely"):
            cifar10.load(tmp_path)
        assert not (tmp_path / "owned").exists()


def digits(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (SIDE, SIDE, 3, count), dtype=np.uint8), rng.permutation(np.arange(count) % 10 + 1)


def write_svhn(folder: Path, compress: bool = True) -> None:
    savemat = pytest.importorskip("scipy.io").savemat
    for name, seed, count in (("train", 0, 60), ("test", 1, 20)):
        pixels, labels = digits(seed, count)
        content = {"X": pixels, "y": labels[:, None].astype(np.uint8)}
        savemat(folder / f"{name}_32x32.mat", content, do_compression=compress)


class TestSvhn:
    @pytest.mark.parametrize("compress", [False, True])
    def test_is_read_from_matlab_files(self, tmp_path: Path, compress: bool) -> None:
        write_svhn(tmp_path, compress)
        found = svhn.load(tmp_path)
        pixels, labels = digits(0, 60)
        for index in (0, 7, 59):
            assert np.array_equal(found.images[index].numpy(), pixels[..., index].transpose(2, 0, 1))
        assert found.classes.tolist() == [int(label) % 10 for label in labels]
        assert len(found.test_images) == 20

    def test_every_kind_of_array_is_read_as_scipy_reads_it(self, tmp_path: Path) -> None:
        scipy = pytest.importorskip("scipy.io")
        kinds = ("f8", "f4", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")
        content = {f"a_{kind}": np.arange(24).reshape(2, 3, 4).astype(kind) for kind in kinds}
        content |= {"short": np.array([[1, 2]], np.uint8), "a_name_longer_than_eight": np.ones((3, 1)), "text": "hello"}
        scipy.savemat(tmp_path / "all.mat", content, long_field_names=True)
        names = [name for name in content if name != "text"]
        found, wanted = read_mat(tmp_path / "all.mat", names), scipy.loadmat(tmp_path / "all.mat")
        for name in names:
            assert np.array_equal(found[name], wanted[name])
            assert found[name].dtype == wanted[name].dtype

    def test_big_endian_files_are_read(self, tmp_path: Path) -> None:
        def element(kind: int, data: bytes) -> bytes:
            return kind.to_bytes(4, "big") + len(data).to_bytes(4, "big") + data + b"\0" * (-len(data) % 8)

        matrix = element(6, (9).to_bytes(4, "big") + b"\0" * 4) + element(5, np.array([2, 1], ">i4").tobytes())
        matrix += element(1, b"y") + element(4, np.array([1, 258], ">u2").tobytes())
        header = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x01\x00MI"
        (tmp_path / "big.mat").write_bytes(header + element(14, matrix))
        with pytest.raises(fm.ProblemError, match="no variable X"):
            read_mat(tmp_path / "big.mat", ["X"])
        matrix = matrix.replace((9).to_bytes(4, "big") + b"\0" * 4, (11).to_bytes(4, "big") + b"\0" * 4)
        (tmp_path / "big.mat").write_bytes(header + element(14, matrix))
        assert read_mat(tmp_path / "big.mat", ["y"])["y"].tolist() == [[1], [258]]

    def test_missing_files_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(fm.ProblemError, match=r"train_32x32.mat, test_32x32.mat not found.*Stanford"):
            svhn.load(tmp_path)

    @pytest.mark.parametrize("compress", [False, True])
    def test_truncated_files_are_named(self, tmp_path: Path, compress: bool) -> None:
        write_svhn(tmp_path, compress)
        path = tmp_path / "train_32x32.mat"
        whole = path.read_bytes()
        for length in (0, 64, 128, 130, 200, len(whole) // 2, len(whole) - 3):
            path.write_bytes(whole[:length])
            with pytest.raises(fm.ProblemError, match=r"train_32x32.mat"):
                svhn.load(tmp_path)

    def test_damaged_files_are_named(self, tmp_path: Path) -> None:
        write_svhn(tmp_path)
        path = tmp_path / "test_32x32.mat"
        whole = bytearray(path.read_bytes())
        whole[len(whole) // 2] ^= 0xFF
        path.write_bytes(whole)
        with pytest.raises(fm.ProblemError, match=r"test_32x32.mat"):
            svhn.load(tmp_path)

    @pytest.mark.parametrize(
        ("flags", "lengths"), [(b"", [1, 1]), (b"\x09\0\0\0\0\0\0\0", [-1, -1])], ids=["no flags", "no shape"]
    )
    def test_impossible_variables_are_named(self, tmp_path: Path, flags: bytes, lengths: list[int]) -> None:
        def element(kind: int, data: bytes) -> bytes:
            return kind.to_bytes(4, "little") + len(data).to_bytes(4, "little") + data + b"\0" * (-len(data) % 8)

        matrix = element(6, flags) + element(5, np.array(lengths, "<i4").tobytes())
        matrix += element(1, b"y") + element(2, b"\1")
        header = b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM"
        (tmp_path / "odd.mat").write_bytes(header + element(14, matrix))
        with pytest.raises(fm.ProblemError, match=r"cannot read .*odd.mat: a variable has no type or an impossible"):
            read_mat(tmp_path / "odd.mat", ["y"])

    def test_counts_of_the_paper_are_checked(self, tmp_path: Path) -> None:
        write_svhn(tmp_path)
        with pytest.raises(fm.ProblemError, match="expected 73,257"):
            svhn.splits(tmp_path)


class TestSplits:
    def parts(self, folder: Path, **options: int) -> semi.SemiSplits:
        write_binary(folder)
        return cifar10.splits(folder, **{"labels": 20, "validation": 30, "check_counts": False, **options})

    def keys(self, dataset: torch.utils.data.TensorDataset) -> set[bytes]:
        return {image.numpy().tobytes() for image in dataset.tensors[0]}

    def test_are_disjoint_whole_and_balanced(self, tmp_path: Path) -> None:
        found = self.parts(tmp_path)
        sizes = [len(part) for part in (found.labelled, found.unlabelled, found.validation, found.test)]
        assert sizes == [20, 50, 30, 20]
        three = [self.keys(part) for part in (found.labelled, found.unlabelled, found.validation)]
        assert len(set.union(*three)) == 100
        assert torch.bincount(found.labelled.tensors[1], minlength=10).tolist() == [2] * 10

    def test_keep_every_image_with_its_class(self, tmp_path: Path) -> None:
        found, data = self.parts(tmp_path), expected()
        classes = {i.numpy().tobytes(): int(c) for i, c in zip(data.images, data.classes, strict=True)}
        for part in (found.labelled, found.validation):
            for image, label in part:
                assert classes[image.numpy().tobytes()] == int(label)

    def test_depend_on_the_seed_alone(self, tmp_path: Path) -> None:
        first, again, other = (self.keys(self.parts(tmp_path, seed=seed).labelled) for seed in (0, 0, 1))
        assert first == again
        assert first != other

    def test_label_all_images_where_no_number_is_given(self, tmp_path: Path) -> None:
        found = self.parts(tmp_path, labels="all")
        assert len(found.labelled) == len(found.unlabelled) == 70

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


def test_jpeg_packs_are_decoded_once(tmp_path: Path, monkeypatch) -> None:
    image = pytest.importorskip("PIL.Image")
    wanted, arrays = {}, {}
    for part, count in (("train", 5), ("test", 3)):
        streams = []
        for index in range(count):
            buffer = io.BytesIO()
            image.new("RGB", (32, 32), (40 * index, 10, 200)).save(buffer, "JPEG", quality=95)
            streams.append(buffer.getvalue())
        arrays[f"jpeg_{part}"] = np.frombuffer(b"".join(streams), np.uint8)
        arrays[f"offsets_{part}"] = np.cumsum([0, *map(len, streams)])
        arrays[f"y_{part}"] = np.arange(count, dtype=np.uint8)
        wanted[part] = np.stack([np.asarray(image.open(io.BytesIO(s))).transpose(2, 0, 1) for s in streams])
    np.savez(tmp_path / "cifar10_jpeg.npz", **arrays)
    cache = tmp_path / "cache"
    first = cifar10.load(tmp_path, cache=cache)
    assert np.array_equal(first.images.numpy(), wanted["train"])
    assert np.array_equal(first.test_images.numpy(), wanted["test"])
    assert first.classes.tolist() == [0, 1, 2, 3, 4]
    monkeypatch.setattr(image, "open", None)  # a second decoding would fail
    assert same(cifar10.load(tmp_path, cache=cache), first)


def test_a_damaged_pack_is_named(tmp_path: Path) -> None:
    path = tmp_path / "svhn_jpeg.npz"
    path.write_bytes(b"PK\x03\x04 not a zip")
    with pytest.raises(fm.ProblemError, match=r"cannot read .*svhn_jpeg.npz"):
        svhn.load(tmp_path)
    np.savez(path, jpeg_train=np.zeros(3, np.uint8))
    with pytest.raises(fm.ProblemError, match=r"has no array 'offsets_train'"):
        svhn.load(tmp_path)
    np.savez(path, jpeg_train=np.zeros(3, np.uint8), offsets_train=np.array([0, 3]))
    with pytest.raises(fm.ProblemError, match=r"cannot decode the image .*svhn_jpeg.npz image 0"):
        svhn.load(tmp_path, cache=tmp_path)


def test_impossible_classes_of_a_pack_are_named(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.new("RGB", (32, 32)).save(buffer, "JPEG")
    arrays: dict[str, np.ndarray] = {}
    for part, kind in (("train", 3), ("test", 10)):
        arrays[f"jpeg_{part}"] = np.frombuffer(buffer.getvalue(), np.uint8)
        arrays[f"offsets_{part}"] = np.array([0, len(buffer.getvalue())])
        arrays[f"y_{part}"] = np.array([kind])
    for module, name in ((cifar10, "cifar10_jpeg.npz"), (svhn, "svhn_jpeg.npz")):
        np.savez(tmp_path / name, **arrays)
        with pytest.raises(fm.ProblemError, match=rf"{name}: y_test holds 10, expected 0 to 9"):
            module.load(tmp_path, cache=tmp_path)


def test_unlabelled_batches_hold_images_only(tmp_path: Path) -> None:
    write_binary(tmp_path)
    found = cifar10.splits(tmp_path, labels=10, validation=10, check_counts=False).unlabelled[0]
    assert len(found) == 1
    assert isinstance(found[0], Tensor)

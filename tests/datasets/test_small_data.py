"""The small counterparts of the paper's data: miniature packs written here, and the real ones where at hand."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import forkmerge as fm
from forkmerge.datasets import _clicks, census, cifar10, pacs, retailrocket, svhn, taskonomy, tmall

RNG = np.random.default_rng


def write_pacs(folder: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    streams, domains, labels, split = [], [], [], []
    for index in range(4 * 7 * 3):
        buffer = io.BytesIO()
        colour = (30 * (index % 7), 60 * (index % 4), 90)
        image.new("RGB", (64, 64), colour).save(buffer, "JPEG", quality=90)
        streams.append(buffer.getvalue())
        domains.append(index % 4)
        labels.append(index % 7)
        split.append(index // 28)
    np.savez(
        folder / pacs.FILE,
        jpeg=np.frombuffer(b"".join(streams), np.uint8),
        offsets=np.cumsum([0, *map(len, streams)]),
        labels=np.array(labels, np.uint8),
        domains=np.array(domains, np.uint8),
        split=np.array(split, np.uint8),
        class_names=np.array(["dog", "elephant", "giraffe", "guitar", "horse", "house", "person"]),
        domain_names=np.array(pacs.DOMAINS),
    )


def write_taskonomy(folder: Path) -> None:
    rng, n = RNG(0), 9
    normals = rng.normal(size=(n, 64, 64, 3))
    normals /= np.linalg.norm(normals, axis=3, keepdims=True)
    normals[:, :4] = 0
    depth = rng.random((n, 64, 64)) * 8
    depth[:, :, :5] = 0
    np.savez(
        folder / taskonomy.FILE,
        rgb=rng.integers(0, 256, (n, 64, 64, 3), dtype=np.uint8),
        depth=depth.astype(np.float16),
        normal=(127 * normals).round().astype(np.int8),
        surfseg=np.where(rng.random((n, 64, 64)) < 0.1, 255, rng.integers(0, 9, (n, 64, 64))).astype(np.uint8),
        semseg=rng.integers(0, 17, (n, 64, 64)).astype(np.uint8),
        split=np.arange(n, dtype=np.uint8) // 3,
    )


def write_census(folder: Path) -> None:
    rng, n = RNG(0), 300
    np.savez(
        folder / census.FILE,
        cat=rng.integers(0, [3, 5], (n, 2)).astype(np.uint8),
        cat_cardinality=np.array([3, 5]),
        num=np.hstack([rng.integers(0, 90, (n, 1)), np.zeros((n, 1))]).astype(np.float32),
        y=rng.integers(0, 2, (n, 3)).astype(np.uint8),
        task_names=np.array(census.TASKS),
        split=(np.arange(n) % 3).astype(np.uint8),
    )


def write_retailrocket(folder: Path) -> None:
    rng, n = RNG(0), 240
    np.savez(
        folder / retailrocket.FILE,
        user=rng.integers(0, 20, n).astype(np.uint16),
        item=rng.integers(0, 90, n).astype(np.uint16),
        timestamp=np.sort(rng.integers(1_430_000_000, 1_440_000_000, n)).astype(np.uint32),
        view=(rng.random(n) < 0.9).astype(np.uint8),
        cart=(rng.random(n) < 0.4).astype(np.uint8),
        buy=(rng.random(n) < 0.4).astype(np.uint8),
        split_time=(np.arange(n) * 3 // n).astype(np.uint8),
        n_users=np.int64(20),
        n_items=np.int64(90),
    )


def write_tmall(folder: Path) -> None:
    rng = RNG(0)
    arrays: dict[str, Any] = {"n_users": np.int64(15), "n_items": np.int64(80)}
    for name, n in (("buy", 200), ("cart", 160), ("fav", 120), ("test_buy", 20)):
        arrays[f"{name}_user"] = rng.integers(0, 15, n).astype(np.uint16)
        arrays[f"{name}_item"] = rng.integers(0, 80, n).astype(np.uint16)
        if name != "test_buy":
            arrays[f"{name}_timestamp"] = rng.permutation(n).astype(np.uint32)
    np.savez(folder / tmall.FILE, **arrays)


WRITERS: dict[str, tuple[Any, Callable[[Path], None]]] = {
    "pacs": (pacs, write_pacs),
    "taskonomy": (taskonomy, write_taskonomy),
    "census": (census, write_census),
    "retailrocket": (retailrocket, write_retailrocket),
    "tmall": (tmall, write_tmall),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("FORKMERGE_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("name", WRITERS)
def test_the_recipe_trains_and_any_task_can_be_the_target(name: str, folder: Path) -> None:
    module, write = WRITERS[name]
    write(folder)
    recipe = module.recipe(steps=2, interval=1)
    for task in recipe.problem.tasks:
        assert recipe.problem.with_target(task).target_validation is not None
    run = recipe.fit()
    values = fm.measure(run.model, recipe.problem.evaluations("test")[recipe.problem.target])
    assert values
    assert all(np.isfinite(value) for value in values.values())


@pytest.mark.parametrize("name", WRITERS)
def test_a_missing_file_is_named_with_where_to_get_it(name: str, folder: Path) -> None:
    module, _ = WRITERS[name]
    with pytest.raises(fm.ProblemError) as caught:
        module.problem()
    for part in (module.FILE, str(folder), module.SOURCE, "FORKMERGE_DATA"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", WRITERS)
def test_truncated_files_and_missing_arrays_are_named(name: str, folder: Path) -> None:
    module, write = WRITERS[name]
    write(folder)
    path = folder / module.FILE
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(fm.ProblemError, match=f"cannot read .*{module.FILE}"):
        module.problem()
    np.savez(path, something=np.zeros(3))
    with pytest.raises(fm.ProblemError, match=f"{module.FILE} has no array .*, only something"):
        module.problem()


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(("place", "bits"), [(8, 1), (10, 99)], ids=["encrypted", "packed otherwise"])
def test_damaged_entries_are_named(name: str, place: int, bits: int, folder: Path) -> None:
    """Flags and the kind of compression stand at 8 and 10 in every entry of a zip file's directory."""
    module, write = WRITERS[name]
    write(folder)
    path = folder / module.FILE
    whole = bytearray(path.read_bytes())
    at = whole.find(b"PK\x01\x02")
    while at >= 0:
        whole[at + place] ^= bits
        at = whole.find(b"PK\x01\x02", at + 4)
    path.write_bytes(whole)
    with pytest.raises(fm.ProblemError, match=f"cannot read .*{module.FILE}"):
        module.problem()


@pytest.mark.parametrize(
    ("name", "array", "value", "expected"),
    [
        ("pacs", "labels", 7, "0 to 6"),
        ("pacs", "domains", 4, "0 to 3"),
        ("taskonomy", "surfseg", 9, "0 to 8, or 255 where unknown"),
        ("census", "cat", 4, "0 to 2"),
        ("census", "y", 2, "0 to 1"),
        ("retailrocket", "item", 90, "0 to 89"),
        ("retailrocket", "buy", 2, "0 to 1"),
        ("tmall", "fav_user", 15, "0 to 14"),
    ],
)
def test_impossible_codes_are_named(name: str, array: str, value: int, expected: str, folder: Path) -> None:
    module, write = WRITERS[name]
    write(folder)
    content = contents(folder / module.FILE)
    content[array].flat[0] = value
    np.savez(folder / module.FILE, **content)
    with pytest.raises(fm.ProblemError, match=rf"{module.FILE}: {array} holds {value}, expected {expected}\. Get"):
        module.problem()


@pytest.mark.parametrize("odd", [np.array([["a", "b"]] * 300), np.zeros((300, 3), int), np.full((300, 2), 0.5)])
def test_codes_of_another_kind_are_named(odd: np.ndarray, folder: Path) -> None:
    write_census(folder)
    np.savez(folder / census.FILE, **{**contents(folder / census.FILE), "cat": odd})
    with pytest.raises(fm.ProblemError, match=rf"{census.FILE}: cat "):
        census.problem()


def contents(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:
        return {key: arrays[key] for key in arrays.files}


@pytest.mark.parametrize(
    ("name", "array"),
    [("pacs", "labels"), ("taskonomy", "split"), ("census", "y"), ("retailrocket", "buy"), ("tmall", "cart_item")],
)
def test_arrays_of_different_lengths_are_named(name: str, array: str, folder: Path) -> None:
    module, write = WRITERS[name]
    write(folder)
    content = contents(folder / module.FILE)
    np.savez(folder / module.FILE, **{**content, array: content[array][:-1]})
    with pytest.raises(fm.ProblemError, match=rf"different lengths: .*{array}"):
        module.problem()


class TestPacs:
    def test_every_domain_has_its_images_in_its_split(self, folder: Path) -> None:
        write_pacs(folder)
        problem = pacs.problem("sketch", size=16)
        assert set(problem.tasks) == set(pacs.DOMAINS)
        for code, domain in enumerate(pacs.DOMAINS):
            parts = [problem.stream_map[domain].dataset] + [
                problem.evaluations(part)[domain].dataset for part in ("validation", "test")
            ]
            for part in parts:
                images, labels = part.tensors
                assert sorted(labels.tolist()) == list(range(7))
                green = images[:, 1].float().mean((1, 2))
                assert torch.allclose(green, torch.full((7,), 60.0 * code), atol=4)
                red = images[:, 0].float().mean((1, 2))
                assert torch.allclose(red, 30.0 * labels, atol=6)

    def test_one_head_can_serve_all_domains(self, folder: Path) -> None:
        write_pacs(folder)
        assert len(pacs.recipe(shared_head=True).model().heads) == 1
        assert len(pacs.recipe().model().heads) == 4


class TestTaskonomy:
    def test_unknown_pixels_stay_unknown(self, folder: Path) -> None:
        write_taskonomy(folder)
        images, labels, depths, normals = taskonomy.problem().target_validation.dataset.tensors
        assert images.shape == (3, 3, 64, 64)
        assert labels.min() == -1
        assert labels.max() == 8
        assert not depths[..., :5].any()
        assert depths[..., 5:].min() >= 0
        assert not normals[:, :, :4].any()
        assert torch.allclose(normals[:, :, 4:].norm(dim=1), torch.ones(3, 60, 64), atol=0.02)

    def test_other_labels_can_be_segmented(self, folder: Path) -> None:
        write_taskonomy(folder)
        recipe = taskonomy.recipe(labels="semseg")
        assert recipe.model().heads["segmentation"](torch.zeros(2, 64, 8, 8), (64, 64)).shape == (2, 17, 64, 64)
        with pytest.raises(fm.ProblemError, match="'surfseg' or 'semseg'"):
            taskonomy.problem(labels="objects")  # type: ignore[arg-type]


class TestClicks:
    def test_numbers_are_standardised_by_training_rows_alone(self) -> None:
        numbers = np.array([[0.0, 5], [3, 5], [8, 5], [1e6, 5]])
        known = np.array([True, True, True, False])
        found = census.standardised(numbers, known)
        assert np.allclose(found[known].mean(0), 0)
        assert np.allclose(found[known].std(0), [1, 0])
        assert found[3, 0] > 10

    def test_items_drawn_for_comparison_were_never_chosen(self) -> None:
        rng = RNG(0)
        users, items = rng.integers(0, 5, 100), rng.integers(0, 30, 100)
        found = _clicks.draw_others(users, users * 30 + items, 30, 3, "a seed")
        assert found[0].tolist() == np.repeat(users, 3).tolist()
        assert not set(zip(users.tolist(), items.tolist(), strict=True)) & set(
            zip(found[0].tolist(), found[1].tolist(), strict=True)
        )
        again, other = (_clicks.draw_others(users, users * 30 + items, 30, 3, s) for s in ("a seed", "another"))
        assert np.array_equal(found[1], again[1])
        assert not np.array_equal(found[1], other[1])

    def test_users_who_chose_everything_are_refused(self) -> None:
        with pytest.raises(fm.ProblemError, match="nearly all of the 2 items"):
            _clicks.draw_others(np.zeros(1), np.array([0, 1]), 2, 1)

    def test_retailrocket_keeps_every_row_in_its_time(self, folder: Path) -> None:
        write_retailrocket(folder)
        problem = retailrocket.problem(others=2)
        (stream,) = problem.stream_map.values()
        with np.load(folder / retailrocket.FILE) as arrays:
            chosen = arrays["split_time"] == 0
            time = arrays["timestamp"][chosen].astype(np.int64)
            wanted = np.stack([arrays["user"][chosen], arrays["item"][chosen], time // 3600 % 24, time // 86400 % 7], 1)
            labels = np.stack([arrays[task][chosen] for task in retailrocket.TASKS], 1)
        codes, _, found = stream.dataset.tensors
        assert np.array_equal(codes[:80], wanted)
        assert np.array_equal(found[:80], labels)
        assert len(codes) == 240
        assert not found[80:].any()

    def test_tmall_holds_out_what_came_last(self, folder: Path) -> None:
        write_tmall(folder)
        problem = tmall.problem(others=1)
        with np.load(folder / tmall.FILE) as arrays:
            last = np.argsort(arrays["cart_timestamp"])[-8:]
            pairs = np.stack([arrays["cart_user"], arrays["cart_item"]], 1)[last]
            bought = np.stack([arrays["test_buy_user"], arrays["test_buy_item"]], 1)
        codes, _, labels = problem.evaluations("test")["cart"].dataset.tensors
        assert np.array_equal(codes[:8], pairs)
        assert labels[:, 0].tolist() == [1.0] * 8 + [0.0] * 8
        assert np.array_equal(problem.evaluations("test")["buy"].dataset.tensors[0][:20], bought)
        sizes = [len(problem.stream_map["buy"].dataset), len(problem.target_validation.dataset)]
        assert sizes == [2 * 180, 2 * 20]


REAL = os.environ.get("FORKMERGE_DATA", "")


@pytest.mark.skipif(not REAL, reason="FORKMERGE_DATA names no folder")
class TestRealData:
    @pytest.mark.parametrize("name", WRITERS)
    def test_every_small_problem_trains_a_step(self, name: str) -> None:
        module, _ = WRITERS[name]
        if not (Path(REAL) / module.FILE).is_file():
            pytest.skip(f"{module.FILE} is not in FORKMERGE_DATA")
        recipe = module.recipe(steps=1, interval=1)
        fm.SingleTask().fit(recipe.problem, model=recipe.model, optimizer=recipe.optimizer, steps=1)

    @pytest.mark.parametrize(("module", "unlabelled"), [(cifar10, 41_000), (svhn, 64_931)])
    def test_the_semi_supervised_splits_have_the_papers_counts(self, module: Any, unlabelled: int) -> None:
        found = module.splits()
        assert len(found.labelled) == module.LABELS
        assert len(found.unlabelled) == unlabelled
        assert len(found.validation) == module.VALIDATION
        assert len(found.test) == module.TEST

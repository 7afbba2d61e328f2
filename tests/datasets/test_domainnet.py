"""DomainNet in miniature: image lists in the authors' form and small pictures."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import forkmerge as fm
from forkmerge.datasets import domainnet
from forkmerge.datasets._classify import small_classifier

Image = pytest.importorskip("PIL.Image")


def write(root: Path, lists: str = "", training: int = 4, test: int = 6, validation: int = 0) -> None:
    (root / lists).mkdir(parents=True, exist_ok=True)
    parts = {"train": training, "test": test, **({"val": validation} if validation else {})}
    for domain in domainnet.DOMAINS:
        for part, count in parts.items():
            lines = []
            for index in range(count):
                path = root / domain / "the Eiffel tower" / f"{part}_{index}.png"  # spaces are part of the path
                path.parent.mkdir(parents=True, exist_ok=True)
                rng = np.random.default_rng([len(domain), len(part), index])
                Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(path)
                lines.append(f"{path.relative_to(root)} {index * 60}")
            (root / lists / f"{domain}_{part}.txt").write_text("\n".join(lines) + "\n")


def make(root: Path, **options: object) -> fm.Problem:
    settings = {"size": 16, "crop": 12, "batch_size": 2, "cache": root / "cache", "check_counts": False, **options}
    return domainnet.problem("sketch", root, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("lists", ["", "image_list", "txts"])
def test_every_domain_is_a_task_with_its_own_images(tmp_path: Path, lists: str) -> None:
    write(tmp_path, lists)
    problem = make(tmp_path)
    assert problem.tasks == ("sketch", *(d for d in domainnet.DOMAINS if d != "sketch"))
    assert problem.weights == "sampling"
    image, label = problem.stream_map["real"].dataset[2]
    assert image.dtype == torch.uint8
    assert image.shape == (3, 16, 16)
    assert int(label) == 120


def test_half_of_each_test_list_validates_by_seed(tmp_path: Path) -> None:
    write(tmp_path)
    held_out = []
    for seed in (0, 0, 1, 2, 3):
        problem = make(tmp_path, seed=seed, keep="files")
        halves = [problem.evaluations(part)["clipart"].dataset.indices for part in ("validation", "test")]
        assert sorted([*halves[0], *halves[1]]) == list(range(6))
        assert len(halves[0]) == 3
        held_out.append(tuple(halves[0]))
    assert held_out[0] == held_out[1]
    assert len(set(held_out)) > 1


def test_lists_of_validation_images_are_taken_where_they_are(tmp_path: Path) -> None:
    write(tmp_path, "image_list", validation=3)
    for keep in ("files", "decoded"):
        problem = make(tmp_path, keep=keep)
        sizes = {part: problem.evaluations(part)["clipart"].size for part in ("validation", "test")}
        assert sizes == {"validation": 3, "test": 6}  # all of the test list is test data then
    (tmp_path / "image_list" / "clipart_val.txt").unlink()
    problem = make(tmp_path)
    assert problem.evaluations("validation")["clipart"].size == 3
    assert problem.evaluations("test")["clipart"].size == 3


def test_a_list_of_validation_images_that_tests_share_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "real_val.txt").write_text((tmp_path / "real_test.txt").read_text().splitlines()[2])
    with pytest.raises(fm.ProblemError, match=r"real_val.txt and real_test.txt both name .*test_2.png"):
        make(tmp_path)


def test_lists_are_compared_in_time_that_grows_as_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quickdraw's have 25 900 images each: to look every path up in a set made anew would take many minutes."""
    hashed = 0

    class CountedName(str):
        def __hash__(self) -> int:
            nonlocal hashed
            hashed += 1
            return super().__hash__()

    def read_list(folder: Path, name: str) -> tuple[list[str], list[int]]:
        return [CountedName(f"{name} {index}") for index in range(100)], [0] * 100

    monkeypatch.setattr(domainnet, "read_list", read_list)
    monkeypatch.setattr(domainnet, "_folder_of", lambda folder, name: folder)
    assert [len(each) for each in domainnet._three_lists(Path(), "real", 0, check_counts=False)] == [100] * 3
    assert hashed < 10 * 100


def test_other_domains_may_be_one_auxiliary_whose_step_reads_one_batch(tmp_path: Path) -> None:
    write(tmp_path)
    problem = make(tmp_path, mixed=True, batch_size=48)
    assert problem.tasks == ("sketch", "others")
    sizes = {name: stream.batch_size for name, stream in problem.stream_map.items()}
    assert sizes.pop("sketch") == 48
    assert sorted(sizes.values()) == [9, 9, 10, 10, 10]
    model = small_classifier(dict.fromkeys(domainnet.DOMAINS, 345), width=4).eval()
    plain, total = make(tmp_path, batch_size=48), torch.zeros(())
    for name in sizes:
        batch = next(iter(torch.utils.data.DataLoader(plain.stream_map[name].dataset, 4)))
        alone = plain.stream_map[name].losses(model, batch, [name], fm.Context(0, 0))[name]
        together = problem.stream_map[name].losses(model, batch, ["others"], fm.Context(0, 0))["others"]
        assert torch.allclose(together, alone / 5)
        total = total + together
    assert total > 0


def test_files_decoded_when_read_give_the_same_images(tmp_path: Path) -> None:
    write(tmp_path)
    kept, read = (make(tmp_path, keep=keep).stream_map["real"].dataset for keep in ("decoded", "files"))
    for index in range(4):
        for first, second in zip(kept[index], read[index], strict=True):
            assert torch.equal(first, second)
    with pytest.raises(fm.ProblemError, match="keep must be"):
        make(tmp_path, keep="all")


def test_missing_lists_and_images_are_named(tmp_path: Path) -> None:
    with pytest.raises(fm.ProblemError, match=r"clipart_train.txt not found.*Boston University"):
        make(tmp_path)
    write(tmp_path)
    gone = tmp_path / "painting" / "the Eiffel tower" / "test_3.png"
    gone.unlink()
    with pytest.raises(fm.ProblemError, match=r"painting_test.txt names .*test_3.png, which is not there"):
        make(tmp_path)


@pytest.mark.parametrize("line", ["a.png", "a.png cat", "a.png 345", "a.png -1", "17"])
def test_bad_lines_are_named(tmp_path: Path, line: str) -> None:
    write(tmp_path)
    path = tmp_path / "real_train.txt"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(fm.ProblemError, match=r"real_train.txt, line 5: expected a path and a class"):
        make(tmp_path)


def test_empty_lists_and_damaged_images_are_named(tmp_path: Path) -> None:
    write(tmp_path)
    damaged = tmp_path / "clipart" / "the Eiffel tower" / "train_1.png"
    damaged.write_bytes(damaged.read_bytes()[:60])
    with pytest.raises(fm.ProblemError, match=r"cannot decode the image .*train_1.png"):
        make(tmp_path)
    (tmp_path / "clipart_train.txt").write_text("\n")
    with pytest.raises(fm.ProblemError, match=r"clipart_train.txt names no images"):
        make(tmp_path)


def test_counts_of_the_paper_are_checked(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(fm.ProblemError, match=r"training images of clipart: expected about 33,500.*found 4"):
        make(tmp_path, check_counts=True)


def test_the_published_lists_pass_the_papers_table() -> None:
    published = {
        "clipart": (33525, 14604),
        "infograph": (36023, 15582),
        "painting": (50416, 21850),
        "quickdraw": (120750, 51750),
        "real": (120906, 52041),
        "sketch": (48212, 20916),
    }
    for domain, (training, test) in published.items():
        sizes = (training, test // 2, test - test // 2)
        for size, wanted in zip(sizes, domainnet.COUNTS[domain], strict=True):
            assert abs(size - 1000 * wanted) <= domainnet.TOLERANCE


def test_an_unknown_domain_gets_the_closest(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(fm.ProblemError, match="sketch"):
        make(tmp_path, domains=["sketchy"])


def test_a_small_network_trains_on_it(tmp_path: Path) -> None:
    write(tmp_path)
    problem = make(tmp_path, domains=("real", "sketch"))
    model = partial(small_classifier, {"real": 345, "sketch": 345}, width=4)
    run = fm.ForkMerge("mixed", interval=2).fit(problem, model=model, optimizer=fm.OptimizerOf("SGD", lr=0.01), steps=2)
    assert 0 <= fm.measure(run.model, problem.evaluations("test")["sketch"])["accuracy"] <= 1


def test_the_recipe_is_the_papers(tmp_path: Path) -> None:
    write(tmp_path)
    recipe = domainnet.recipe("quickdraw", root=str(tmp_path), cache=str(tmp_path), check_counts=False)
    assert (recipe.steps, recipe.algorithm.interval) == (50_000, 12_500)
    with pytest.raises(fm.ProblemError, match="resnet-101"):
        domainnet.make_network("resnet-100")
    assert set(domainnet.make_network("resnet-18").heads) == set(domainnet.DOMAINS)

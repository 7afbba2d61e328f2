"""The recipe of a text mixture: a target that is divided, and other corpora without what gives its test away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import forkmerge as fm
from forkmerge.experiments.text_mixture import read_corpora, recipe
from text_corpora import text_of, write_causal, write_encoder, write_lines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_lines(tmp_path / "target.jsonl", "da", 20)
    write_lines(tmp_path / "near.jsonl", "nb", 25)
    write_lines(tmp_path / "far.jsonl", "ru", 8, first=100)
    return tmp_path


def paths(folder: Path) -> tuple[str, list[str]]:
    return str(folder / "target.jsonl"), [str(folder / "near.jsonl"), str(folder / "far.jsonl")]


def test_translations_of_held_out_documents_are_left_out_or_reported(folder: Path) -> None:
    texts = read_corpora(*paths(folder), id_key="page")
    held = len(texts.validation) + len(texts.test)
    assert len(texts.training["target"]) + held == 20
    assert len(texts.training["near"]) == 25 - held
    assert len(texts.training["far"]) == 8
    assert [len(each.all) for each in texts.contamination] == [0, held, 0]
    kept = read_corpora(*paths(folder), id_key="page", contamination="report")
    assert len(kept.training["near"]) == 25
    assert [len(each.all) for each in kept.contamination] == [0, held, 0]
    assert len(read_corpora(*paths(folder)).training["near"]) == 25


def test_corpora_that_translate_nothing_need_no_ids_but_the_target_does(folder: Path) -> None:
    target, others = paths(folder)
    Path(others[1]).write_text(json.dumps({"text": text_of("code", 1)}))
    texts = read_corpora(target, others, id_key="page")
    assert [each.has_ids for each in texts.contamination] == [True, True, False]
    held = len(texts.validation) + len(texts.test)
    assert [len(each.all) for each in texts.contamination] == [0, held, 0]
    with pytest.raises(fm.ProblemError, match="has no 'pgae'"):
        read_corpora(target, others, id_key="pgae")
    with pytest.raises(fm.ProblemError, match=r"far\.jsonl, line 1 has no 'page'"):
        read_corpora(target, others, id_key="page", test=others[1])


def test_text_to_test_on_can_be_given_and_is_then_not_trained_on(folder: Path) -> None:
    entries = (folder / "target.jsonl").read_text().splitlines()
    (folder / "test.jsonl").write_text("\n".join(entries[:3]))
    texts = read_corpora(*paths(folder), test=str(folder / "test.jsonl"))
    assert texts.test == [json.loads(entry)["text"] for entry in entries[:3]]
    assert not set(texts.test) & set(texts.training["target"])


@pytest.mark.parametrize("script", ["spaced", "unspaced"])
def test_copies_of_short_documents_are_left_out_whatever_their_script(tmp_path: Path, script: str) -> None:
    for count in range(3, 12):
        own = [text_of("da", number, count) for number in range(20)]
        if script == "unspaced":
            own = ["".join(chr(0x4E00 + int(word[2:])) for word in text.split()) for text in own]
        corpora = {"target": own * 2, "copies": own, "far": ["nothing that is of their kind at all"]}
        files = [tmp_path / f"{name}{count}.jsonl" for name in corpora]
        for file, texts in zip(files, corpora.values(), strict=True):
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        read = read_corpora(str(files[0]), [str(file) for file in files[1:]])
        held = {*read.validation, *read.test}
        assert held, count
        assert not held & {text for training in read.training.values() for text in training}, count
        assert len(read.training[f"far{count}"]) == 1


def test_the_recipe_forks_one_branch_per_corpus_and_trains(folder: Path) -> None:
    target, others = paths(folder)
    made = recipe(target, others, str(write_causal(folder / "model")), steps=2, interval=1, length=16, batch_size=2)
    assert made.problem.tasks == ("target", "near", "far")
    assert made.problem.weights == "sampling"
    run = made.fit(progress=False)
    assert 7 < run.metrics["bits_per_byte"] < 9
    assert all(set(each.branches) == {"alone", "near", "far"} for each in run.rounds)


def test_the_learning_rate_is_that_of_adapters_unless_all_weights_are_trained_or_one_is_given(folder: Path) -> None:
    target, others = paths(folder)
    model = str(write_causal(folder / "model"))
    options = ({}, {"full": True}, {"full": True, "lr": 0.5})
    made = [recipe(target, others, model, length=16, **each) for each in options]
    assert [each.optimizer.options["lr"] for each in made] == [2e-4, 5e-5, 0.5]


def test_an_encoder_learns_masked_tokens_and_can_be_refitted(folder: Path) -> None:
    target, others = paths(folder)
    made = recipe(target, others[:1], str(write_encoder(folder / "model")), steps=2, interval=1, length=16, full=True)
    assert 7 < made.fit(progress=False).metrics["bits_per_token"] < 9
    joined = made.problem.with_validation_labels()
    sizes = [problem.stream_map["target"].size for problem in (made.problem, joined)]
    assert sizes[1] - sizes[0] == made.problem.target_validation.size


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["target.jsonl"], "a target and at least one other corpus"),
        (["target.jsonl", "target.jsonl"], "names of their own"),
        (["target.jsonl", "nothing.jsonl"], "there is no file or folder"),
        (["target.jsonl", "a,b=near.jsonl"], "a corpus cannot be named 'a,b': write name=path"),
        (["one.txt", "near.jsonl"], "too few documents"),
        (["target.jsonl", "copies.jsonl"], "every document of copies"),
    ],
)
def test_what_cannot_be_mixed_is_refused(folder: Path, monkeypatch, words: list[str], message: str) -> None:
    monkeypatch.chdir(folder)
    (folder / "one.txt").write_text(text_of("da", "one"))
    held = read_corpora("target.jsonl", ["near.jsonl"]).test
    (folder / "copies.jsonl").write_text("\n".join(json.dumps(text) for text in held))
    with pytest.raises(fm.ProblemError, match=message):
        read_corpora(words[0], words[1:])

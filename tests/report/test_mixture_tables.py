"""Tables of a mixture: every method with its gain, every corpus with its interval, every round with its shares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from forkmerge.experiments.mix import Estimate, MixtureResult
from forkmerge.experiments.paired_statistics import Paired
from forkmerge.experiments.text_mixture import Corpora, corpora_facts
from forkmerge.problem.text.contamination import Contamination
from forkmerge.report.mixture_tables import corpora_table, mixture_tables

RESULT = MixtureResult(
    folder=Path("runs/mix"),
    model=Path("runs/mix/export/model"),
    metric="bits_per_byte",
    split="test",
    mixture=[{"da": 0.75, "nb": 0.25, "ru": 0.0}, {"da": 0.5, "nb": 0.5, "ru": 0.0}],
    relevance={"nb": Estimate(0.75, 0.5, 1.0), "ru": Estimate(0.0, None, None)},
    scores={"target only": {0: 2.5, 1: 2.6}, "mixture": {0: 2.25, 1: 2.3}, "with nb": {0: 2.3, 1: 2.4}},
    best_single="nb",
    gains={"target only": Paired(0.275, 0.1, 0.4, 2, 0, 0), "with nb": Paired(0.075, None, None, 2, 0, 0)},
    steps={"mixture": 1200, "target only": 400, "with nb": 400},
    seconds={"mixture": 30.0, "target only": 10.0, "with nb": 10.0},
    model_is="mixture",
)


def test_every_method_has_its_gain_and_cost() -> None:
    scores, relevance, rounds = (table.markdown() for table in mixture_tables(RESULT))
    assert "| mixture | 2.275 ± 0.035 |  | 1200 | 30 s |" in scores
    assert "| target only | 2.55 ± 0.071 | +0.275 [+0.100, +0.400] | 400 | 10 s |" in scores
    assert "| with nb, the best single corpus | 2.35 ± 0.071 | +0.075 | 400 | 10 s |" in scores
    assert "| nb | 0.75 [0.50, 1.00] |" in relevance
    assert "| ru | 0.00 |" in relevance
    assert "| 2 | 50% | 50% | 0% |" in rounds


def test_one_seed_is_said_to_say_little() -> None:
    one = replace(RESULT, scores={name: {0: scores[0]} for name, scores in RESULT.scores.items()})
    tables = mixture_tables(one)
    assert any("--seeds 5" in note for note in tables[0].notes)
    assert any("rounds of one seed" in note for note in tables[1].notes)


def test_the_best_single_corpus_is_explained_where_there_is_one() -> None:
    for best, is_said in (("nb", True), (None, False)):
        notes = mixture_tables(replace(RESULT, best_single=best))[0].notes
        assert any("the best single corpus" in note for note in notes) == is_said
        assert any("gains are of the mixture" in note for note in notes)


def test_what_gives_the_test_away_is_counted_and_said() -> None:
    ids = {"has_ids": True}
    found = [Contamination("da", 2, **ids), Contamination("nb", 3, (1,), (), ("nb 1 has the id ls",), **ids)]
    texts = Corpora("da", {"da": ["a", "b"], "nb": ["c", "d"]}, ["v"], ["t"], found)
    table = corpora_table(corpora_facts(texts, "drop"))
    assert "| nb | 2 | 2 bytes | 1 |" in table.markdown()
    assert table.notes == ("nb: 1 of 3 documents (1 with the same id); nb 1 has the id ls: left out",)


def test_a_corpus_without_ids_is_named_where_others_have_them() -> None:
    texts = {"da": ["a"], "code": ["b"]}
    for has_ids, notes in ((True, ("code has no ids: translations are not looked for in it",)), (False, ())):
        found = [Contamination("da", 1, has_ids=has_ids), Contamination("code", 1)]
        assert corpora_table(corpora_facts(Corpora("da", texts, ["v"], ["t"], found), "drop")).notes == notes

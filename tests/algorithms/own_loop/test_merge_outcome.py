"""What a prompt shows of a merge: every branch, faulty ones too, with rounded numbers and what they mean."""

from __future__ import annotations

from forkmerge.algorithms.own_loop.merge_outcome import MergeOutcome


def test_branches_are_shown_with_their_share_and_score_and_faulty_ones_with_the_reason() -> None:
    shown = repr(
        MergeOutcome(
            {"alone": 0.25, "joint": 0.75},
            0.87654321,
            {"alone": 0.8, "joint": 0.8512345},
            [({"alone": 1.0}, 0.8), ({"alone": 0.25, "joint": 0.75}, 0.87654321)],
            {"tgt": 1.0, "aux": 0.75},
            {"wild": "its weights are not finite"},
        )
    )
    first, *rows = shown.splitlines()
    assert first == "Merge of 3 branches: score 0.8765, 2 candidates"
    text = [line.split() for line in rows]
    assert ["alone", "0.25", "0.8"] in text
    assert ["joint", "0.75", "0.8512"] in text
    assert any(line[:2] == ["wild", "faulty"] for line in text)
    assert "wild: its weights are not finite" in shown
    assert "coefficient (Λ)" in shown
    assert "relevance" in shown


def test_a_merge_without_relevance_says_nothing_of_it() -> None:
    assert "aux" not in repr(MergeOutcome({"a": 1.0}, 0.5, {"a": 0.5}, [], {}))

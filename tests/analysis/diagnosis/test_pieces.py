"""The pieces of a diagnosis: pictures between models, and what cannot be drawn."""

from __future__ import annotations

import builtins
from dataclasses import replace

import pytest

import forkmerge as fm
from compare_problem import test_reads
from forkmerge.analysis import advice
from forkmerge.analysis.diagnosis import budget, pieces
from forkmerge.analysis.results import Pictures
from forkmerge.analysis.transfer_runs import SeededSource, TransferRun, do_transfer_run
from forkmerge.problem.metrics import Criterion

SMALL = budget.DiagnosisPlan(2, (0.5, 1.0), 4, 6, 1, 2, 2, advice.ProbeSettings(2, 1), 1, 1.0)


WHOLE = replace(SMALL, seeds=1, weights=(1.0,), steps=6, one_step=0, pictures=4)


def source(name="apart"):
    return SeededSource(dict(fm.load_recipe(f"compare_problem:{name}").source), "tgt")


def pictured(name="apart"):
    return Pictures.from_json(pieces.do(pieces.Piece(source(name), WHOLE, "tgt", "pictures")))


def test_pictures_lie_between_models_trained_alone_and_with_auxiliaries():
    test_reads.clear()
    found = pictured()
    grades = [do_transfer_run(TransferRun(source(), 0, task, 1.0, steps=6)) for task in ("", "aux", "odd")]
    (mixture,) = found.mixtures
    assert mixture.names == ("tgt alone", "with aux", "with odd")
    assert len(mixture.gains) == 66
    by_point = dict(zip(mixture.coefficients, mixture.gains, strict=True))
    criterion = Criterion(grades[0].directions).with_reference(grades[0].metrics["validation"])
    scores = [criterion.score(grade.metrics["validation"]) for grade in grades]
    for point, score in zip(((1, 0, 0), (0, 1, 0), (0, 0, 1)), scores, strict=True):
        assert by_point[point] == pytest.approx(score - scores[0])
    assert [line.names for line in found.lines] == [("tgt alone", "with aux"), ("tgt alone", "with odd")]
    for line, grade in zip(found.lines, grades[1:], strict=True):
        assert (line.losses[0], line.losses[-1]) == pytest.approx((grades[0].loss, grade.loss))
        assert len(line.positions) == 11
    assert not test_reads


def test_a_picture_that_cannot_be_made_is_left_out_with_the_reason(monkeypatch):
    pytest.importorskip("sklearn")
    found = pictured()
    assert [(made.auxiliary, made.split) for made in found.features] == [("aux", "validation")]
    assert found.features[0].panels[0].origins.count("held-out") == 24
    (note,) = found.notes
    assert note.startswith("No t-SNE picture of odd: RuntimeError: mat1 and mat2")
    assert pictured("recipe").notes == (
        "No t-SNE picture of aux, odd: the examples are the target's own, whatever λ is.",
    )
    real = builtins.__import__

    def without(name, *rest, **options):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setattr(pieces, "reads_heldout", lambda *rest: False)
    bare = pictured()
    assert not bare.features
    assert not bare.lines
    assert bare.mixtures == found.mixtures
    assert bare.notes[0].startswith("No t-SNE picture of aux, odd: t-SNE needs scikit-learn")
    assert bare.notes[1].startswith("No loss between the models")

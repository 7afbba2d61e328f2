"""TorchJD's objects as methods: all of them train and resume, and those that are ours too do the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import forkmerge as fm
from _asserts import assert_same_state
from forkmerge.methods import DWA, EW, FAMO, IMTL_G, IMTL_L, MGDA, UW, GradVac, Method, PCGrad, method_from
from forkmerge.testing import MethodConformance, small_problem, train_small


class TestTorchJDScalarizerWithAnOptimizerInside(MethodConformance):
    def make(self) -> Method:
        return method_from("torchjd:FAMO")


class TestTorchJDWeightingWithState(MethodConformance):
    def make(self) -> Method:
        return method_from("torchjd:GradVac(beta=0.1)")


class TestTorchJDAggregatorWithState(MethodConformance):
    def make(self) -> Method:
        return method_from("torchjd:ExcessMTL")


TORCHJD_TWINS = [
    (EW(), "scalarization.Sum", None),
    (UW(), "UW", None),
    (IMTL_L(), "IMTLL", None),
    (DWA(), "DWA", None),
    (FAMO(), "FAMO", None),
    (MGDA(), "MGDA(epsilon=1e-9, max_iters=3000)", {"target": 1.0, "noise": 1.0}),
    (IMTL_G(), "IMTLG", None),
    (PCGrad(), "PCGrad", {"target": 1.0, "noise": 1.0}),  # for two tasks the order does not matter
    (GradVac(beta=0.3), "GradVac(beta=0.3)", {"target": 1.0, "noise": 1.0}),
]


@pytest.mark.parametrize(("method", "twin", "weights"), TORCHJD_TWINS, ids=[repr(m) for m, _, _ in TORCHJD_TWINS])
def test_a_method_that_torchjd_has_too_gives_the_same_training(method: Method, twin: str, weights: Any) -> None:
    """Eleven steps: more than two epochs of four."""
    ours, theirs = (
        train_small(m, weights=weights, cuts=(0, 11)).state for m in (method, method_from(f"torchjd:{twin}"))
    )
    torch.testing.assert_close(ours.rows["float32"], theirs.rows["float32"], rtol=2e-4, atol=2e-5)


# What a name alone cannot say, for three tasks.
ARGUMENTS = {
    "CAGrad": "(c=0.5)",
    "CAGradWeighting": "(c=0.5)",
    "Constant": "(weights=[1, 2, 3])",
    "ConstantWeighting": "(weights=[1, 2, 3])",
    "CRMOGMWeighting": "(UPGradWeighting())",
    "FairGrad": "(alpha=2.0)",
    "FairGradWeighting": "(alpha=2.0)",
    "GramianWeightedAggregator": "(AlignedMTLWeighting())",
    "Krum": "(n_byzantine=0)",
    "KrumWeighting": "(n_byzantine=0)",
    "TrimmedMean": "(trim_number=1)",
    "WeightedAggregator": "(CRMOGMWeighting(MeanWeighting()))",
    "COSMOS": "(lambda_=1.0, weights=[1, 1, 1])",
    "PBI": "(theta=1.0, weights=[1, 1, 1])",
    "STCH": "(mu=0.5)",
    "scalarization.Constant": "([1, 2, 3])",
}


def torchjd_names() -> list[str]:
    from forkmerge.methods.torchjd.names import known_names

    return known_names()


@pytest.mark.parametrize("name", torchjd_names())
def test_everything_torchjd_has_trains_and_resumes(name: str) -> None:
    text = f"torchjd:{name}{ARGUMENTS.get(name, '')}"
    try:
        method = method_from(text)
    except fm.ProblemError as error:
        if "cvxpy" not in str(error):
            raise
        pytest.skip(f"{name} needs cvxpy, a general solver that is no dependency; ours needs none")
    whole = train_small(method, cuts=(0, 4))
    assert whole.state.is_finite()
    assert not whole.reports
    assert_same_state(train_small(method_from(text), cuts=(0, 1, 4)).state, whole.state)
    assert train_small(method, small_problem(own_inputs=True), cuts=(0, 2)).state.is_finite()


def test_objects_are_accepted_as_they_are() -> None:
    from torchjd.aggregation import AlignedMTL, Mean
    from torchjd.scalarization import STCH

    for made in (Mean(), AlignedMTL(), STCH(mu=0.5)):
        named = method_from(f"torchjd:{type(made).__name__}" + ("(mu=0.5)" if isinstance(made, STCH) else ""))
        assert_same_state(train_small(method_from(made), cuts=(0, 3)).state, train_small(named, cuts=(0, 3)).state)
        assert fm.Joint(method=made).method is not None


def test_what_names_an_object_is_the_same_in_every_process() -> None:
    from torchjd.aggregation import GradDrop, TrimmedMean

    assert method_from(GradDrop()).source.text == "GradDrop"
    assert method_from(TrimmedMean(1)).source.text == "TrimmedMean(trim_number=1)"


def test_an_object_given_is_not_changed_by_training() -> None:
    from torchjd.scalarization import UW as Theirs

    scalarizer = Theirs(3)
    train_small(method_from(scalarizer))
    assert torch.equal(scalarizer.log_var, torch.zeros(3))


@pytest.mark.parametrize("weighting", ["MoDoWeighting", "SDMGradWeighting"])
def test_weightings_of_two_batches_see_two(weighting: str) -> None:
    one = train_small(method_from(f"torchjd:{weighting}"), cuts=(0, 2))
    assert one.state.is_finite()


def test_objects_with_one_option_per_task_say_so_when_a_label_is_missing() -> None:
    with pytest.raises(fm.ProblemError, match="failed on a step with 1 tasks"):
        train_small(method_from("torchjd:Constant(weights=[1, 2, 3])"), small_problem(missing=True))


def test_state_that_cannot_be_saved_is_refused() -> None:
    import torchjd
    from torchjd.aggregation import Aggregator

    class Hoarder(Aggregator, torchjd.Stateful):
        def __init__(self) -> None:
            super().__init__()
            self.treasure = {1, 2}

        def forward(self, matrix: Any, /) -> Any:
            return matrix.sum(0)

        def reset(self) -> None: ...

    with pytest.raises(fm.ProblemError, match="Hoarder keeps treasure"):
        method_from(Hoarder())

"""Every method: the values of its paper's rule, the conformance kit, and TorchJD's version of it where there is one."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from _asserts import assert_same_bits, assert_same_state, bits
from forkmerge.engine.training.branch import BranchResult, train_branch
from forkmerge.methods import (
    ARML,
    DWA,
    EW,
    FAMO,
    GCS,
    IMTL,
    IMTL_G,
    IMTL_L,
    METHODS,
    MGDA,
    OL_AUX,
    RLW,
    UW,
    AutoLambda,
    AuxiNash,
    CAGrad,
    GradNorm,
    GradVac,
    LossMethod,
    Method,
    NashMTL,
    PCGrad,
    Setup,
    TargetAwareGradVac,
    TargetAwarePCGrad,
    View,
    facts_of,
    method_from,
    methods_markdown,
    methods_table,
)
from forkmerge.testing import MethodConformance, conformance_of_all, small_problem, train_small
from paths import ROOT
from problems import (
    Counted,
    Point,
    diverge_from,
    domains_problem,
    evaluation,
    examples,
    fit,
    plain_net,
    quadratic_problem,
)

# L_i = ½‖θ − c_i‖² at θ = 0, so the gradients are −c_i: (−1, 0), (−1, −1) and (1, −½).
CENTRES = {"m": (1.0, 0.0), "a": (1.0, 1.0), "b": (-1.0, 0.5)}
GRADIENTS = -np.array(list(CENTRES.values()))

globals().update(conformance_of_all())


class TestOftenMovedARML(MethodConformance):
    def make(self) -> Method:
        return ARML(every=2, temperature=1e-4)


class TestOftenMovedAuxiNash(MethodConformance):
    def make(self) -> Method:
        return AuxiNash(every=2, max_norm=1.0)


class TestAutoLambdaOnValidation(MethodConformance):
    def make(self) -> Method:
        return AutoLambda(look_at="validation")


class TestTruncatedNashMTL(MethodConformance):
    def make(self) -> Method:
        return NashMTL(solver="truncated", every=2, max_norm=1.0)


class TestTorchJDScalarizerWithAnOptimizerInside(MethodConformance):
    def make(self) -> Method:
        return method_from("torchjd:FAMO")


class TestTorchJDWeightingWithState(MethodConformance):
    def make(self) -> Method:
        return method_from("torchjd:GradVac(beta=0.1)")


class TestTorchJDAggregatorWithState(MethodConformance):
    def make(self) -> Method:
        return method_from("torchjd:ExcessMTL")


def step(
    method: Method, centres: Any = None, *, steps: int = 1, lr: float = 1.0, goal: Any = (1.0, 0.0), **options: Any
) -> tuple[np.ndarray, dict[str, Any], BranchResult]:
    """Train on quadratics from θ = 0: the way gone, −d for one step of length 1, and the method's state."""
    training = fm.Training(optimizer=fm.OptimizerOf("SGD", lr=lr, **options), method=method)
    problem = quadratic_problem(CENTRES if centres is None else centres, goal)
    binding = training.binding(Point())
    mixture = fm.Mixture("b", dict.fromkeys(problem.tasks, 1.0))
    result = train_branch(binding, problem, mixture, binding.initial(), steps=steps, training=training, seed=0)
    binding.attach_weights(result.state)
    return binding.model.theta.detach().numpy(), result.state.method["own"], result


def view(losses: Any, at: int = 0, *, epoch: int = 2, present: Any = None, tasks: int | None = None) -> View:
    """What a method sees, made by hand."""
    size = tasks or len(losses)
    setup = Setup(tuple("mabcde"[:size]), 0, epoch, torch.device("cpu"))
    return View(setup, tuple(range(size) if present is None else present), np.array(losses), at, 0.1, at, None)


def by_losses(method: LossMethod, seen: View, state: dict[str, Any]) -> torch.Tensor:
    """What a loss method makes of the losses in a view."""
    return method.weights(torch.from_numpy(seen.losses), seen, state)


def first_moments(own: dict[str, Any]) -> np.ndarray:
    """Adam's first moments of a method's weights; after one step, a tenth of the gradient."""
    return own["weights_adam"][0].numpy()


class TestValues:
    """The fixture of two-dimensional quadratics."""

    @pytest.mark.parametrize(
        ("method", "direction"),
        [
            (EW(), (-1.0, -1.5)),
            (UW(), (-0.5, -0.75)),
            (DWA(), (-1.0, -1.5)),
            (IMTL_L(), (-1.0, -1.5)),
            (FAMO(), np.array([2.0, 1.0, 1.6]) / 4.6 @ GRADIENTS),  # 1/L over its sum, with L = ½, 1, ⅝
            (GradNorm(), (-1.0, -1.5)),
            (MGDA(), (-1 / 17, -4 / 17)),  # the nearest point to 0 between g_m and g_b
            (CAGrad(c=0.0), (-1 / 3, -0.5)),
            (GCS(weighted=False), (-2.0, -1.0)),
            (GCS(), (-1.7071067811865475, -0.7071067811865475)),
            (OL_AUX(), (-1.0, -1.5)),
            (ARML(every=1), np.array([1.0, 1.0625, 0.9375]) @ GRADIENTS),
            (TargetAwarePCGrad(), (-2.0, -1.5)),  # g_b loses its part along g_m, and nothing else changes
            (TargetAwareGradVac(), (-2.0, -1.5)),
        ],
        ids=lambda value: repr(value) if isinstance(value, Method) else "",
    )
    def test_the_direction_of_the_first_step(self, method: Method, direction: Any) -> None:
        np.testing.assert_allclose(-step(method)[0], direction, rtol=1e-12, atol=1e-12)

    def test_the_truncated_mgda_comes_near(self) -> None:
        np.testing.assert_allclose(-step(MGDA(solver="frank_wolfe"))[0], (-1 / 17, -4 / 17), atol=0.01)

    def test_nash_solves_g_a_equals_one_over_a(self) -> None:
        theta, own, _ = step(NashMTL(), {"m": (2.0, 0.0), "a": (0.0, 0.5)})
        np.testing.assert_allclose(own["weights"], [0.5, 2.0], rtol=1e-12)
        np.testing.assert_allclose(theta, [1.0, 1.0], rtol=1e-12)

    def test_nash_may_clip_its_direction(self) -> None:
        theta, _, _ = step(NashMTL(max_norm=1.0), {"m": (2.0, 0.0), "a": (0.0, 0.5)})
        assert np.linalg.norm(theta) == pytest.approx(1.0)

    def test_nash_may_use_its_weights_for_several_steps(self) -> None:
        method = NashMTL(every=2)
        state = method.start(view([1.0, 1.0]).setup)
        seen = [method.weights(np.diag([4.0**k, 0.25]), view([1.0, 1.0], k), state).tolist() for k in range(4)]
        assert seen[0] == seen[1] != seen[2] == seen[3]

    def test_pcgrad_on_two_tasks(self) -> None:
        theta, _, _ = step(PCGrad(), {"m": (1.0, 0.0), "b": (-1.0, 2.0)})
        # g_m = (−1, 0) and g_b = (1, −2): each loses its part along the other.
        np.testing.assert_allclose(-theta, [-1 + 1 / 5 + 0.0, -2 / 5 - 2.0], rtol=1e-12)

    def test_gradvac_aims_at_the_cosines_it_has_seen(self) -> None:
        method = GradVac(beta=1.0)
        state = method.start(view([1.0, 1.0]).setup)
        method.weights(np.array([[1.0, 0.6], [0.6, 1.0]]), view([1.0, 1.0]), state)
        assert state["goals"][0][1] == pytest.approx(0.6)
        weights = method.weights(np.eye(2), view([1.0, 1.0], 1), state)
        # Orthogonal gradients are turned until their cosine with the other's original is 0.6: +¾ of the other.
        np.testing.assert_allclose(weights, [1.75, 1.75], rtol=1e-12)

    def test_imtl_balances_scaled_losses_and_then_gradients(self) -> None:
        method = IMTL()
        state = {**method.start(view([1.0, 1.0]).setup), "logs": torch.tensor([0.0, 2.0]).double().clamp_min(1.0).log()}
        weights = method.weights(np.eye(2), view([1.0, 3.0]), state)
        np.testing.assert_allclose(weights, [2 / 3, 2 / 3], rtol=1e-12)  # (⅔, ⅓) of the gradients g_1 and 2 g_2
        np.testing.assert_allclose(method.head_weights(weights, view([1.0, 3.0]), state), [1.0, 2.0], rtol=1e-12)
        assert state["logs"][0] == pytest.approx(0.0)  # e^0 · 1 = 1 already
        assert state["logs"][1] == pytest.approx(np.log(2.0) - 0.1)

    def test_gradnorm_moves_weights_towards_a_common_size_and_keeps_their_sum(self) -> None:
        _, own, _ = step(GradNorm())
        moved = np.array([1.025, 0.975, 1.025])  # norms 1, √2 and √1.25 around their mean
        np.testing.assert_allclose(own["weights"], moved * 3 / moved.sum(), rtol=1e-6)
        assert own["first"] == [0.5, 1.0, 0.625]

    def test_gradnorm_asks_slow_tasks_for_larger_gradients(self) -> None:
        method = GradNorm(alpha=1.0, lr=0.1)
        state = {**method.start(view([1.0, 1.0]).setup), "first": [1.0, 1.0]}
        # Rates 0.5 and 1.5 of a mean of 1: goals ½ and 3/2 for gradients of size 1.
        method.weights(np.eye(2), view([0.5, 1.5]), state)
        np.testing.assert_allclose(state["weights"], [0.9, 1.1], rtol=1e-6)

    def test_dwa_compares_the_last_two_epochs(self) -> None:
        method = DWA()
        state = method.start(view([1.0, 1.0]).setup)
        for at, losses in enumerate([(3.0, 4.0), (1.0, 4.0), (1.0, 5.0), (1.0, 3.0)]):
            assert by_losses(method, view(losses, at), state).tolist() == [1.0, 1.0]
        weights = by_losses(method, view([9.0, 9.0], 4), state)
        powers = np.exp(np.array([0.5, 1.0]) / 2)
        np.testing.assert_allclose(weights, 2 * powers / powers.sum(), rtol=1e-12)

    @pytest.mark.parametrize("distribution", ["normal", "uniform", "dirichlet"])
    def test_rlw_draws_weights_that_sum_to_one(self, distribution: Any) -> None:
        method = RLW(distribution)
        drawn = [by_losses(method, view([1.0] * 3, at), {}) for at in (0, 1, 0)]
        assert all((w > 0).all() and w.sum() == pytest.approx(1.0) for w in drawn)
        assert drawn[0].tolist() == drawn[2].tolist() != drawn[1].tolist()

    def test_ol_aux_adds_inner_products(self) -> None:
        _, own, _ = step(OL_AUX(every=1, beta=1.0), lr=0.1)
        np.testing.assert_allclose(own["weights"], [1.0, 1.1, 0.9], rtol=1e-12)

    def test_ol_aux_waits_for_its_interval(self) -> None:
        _, own, _ = step(OL_AUX(), lr=0.0, steps=4)
        assert own["weights"] == [1.0, 1.0, 1.0]

    def test_ol_aux_of_the_authors_adds_cosines(self) -> None:
        method = OL_AUX.authors_scripts()
        state = method.start(view([1.0] * 3).setup)
        gramian = GRADIENTS @ GRADIENTS.T
        for at in range(5):
            method.weights(gramian, view([1.0] * 3, at), state)
        np.testing.assert_allclose(state["weights"], [1.0, 1.00035355, 0.99955279], atol=1e-8)

    def test_arml_shifts_and_clamps(self) -> None:
        _, own, _ = step(ARML(every=1))
        np.testing.assert_allclose(own["weights"], [1.0, 1.0625, 0.9375], rtol=1e-12)

    def test_arml_moves_every_twentieth_step_only(self) -> None:
        assert step(ARML(), steps=19, lr=0.01)[1]["weights"].tolist() == [1.0, 1.0, 1.0]
        assert step(ARML(), steps=20, lr=0.01)[1]["weights"].tolist() != [1.0, 1.0, 1.0]

    def test_the_noise_of_arml_has_the_size_of_langevin_dynamics(self) -> None:
        jumps = [step(ARML(temperature=0.5), {"m": (0.0, 0.0), "a": (0.0, 0.0)}, lr=0.04, steps=1)[0]]
        many = fm.Training(optimizer=fm.OptimizerOf("SGD", lr=0.04), method=ARML(temperature=0.5))
        problem = quadratic_problem({"m": (0.0, 0.0), "a": (0.0, 0.0)}, (0.0, 0.0))
        for seed in range(150):
            binding = many.binding(Point())
            mixture = fm.Mixture("b", {"m": 1.0, "a": 1.0})
            result = train_branch(binding, problem, mixture, binding.initial(), steps=1, training=many, seed=seed)
            jumps.append(result.state.rows["float64"].numpy()[:2])
        assert np.std(jumps) == pytest.approx(np.sqrt(2 * 0.5 * 0.04), rel=0.15)

    def test_auto_lambda_looks_one_step_ahead(self) -> None:
        theta, own, _ = step(AutoLambda())
        # θ' = (.1, .15) and d = (−.9, .15); the first moment of Adam is a tenth of the gradient.
        np.testing.assert_allclose(10 * first_moments(own), [-0.9, -0.75, 0.975], rtol=1e-9)
        np.testing.assert_allclose(own["weights"], [0.1001, 0.1001, 0.0999], rtol=1e-6)
        np.testing.assert_allclose(-theta, own["weights"].numpy() @ GRADIENTS, rtol=1e-12)

    def test_auto_lambda_may_look_at_validation_data(self) -> None:
        _, own, _ = step(AutoLambda(look_at="validation"), goal=(0.1, 0.15 - 2.0))
        # d = (0, 2) there.
        np.testing.assert_allclose(10 * first_moments(own), GRADIENTS @ [0.0, -2.0], atol=1e-9)

    def test_auto_lambda_takes_momentum_and_weight_decay_along(self) -> None:
        """The second virtual step, by hand."""
        method, options = AutoLambda(lr=0.0), {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.2}
        theta, _, _ = step(method, **options)
        _, own, _ = step(method, steps=2, **options)
        slopes = theta - np.array(list(CENTRES.values()))
        descent = 0.1 * slopes.sum(0) + 0.2 * theta + 0.9 * (-theta / 0.5)
        ahead = theta - 0.5 * descent - [1.0, 0.0]
        first = 0.1 * -0.5 * (GRADIENTS @ (0.1 * GRADIENTS.sum(0) * -0.5 - [1.0, 0.0]))
        np.testing.assert_allclose(first_moments(own), 0.9 * first + 0.1 * -0.5 * (slopes @ ahead), rtol=1e-9)

    def test_auxinash_weighs_by_power(self) -> None:
        method = AuxiNash()
        state = {**method.start(view([1.0, 1.0]).setup), "powers": [1.5, 0.5]}
        weights = method.weights(np.diag([4.0, 0.25]), view([1.0, 1.0]), state)
        np.testing.assert_allclose(weights, np.sqrt([1.5 / 4.0, 0.5 / 0.25]), rtol=1e-12)

    def test_auxinash_moves_powers_down_the_targets_loss(self) -> None:
        """Its slope is that of L_m(θ − α Σ a_k(p) g_k)/α, seen by finite differences."""
        from forkmerge.methods.solvers import nash

        centres = {"m": (1.0, 0.0), "a": (1.0, 1.0)}
        _, own, _ = step(AuxiNash(every=1, momentum=0.0), centres, lr=1e-9)
        gradients = -np.array(list(centres.values()))
        slopes = []
        for k in range(2):
            ends = [nash(gradients @ gradients.T, np.ones(2) + sign * 1e-6 * np.eye(2)[k]) for sign in (1, -1)]
            ways = [1e-6 * -(a @ gradients) for a in ends]
            losses = [0.5 * np.square(way - [1.0, 0.0]).sum() for way in ways]
            slopes.append((losses[0] - losses[1]) / 2e-6 / 1e-6)
        np.testing.assert_allclose(own["velocity"], slopes, rtol=1e-3)
        moved = np.ones(2) - 5e-3 * np.array(own["velocity"])
        np.testing.assert_allclose(own["powers"], moved * 2 / moved.sum(), rtol=1e-9)


SAME_TWICE = {  # what each method makes of two tasks of the same gradient g, in units of g
    "EW": 2.0,
    "UW": 1.0,
    "DWA": 2.0,
    "RLW": 1.0,
    "FAMO": 1.0,
    "IMTL_L": 2.0,
    "MGDA": 1.0,
    "GradNorm": 2.0,
    "PCGrad": 2.0,
    "GradVac": 2.0,
    "IMTL_G": 1.0,
    "IMTL": 1.0,
    "CAGrad": 1.4,
    "NashMTL": np.sqrt(2) / 2.0,  # of length √2, and ‖g‖ = 2
    "GCS": 2.0,
    "OL_AUX": 2.0,
    "ARML": 2.0,
    "AutoLambda": 0.2002,
    "AuxiNash": np.sqrt(2) / 2.0,
    "TargetAwarePCGrad": 2.0,
    "TargetAwareGradVac": 2.0,
}


class TestEquivalences:
    @pytest.mark.parametrize("name", METHODS)
    def test_two_tasks_of_one_gradient(self, name: str) -> None:
        theta, _, _ = step(METHODS[name](), {"m": (2.0, 0.0), "a": (2.0, 0.0)})
        np.testing.assert_allclose(theta, [2.0 * SAME_TWICE[name], 0.0], rtol=1e-6, atol=1e-9)

    @pytest.mark.parametrize("name", METHODS)
    def test_a_single_present_task_is_trained_on(self, name: str) -> None:
        """One task's label in the first step: the direction is a positive multiple of its gradient, or nothing."""
        method = METHODS[name]()
        state = method.start(view([1.0] * 3).setup)
        seen = view([2.0], present=[1], tasks=3)
        if isinstance(method, LossMethod):
            weights = by_losses(method, seen, state)
        else:
            weights = method.weights(np.array([[4.0]]), seen, state)
        assert weights.shape == (1,)
        assert weights[0] > 0 or name == "GCS"  # without the target's gradient nothing agrees with it

    def test_gradvac_without_goals_is_pcgrad(self) -> None:
        """In the first step; the corrections are the same, in the same order."""
        one, other = (train_small(method, cuts=(0, 1)).state for method in (PCGrad(), GradVac()))
        torch.testing.assert_close(one.rows["float32"], other.rows["float32"])

    def test_auxinash_without_learning_is_nash(self) -> None:
        one, other = (train_small(method).state for method in (NashMTL(), AuxiNash(lr=0.0, every=1)))
        torch.testing.assert_close(one.rows["float32"], other.rows["float32"])

    def test_mgda_may_normalise(self) -> None:
        """With unit gradients the weights do not depend on the scale of a task."""
        gramian, scale = GRADIENTS @ GRADIENTS.T, np.array([1.0, 10.0, 0.1])
        plain = MGDA(normalize="l2").weights(gramian, view([1.0] * 3), {})
        scaled = MGDA(normalize="l2").weights(gramian * scale * scale[:, None], view([1.0] * 3), {})
        np.testing.assert_allclose(plain, scaled, rtol=1e-9)
        by_loss = MGDA(normalize="loss").weights(gramian * scale * scale[:, None], view(scale), {})
        np.testing.assert_allclose(by_loss, MGDA().weights(gramian, view([1.0] * 3), {}), rtol=1e-9)


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


class TestTorchJD:
    @pytest.mark.parametrize("name", torchjd_names())
    def test_everything_torchjd_has_trains_and_resumes(self, name: str) -> None:
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

    def test_objects_are_accepted_as_they_are(self) -> None:
        from torchjd.aggregation import AlignedMTL, Mean
        from torchjd.scalarization import STCH

        for made in (Mean(), AlignedMTL(), STCH(mu=0.5)):
            named = method_from(f"torchjd:{type(made).__name__}" + ("(mu=0.5)" if isinstance(made, STCH) else ""))
            assert_same_state(train_small(method_from(made), cuts=(0, 3)).state, train_small(named, cuts=(0, 3)).state)
            assert fm.Joint(method=made).method is not None

    def test_what_names_an_object_is_the_same_in_every_process(self) -> None:
        from torchjd.aggregation import GradDrop, TrimmedMean

        assert method_from(GradDrop()).source.text == "GradDrop"
        assert method_from(TrimmedMean(1)).source.text == "TrimmedMean(trim_number=1)"

    def test_an_object_given_is_not_changed_by_training(self) -> None:
        from torchjd.scalarization import UW as Theirs

        given = Theirs(3)
        train_small(method_from(given))
        assert torch.equal(given.log_var, torch.zeros(3))

    def test_upgrad_needs_no_quadratic_programming_package(self) -> None:
        weighting = method_from("torchjd:UPGrad").source.make(3).gramian_weighting
        gramian = torch.from_numpy(GRADIENTS @ GRADIENTS.T)
        found = weighting(gramian).numpy()
        direction = found @ GRADIENTS
        assert (GRADIENTS @ direction > -1e-3).all()  # no task gets worse, up to the regularisation of 1e-4

    @pytest.mark.parametrize("weighting", ["MoDoWeighting", "SDMGradWeighting"])
    def test_weightings_of_two_batches_see_two(self, weighting: str) -> None:
        one = train_small(method_from(f"torchjd:{weighting}"), cuts=(0, 2))
        assert one.state.is_finite()

    def test_objects_with_one_option_per_task_say_so_when_a_label_is_missing(self) -> None:
        with pytest.raises(fm.ProblemError, match="failed on a step with 1 tasks"):
            train_small(method_from("torchjd:Constant(weights=[1, 2, 3])"), small_problem(missing=True))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("torchjd:UPGard", "Did you mean 'UPGrad'"),
            ("torchjd:Krum", "n_byzantine"),
            ("torchjd:Mean(", "cannot read"),
            ("torchjd:STCH(mu=open)", "unknown TorchJD class 'open'"),
            ("torchjd:STCH(mu=-1)", "strictly positive"),
            ("torchjd:NashMTL", "Or leave out 'torchjd:'"),
        ],
    )
    def test_what_cannot_be_made_is_refused_with_what_to_write(self, text: str, message: str) -> None:
        with pytest.raises(fm.ProblemError, match=message):
            method_from(text)

    def test_state_that_cannot_be_saved_is_refused(self) -> None:
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


class TestNames:
    @pytest.mark.parametrize(
        ("name", "kind"),
        [("PCGrad", PCGrad), ("nash-mtl", NashMTL), ("auto-λ", AutoLambda), ("ol_aux", OL_AUX), ("IMTL-L", IMTL_L)],
    )
    def test_spelling_is_forgiven(self, name: str, kind: type[Method]) -> None:
        assert method_from(name) == kind()

    def test_options_come_with_the_name_or_beside_it(self) -> None:
        assert method_from("grad-vac(beta=0.1)") == method_from({"name": "GradVac", "beta": 0.1}) == GradVac(beta=0.1)
        assert method_from("MGDA(solver='frank_wolfe', iterations=9)") == MGDA(solver="frank_wolfe", iterations=9)
        assert method_from({"name": "torchjd:STCH", "mu": 0.5}) == method_from("torchjd:STCH(mu=0.5)")
        assert fm.Joint(method={"name": "GCS", "weighted": False}).method == GCS(weighted=False)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("GradVac(gamma=1)", "unknown option of GradVac 'gamma'.*Known: beta"),
            ({"name": "GradVac", "gamma": 1}, "unknown option of GradVac 'gamma'"),
            ("GradVac(0.1)", "write options as in"),
            ("GradVac(beta=0.1", "write options as in"),
            ("GradVac(beta=open)", "write options as in"),
            ({"beta": 0.1}, "must be a method"),
        ],
    )
    def test_options_that_cannot_be_read_are_refused(self, value: Any, message: str) -> None:
        with pytest.raises(fm.ProblemError, match=message):
            method_from(value)

    def test_no_two_methods_share_a_forgiving_name(self) -> None:
        for name, kind in METHODS.items():
            assert type(method_from(name.lower())) is kind

    def test_an_unknown_name_lists_what_exists(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"Did you mean 'PCGrad'.*torchjd:"):
            method_from("PCGard")
        with pytest.raises(fm.ProblemError, match="must be a method"):
            method_from(3)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: MGDA(normalize="l1"),
            lambda: MGDA(solver="fast"),
            lambda: CAGrad(c=-1),
            lambda: NashMTL(every=0),
            lambda: NashMTL(solver="cvxpy"),
            lambda: OL_AUX(every=0),
            lambda: ARML(every=0),
            lambda: ARML(temperature=-1),
            lambda: AutoLambda(look_at="test"),
            lambda: AuxiNash(look_at="test"),
            lambda: AuxiNash(every=0),
            lambda: RLW("cauchy"),
        ],
    )
    def test_wrong_options_are_refused_when_given(self, make: Any) -> None:
        with pytest.raises(fm.ProblemError):
            make()

    def test_a_branch_without_the_target_is_refused_by_methods_that_need_it(self) -> None:
        weights = {"helpful": 1.0, "noise": 1.0}
        with pytest.raises(fm.ProblemError, match="GCS compares auxiliaries with the target"):
            train_small(GCS(), weights=weights)
        assert train_small(PCGrad(), weights=weights).state.is_finite()

    def test_the_table_has_a_row_per_method(self) -> None:
        rows = methods_table()
        assert [row["name"] for row in rows] == list(METHODS)
        assert all(row["uses"] in ("losses", "Gramian", "gradients") for row in rows)
        assert next(row for row in rows if row["name"] == "CAGrad")["options"] == {"c": 0.4, "rescale": "none"}

    def test_options_are_documented(self) -> None:
        for kind in METHODS.values():
            text = inspect.getdoc(kind) or ""
            undocumented = [name for name in facts_of(kind)["options"] if f"\n    {name}: " not in text]
            assert not undocumented, kind

    def test_the_page_shows_the_table(self) -> None:
        page = (ROOT / "docs" / "methods.md").read_text("utf-8")
        for table in methods_markdown().strip().split("\n\n"):
            assert table in page


@dataclass(frozen=True)
class Stop:
    """An observer that ends a run when it reaches a step."""

    at: int

    def __call__(self, event: Any) -> None:
        if event["event"] == "checkpoint" and event["step"] == self.at:
            raise KeyboardInterrupt


class TestWholeRuns:
    @pytest.mark.parametrize("method", ["FAMO", "GradVac", "AutoLambda", "torchjd:FAMO", "torchjd:ExcessMTL"])
    def test_a_run_that_was_stopped_ends_with_the_same_bits(self, method: str, tmp_path: Any) -> None:
        options: dict[str, Any] = {"steps": 9, "checkpoint_every": 2}
        algorithm = fm.ForkMerge("per_auxiliary", interval=5, method=method)
        whole = fit(algorithm, **options)
        with pytest.raises(KeyboardInterrupt):
            fit(algorithm, **options, folder=tmp_path / "run", observe=Stop(6))
        again = fit(algorithm, **options, folder=tmp_path / "run", resume=True)
        assert_same_bits(whole, again)
        assert whole.score == again.score

    @pytest.mark.parametrize("method", ["AuxiNash", "torchjd:FAMO"])
    def test_worker_processes_give_the_same_bits(self, method: str) -> None:
        algorithm = fm.ForkMerge("per_auxiliary", interval=2, method=method)
        assert_same_bits(fit(algorithm, steps=4), fit(algorithm, steps=4, workers=2))

    def test_a_branch_of_one_task_needs_no_method(self) -> None:
        """The target-only branch of ForkMerge is plain training whatever the method; so is SingleTask."""
        alone = fm.ForkMerge({"alone": {"tgt": 1.0}}, interval=4, method="NashMTL")
        assert_same_bits(fit(alone), fit(fm.SingleTask(interval=4)))

    def test_reports_reach_the_notes_of_a_run(self) -> None:
        stream = fm.Stream(TensorDataset(*examples(16, 1)), diverge_from(2, "aux"), ("tgt", "aux"), 8)
        run = fit(fm.Joint(method="PCGrad", interval=4), fm.Problem("tgt", [stream], evaluation()), steps=4)
        assert any("gradient of 'aux' was not finite" in note for note in run.notes)
        assert all(bool(value.isfinite().all()) for value in bits(run).values())
        assert run.score is not None

    @pytest.mark.parametrize("name", [name for name in METHODS if not issubclass(METHODS[name], LossMethod)])
    def test_gradients_may_be_compared_at_the_representation(self, name: str) -> None:
        method = AuxiNash(every=2) if name == "AuxiNash" else METHODS[name]()
        problem = small_problem(declared=True, missing=True)
        assert train_small(method, problem, gradients="representation").state.is_finite()

    @pytest.mark.parametrize("precision", ["bfloat16", "float16"])
    @pytest.mark.parametrize("method", [EW(), FAMO(), PCGrad(), AutoLambda(), AuxiNash(every=2)], ids=repr)
    def test_half_precision_trains(self, method: Method, precision: Any) -> None:
        result = train_small(method, precision=precision, cuts=(0, 2, 4))
        assert result.state.is_finite()
        assert not result.reports

    def test_every_method_runs_in_sampling_problems_too(self) -> None:
        """A method combines all tasks in every step; the weights are then loss weights."""
        run = fit(fm.Joint(method="MGDA"), domains_problem(weights="sampling"), steps=3)
        assert isinstance(run.model, nn.Module)

    @pytest.mark.parametrize(("tasks", "part"), [(("tgt", "aux"), 4), (("tgt", "aux", "odd"), 2)])
    def test_a_step_reads_one_batch_in_all_where_weights_are_shares_of_steps(self, tasks: Any, part: int) -> None:
        """So a method sees as many examples as training without one; of its second batch, too."""
        data = {task: Counted(1000) for task in ("tgt", "aux", "odd")}
        problem = domains_problem(dict(data), weights="sampling")
        training = fm.Training(optimizer=fm.OptimizerOf("SGD", lr=0.01), method=AutoLambda(look_at="second"))
        binding = training.binding(plain_net())
        mixture = fm.Mixture("all", dict.fromkeys(tasks, 1.0))
        train_branch(binding, problem, mixture, binding.initial(), steps=5, training=training, seed=0)
        assert {task: counted.reads for task, counted in data.items()} == {
            task: (2 * 5 * part if task in tasks else 0) for task in data
        }

"""What the analysis of transfer finds: transfer gains, gradients, distribution shift, and a diagnosis of it all.

Frozen, typed, and plain: `to_json` and `from_json` of each are inverses. In all of them `weight` is λ, the weight of an
auxiliary beside a target of weight 1, and a gain is a difference of scores, so higher is better for every metric.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from forkmerge.analysis.merge_results import CombinationGains, LossLine
from forkmerge.engine.storage.records import Record
from forkmerge.errors import ProblemError
from forkmerge.problem.display import Display, Displayed

Verdict = Literal["positive", "weak negative", "strong negative", "not enough evidence"]
Advised = Literal["use", "try", "down-weight", "drop", "no difference shown", "undecided"]
"""What to do with an auxiliary; "undecided" is what earlier versions wrote for "no difference shown"."""


@dataclass(frozen=True)
class Gain(Record):
    """TG(λ) over paired seeds: the score with the auxiliary minus the score without it.

    Args:
        weight: λ.
        gains: One per seed, in the order of the seeds.
        mean: Their mean; −∞ where training with the auxiliary diverged.
        low: Lower end of the mean's confidence interval; None for a single seed, or where there is no spread.
        high: Upper end.
    """

    weight: float
    gains: tuple[float, ...]
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class TransferCurve(Record):
    """TG(λ, A) of one auxiliary on one target (Fig. 1 of the paper).

    Args:
        target: The target.
        auxiliary: The auxiliary.
        algorithm: A, as tables call it.
        seeds: The paired seeds.
        split: What scores were measured on: "validation" or "test".
        baseline: Scores of single-task training, by seed.
        points: One per λ > 0, ascending.
        verdict: By the paper's definitions, as far as the intervals show it (see `transfer.judge`).
        confidence: Of the intervals.
    """

    target: str
    auxiliary: str
    algorithm: str
    seeds: tuple[int, ...]
    split: str
    baseline: tuple[float, ...]
    points: tuple[Gain, ...]
    verdict: Verdict
    confidence: float

    @property
    def best(self) -> Gain:
        """The point of largest mean gain; of equals the smaller λ."""
        return max(self.points, key=lambda point: -math.inf if math.isnan(point.mean) else point.mean)

    def at(self, weight: float) -> Gain:
        """Return the point of a λ."""
        for point in self.points:
            if abs(point.weight - weight) < 1e-9:
                return point
        weights = ", ".join(f"{point.weight:g}" for point in self.points)
        raise ProblemError(f"there is no transfer gain at λ = {weight:g}. Measured: {weights}.")


@dataclass(frozen=True)
class TransferMatrix(Record):
    """Transfer gains of every auxiliary (rows) on every target (columns) (Fig. 5).

    Args:
        algorithm: "equal weights", "ForkMerge" or another algorithm.
        auxiliaries: Names of the rows.
        targets: Names of the columns.
        cells: `cells[row][column]`; None where both are the same task, or nothing was measured.
        split: What scores were measured on.
    """

    algorithm: str
    auxiliaries: tuple[str, ...]
    targets: tuple[str, ...]
    cells: tuple[tuple[Gain | None, ...], ...]
    split: str

    @property
    def negatives(self) -> int:
        """How many pairs have a negative mean gain."""
        return sum(cell is not None and cell.mean < 0 for row in self.cells for cell in row)

    @property
    def pairs(self) -> int:
        """How many pairs there are."""
        return sum(cell is not None for row in self.cells for cell in row)


@dataclass(frozen=True)
class GradientSimilarity(Record):
    """Gradient cosine similarity of two tasks, batch by batch, on the parameters both reach (Fig. 8).

    Args:
        first: A task, usually the target.
        second: Another.
        step: Training steps the weights had seen.
        cosines: One per batch; batches where a gradient is zero or not finite are left out.
        skipped: How many those were.
        mean: Of the cosines; NaN if there is none.
        std: Their standard deviation; None for fewer than two.
    """

    first: str
    second: str
    step: int
    cosines: tuple[float, ...]
    skipped: int
    mean: float
    std: float | None

    @property
    def conflicts(self) -> float:
        """The share of batches with cos φ < 0."""
        return sum(value < 0 for value in self.cosines) / max(len(self.cosines), 1)


@dataclass(frozen=True)
class OneStepPoint(Record):
    """One batch of the one-step experiment.

    Args:
        cosine: GCS of target and auxiliary on the batch.
        gains: P̂(θ(λ)) − P̂(θ(0)) after one step, by λ in the order of `OneStepGains.weights`.
    """

    cosine: float
    gains: tuple[float, ...]


@dataclass(frozen=True)
class OneStepGains(Record):
    """From one θ, one step θ − η(g_tgt + λ g_aux) from many batches: TG against GCS (Fig. 2).

    Args:
        target: The target.
        auxiliary: The auxiliary; "l2" for L2 regularisation in its place.
        step: Training steps that θ had seen.
        rate: η.
        measure: What a gain is a difference of: "score", or "loss" (minus the target's loss on validation examples).
        weights: The λ > 0.
        points: One per batch.
        fits: By λ, the polynomial c_0 + c_1 x + c_2 x² + c_3 x³ of TG on x = GCS; empty where it cannot be fitted.
        correlations: By λ, Pearson's correlation of GCS and TG; None where one of them does not vary.
    """

    target: str
    auxiliary: str
    step: int
    rate: float
    measure: str
    weights: tuple[float, ...]
    points: tuple[OneStepPoint, ...]
    fits: tuple[tuple[float, ...], ...]
    correlations: tuple[float | None, ...]


@dataclass(frozen=True)
class ShiftPoint(Record):
    """CSD(λ) and TG(λ) of one λ.

    Args:
        weight: λ; 0 is the target alone.
        discrepancies: CSD by seed: 1 minus the mean confidence.
        mean: Their mean.
        std: Their standard deviation; None for one seed, or where one is not finite.
        gain: TG(λ) beside it, its mean over the same seeds; 0 at λ = 0.
    """

    weight: float
    discrepancies: tuple[float, ...]
    mean: float
    std: float | None
    gain: float


@dataclass(frozen=True)
class ShiftCurve(Record):
    """Confidence score discrepancy and transfer gain against λ (Fig. 3b).

    Args:
        target: The target.
        auxiliary: The auxiliary.
        split: Whose inputs: "validation", or "test" (without labels, after the fit, as in the paper).
        seeds: The paired seeds.
        points: One per λ, ascending, λ = 0 first.
    """

    target: str
    auxiliary: str
    split: str
    seeds: tuple[int, ...]
    points: tuple[ShiftPoint, ...]

    def change(self, weight: float) -> float | None:
        """Return CSD(λ) − CSD(0): positive if the auxiliary makes the model less confident; None if not measured."""
        means = (point.mean for point in self.points if abs(point.weight - weight) < 1e-9)
        return next((mean - self.points[0].mean for mean in means), None)


@dataclass(frozen=True)
class FeaturePanel(Record):
    """The interpolated training distribution at one λ beside held-out data, in two dimensions.

    Args:
        weight: λ; a training point is the auxiliary's with probability λ / (1 + λ).
        positions: (x, y) of every point.
        origins: Of every point: "target", "auxiliary" or "held-out".
        classes: Of every point, the label; one of the most frequent.
    """

    weight: float
    positions: tuple[tuple[float, float], ...]
    origins: tuple[str, ...]
    classes: tuple[int, ...]


@dataclass(frozen=True)
class FeatureMap(Record):
    """t-SNE of features of the target-only model, one panel per λ, one embedding for all (Fig. 3a).

    Args:
        target: The target.
        auxiliary: The auxiliary.
        split: Where held-out points come from: "validation" or "test".
        panels: One per λ.
    """

    target: str
    auxiliary: str
    split: str
    panels: tuple[FeaturePanel, ...]


@dataclass(frozen=True)
class AuxiliaryFinding(Record):
    """What a diagnosis says of one auxiliary.

    Args:
        auxiliary: Its name.
        curve: TG(λ) with equal-weight training; from short runs where the plan says so.
        similarity: Gradient cosine similarity with the target; None if not measured.
        shift: CSD(λ); None where predictions are no class scores.
        relevance: The task weight ForkMerge gave it, mean over rounds and seeds; None if ForkMerge was not run.
        affinity: The cheap estimate behind the advice (see `advice`); None if not measured.
        advice: What to do with it.
        reason: Why, in one sentence.
        measure: What the estimate is a relative change of: "loss" or "score".
    """

    auxiliary: str
    curve: TransferCurve
    similarity: GradientSimilarity | None
    shift: ShiftCurve | None
    relevance: float | None
    affinity: float | None
    advice: Advised
    reason: str
    measure: str = "loss"

    def __post_init__(self) -> None:
        if self.advice == "undecided":
            object.__setattr__(self, "advice", "no difference shown")


@dataclass(frozen=True)
class Pictures(Record):
    """What a diagnosis shows of models trained alone and with auxiliaries at λ = 1, with one seed.

    Args:
        features: The interpolated training distribution, per auxiliary.
        mixtures: Gains of combinations of the models; one result, or none.
        lines: The target's loss between the target-only model and each of the others.
        notes: Why something is left out.
    """

    features: tuple[FeatureMap, ...] = ()
    mixtures: tuple[CombinationGains, ...] = ()
    lines: tuple[LossLine, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Diagnosis(Record, Displayed):
    """Everything `forkmerge diagnose` found: one JSON file, `diagnosis.json`, in its folder.

    Args:
        target: The target.
        findings: One per auxiliary.
        plan: What was done within the budget: seeds, weights, steps and so on, as plain numbers and words.
        one_step: The one-step experiment per auxiliary, and with L2 regularisation in place of one.
        seconds: What its pieces took, one after the other, in whatever session they were done.
        command: What to type to make it again.
        notes: What a reader should know.
        pictures: Of the models; empty where runs were shortened.
        settings: Of the recipe.
        environment: Versions, threads and machine type of the session that ended it.
    """

    target: str
    findings: tuple[AuxiliaryFinding, ...]
    plan: dict[str, Any]
    one_step: tuple[OneStepGains, ...] = ()
    seconds: float = 0.0
    command: str = ""
    notes: tuple[str, ...] = field(default=())
    pictures: Pictures = field(default=Pictures())
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    def display(self) -> Display:
        """Return what a prompt shows of the diagnosis; the page and the command have the whole verdict table."""
        rows = []
        for finding in self.findings:
            best, verdict = finding.curve.best, finding.curve.verdict
            gain = f"{best.mean:+.3f}" if math.isfinite(best.mean) else "diverged"
            rows.append((finding.auxiliary, gain, f"{best.weight:.3g}", verdict, finding.advice))
        legend = "TG: transfer gain, the score with the auxiliary minus without it; λ: the auxiliary's weight"
        head = ("auxiliary", "largest TG", "at λ", "transfer", "advice")
        return Display(f"Diagnosis of {self.target!r}", {}, head, rows, (legend, *self.notes))

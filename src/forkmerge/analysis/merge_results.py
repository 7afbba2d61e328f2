"""What the analysis of merges and of records finds: combinations of models, loss along lines, dynamics, replays."""

from __future__ import annotations

from dataclasses import dataclass

from forkmerge.engine.storage.records import Record


@dataclass(frozen=True)
class CombinationGains(Record):
    """Transfer gain of combinations Σ_b Λ_b θ^b of two models (a line) or three (a triangle) (Fig. 6).

    Args:
        names: The models; the first, the target alone, is what gains are measured against.
        coefficients: Λ of every point, one number per model.
        scores: Validation score of every point.
        gains: Score minus the first model's.
    """

    names: tuple[str, ...]
    coefficients: tuple[tuple[float, ...], ...]
    scores: tuple[float, ...]
    gains: tuple[float, ...]

    @property
    def best(self) -> int:
        """Position of the highest gain; of equals the first."""
        return max(range(len(self.gains)), key=self.gains.__getitem__)


@dataclass(frozen=True)
class LossLine(Record):
    """The target's loss on the straight line between two models: is there a barrier?

    Args:
        names: The two models.
        positions: 0 is the first, 1 the second.
        losses: The target's loss on validation examples, without regularisation of any kind.
        scores: Validation score beside it.
        barrier: The largest excess of the loss over the straight line between both ends, at least 0.
    """

    names: tuple[str, str]
    positions: tuple[float, ...]
    losses: tuple[float, ...]
    scores: tuple[float, ...]
    barrier: float


@dataclass(frozen=True)
class LossPlane(Record):
    """The target's loss on the plane through three models.

    The plane's axes are orthonormal: x from the first model to the second, y towards the third, in distances of
    parameters.

    Args:
        names: The three models.
        corners: (x, y) of the three.
        marks: (x, y) of other points that lie in the plane, by name, e.g. the merge.
        xs: Columns of the grid.
        ys: Rows.
        losses: `losses[row][column]`.
    """

    names: tuple[str, str, str]
    corners: tuple[tuple[float, float], ...]
    marks: dict[str, tuple[float, float]]
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class CoefficientHistory(Record):
    """Coefficients of a target's merges over rounds (Fig. 9), mean and spread over runs.

    Args:
        target: The target.
        runs: How many runs.
        steps: Step of every merge.
        branches: Their names.
        means: `{branch: Λ by round}`; a branch that was pruned has 0 from then on.
        stds: The standard deviations; 0 for one run.
        relevance: `{task: λ by round}`, mean over runs.
    """

    target: str
    runs: int
    steps: tuple[int, ...]
    branches: tuple[str, ...]
    means: dict[str, tuple[float, ...]]
    stds: dict[str, tuple[float, ...]]
    relevance: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class LearningCurve(Record):
    """Validation score over training steps of one method, mean ± standard deviation over seeds (Fig. 11).

    Args:
        label: The method.
        target: The target.
        steps: Where the score was measured.
        means: Of the scores.
        stds: 0 for one seed.
        runs: How many seeds.
        metric: What `means` are of: "score", or the name of an error, which is shown as one.
    """

    label: str
    target: str
    steps: tuple[int, ...]
    means: tuple[float, ...]
    stds: tuple[float, ...]
    runs: int
    metric: str = "score"


@dataclass(frozen=True)
class IntervalEffect(Record):
    """What Δt does to the result (Fig. 7).

    Args:
        target: The target.
        metric: What `means` are of: "score", or a metric's name.
        intervals: Δt, ascending.
        means: Over seeds.
        stds: 0 for one seed.
        runs: Seeds of each.
    """

    target: str
    metric: str
    intervals: tuple[int, ...]
    means: tuple[float, ...]
    stds: tuple[float, ...]
    runs: tuple[int, ...]


@dataclass(frozen=True)
class MethodCost(Record):
    """What a method costs and gives (Fig. 10).

    Args:
        label: The method.
        time: Wall time of a run relative to single-task training; None if unknown.
        change: Δ_m as a fraction; None if unknown.
        branches: B.
        memory: Model sizes beyond the baseline's; None if unknown.
    """

    label: str
    time: float | None
    change: float | None
    branches: int
    memory: float | None


@dataclass(frozen=True)
class ParetoPoint(Record):
    """One model in a projection.

    Args:
        label: Its task weights, or the method.
        x: Score of the first task.
        y: Score of the second.
        is_front: Whether it is on the front: of the grid points, or of all where there is no grid, none beats it in
            one of the two without losing in the other.
        is_grid: Whether it is a point of a grid search.
    """

    label: str
    x: float
    y: float
    is_front: bool
    is_grid: bool


@dataclass(frozen=True)
class ParetoProjection(Record):
    """Scores of two tasks, of a grid search's points and of methods (Fig. 12).

    Args:
        first: Task on the x axis.
        second: Task on the y axis.
        points: The points.
    """

    first: str
    second: str
    points: tuple[ParetoPoint, ...]


@dataclass(frozen=True)
class Replay(Record):
    """A round's search, done again on its saved branches, with something changed.

    Args:
        round: Counted from 1.
        question: What was changed, in words; "nothing" for a plain replay.
        branches: Their names.
        recorded: Λ of the run.
        chosen: Λ of the replay.
        score: Score of `chosen` under the replay's metric and data.
        recorded_score: Score of `recorded` there.
        branch_scores: Score of every single branch there.
        evaluations: Candidates that were scored.
    """

    round: int
    question: str
    branches: tuple[str, ...]
    recorded: dict[str, float]
    chosen: dict[str, float]
    score: float
    recorded_score: float
    branch_scores: dict[str, float]
    evaluations: int


@dataclass(frozen=True)
class Counterfactual(Record):
    """A round's merge with one branch given coefficient 0.

    Args:
        round: Counted from 1.
        branch: The branch taken away.
        score: Score of the merge as it was.
        without: Score with the others' coefficients scaled up to sum 1; NaN if there are no others.
        searched: Score of the best merge of the others that the search finds.
        coefficients: Λ of that merge.
    """

    round: int
    branch: str
    score: float
    without: float
    searched: float
    coefficients: dict[str, float]


@dataclass(frozen=True)
class Survival(Record):
    """How much of a merge's gain is left on validation examples that the search has not seen.

    Validation data is halved at random again and again; coefficients are searched on one half, and their gain over the
    target-only branch is measured on both.

    Args:
        round: Counted from 1.
        seen: Gain on the half searched on, per split.
        unseen: Gain of the same coefficients on the other half, per split.
        mean_seen: Mean of the first.
        mean_unseen: Mean of the second.
        kept: mean_unseen / mean_seen; None if nothing was gained on the half searched on.
        baseline: The branch that gains are measured against.
    """

    round: int
    seen: tuple[float, ...]
    unseen: tuple[float, ...]
    mean_seen: float
    mean_unseen: float
    kept: float | None
    baseline: str

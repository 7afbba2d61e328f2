"""Made-up results for reports: every figure, hostile names, many tasks and rounds."""

from __future__ import annotations

import json
import math
import random
from datetime import datetime
from pathlib import Path

from forkmerge.algorithms.run_record import BranchRecord, Candidate, Round, Run
from forkmerge.algorithms.saved_run import SavedRun
from forkmerge.analysis.diagnosis.pieces import FORMAT
from forkmerge.analysis.merge_results import (
    CoefficientHistory,
    CombinationGains,
    Counterfactual,
    IntervalEffect,
    LearningCurve,
    LossLine,
    LossPlane,
    MethodCost,
    ParetoPoint,
    ParetoProjection,
    Replay,
    Survival,
)
from forkmerge.analysis.results import (
    AuxiliaryFinding,
    Diagnosis,
    FeatureMap,
    FeaturePanel,
    Gain,
    GradientSimilarity,
    OneStepGains,
    OneStepPoint,
    Pictures,
    ShiftCurve,
    ShiftPoint,
    TransferCurve,
    TransferMatrix,
)
from forkmerge.engine.storage.records import Record
from forkmerge.report import Figure
from forkmerge.report import merge_figures as merges
from forkmerge.report import transfer_figures as transfer

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(2)>",
    '"><svg onload=alert(3)>',
    "%{x} <b>$ink</b> &amp; $x^2$ {y} \\frac _",
    "_hidden",
    "a name that is much too long for any axis of any figure anywhere, and goes on",
)
WEIGHTS = (1 / 16, 1 / 4, 1.0)


def names(count: int, hostile: bool = False) -> list[str]:
    plain = [f"task {i:02}" for i in range(count)]
    return [*HOSTILE, *plain][:count] if hostile else plain


def saved_run(tasks: int, rounds: int, hostile: bool = False, path: Path = Path("runs/made-up")) -> SavedRun:
    """A finished run with a branch per task."""
    draw, finished = random.Random(0), []
    tasks_of = names(tasks, hostile)
    for i in range(rounds):
        cut = [max(draw.gauss(0.2 if k < 5 else -0.6, 1), 0.0) for k in range(tasks)]
        shares = {name: value / (sum(cut) or 1.0) for name, value in zip(tasks_of, cut, strict=True)}
        branches = {
            name: BranchRecord(
                {tasks_of[0]: 1.0, name: 1.0},
                0.9 - 0.4 * math.exp(-i / 100) + draw.gauss(0, 0.01),
                {"accuracy": 0.5},
                {tasks_of[0]: 1 / (i + 1), name: 2 / (i + 1)},
                10 * (i + 1),
            )
            for name in tasks_of
        }
        score = max(branch.score or 0.0 for branch in branches.values())
        relevance = {**shares, tasks_of[0]: 1.0}
        finished.append(
            Round(
                i + 1, "search", 10 * i, 10 * i + 10, branches, [Candidate(shares, 0.5)], shares, score, relevance, []
            )
        )
    target, steps = tasks_of[0], 10 * rounds
    run = Run("ForkMerge", target, steps, 0, 0.9, {"accuracy": 0.9}, "last merge", finished, notes=[f"about {target}"])
    config = {"algorithm": {"name": "ForkMerge"}, "problem": {"target": target}, "training": {"steps": steps}}
    return SavedRun(path, "finished", config, datetime(2026, 1, 1), run, finished)


def curve(auxiliary: str, slope: float, verdict: str = "positive") -> TransferCurve:
    points = []
    for weight in WEIGHTS:
        mean = slope * weight - 0.02 * weight**2
        points.append(Gain(weight, (mean - 0.01, mean + 0.01), mean, mean - 0.02, mean + 0.02))
    return TransferCurve("digits", auxiliary, "EW", (0, 1), "validation", (0.8, 0.82), tuple(points), verdict, 0.95)  # type: ignore[arg-type]


def similarity(auxiliary: str, centre: float) -> GradientSimilarity:
    draw = random.Random(auxiliary)
    cosines = tuple(max(-1.0, min(1.0, draw.gauss(centre, 0.1))) for _ in range(80))
    return GradientSimilarity("digits", auxiliary, 100, cosines, 0, sum(cosines) / 80, 0.1)


def shift(auxiliary: str, slope: float) -> ShiftCurve:
    points = [ShiftPoint(w, (0.1, 0.12), 0.11 + slope * w, 0.01, -slope * w) for w in (0.0, *WEIGHTS)]
    return ShiftCurve("digits", auxiliary, "validation", (0, 1), tuple(points))


def one_step(auxiliary: str) -> OneStepGains:
    draw = random.Random(auxiliary)
    points = []
    for _ in range(60):
        cosine = draw.gauss(0.0, 0.1)
        points.append(OneStepPoint(cosine, tuple(w * (0.01 * cosine - 0.002 + draw.gauss(0, 0.001)) for w in WEIGHTS)))
    fits = tuple((-0.002 * w, 0.01 * w, 0.0, 0.0) for w in WEIGHTS)
    return OneStepGains("digits", auxiliary, 100, 0.1, "score", WEIGHTS, tuple(points), fits, (0.4, None, 0.5))


def diagnosis(auxiliaries: tuple[str, ...] = ("mnist", "photos", "clash")) -> Diagnosis:
    """A diagnosis with one auxiliary of each kind."""
    kinds = [(0.05, "positive", "use"), (0.012, "weak negative", "down-weight"), (-0.15, "strong negative", "drop")]
    findings = []
    for auxiliary, (slope, verdict, advice) in zip(auxiliaries, kinds, strict=True):
        parts = curve(auxiliary, slope, verdict), similarity(auxiliary, slope), shift(auxiliary, -slope)
        findings.append(AuxiliaryFinding(auxiliary, *parts, 0.4, None, advice, f"because of {auxiliary}"))  # type: ignore[arg-type]
    plan = {"seeds": 2, "weights": list(WEIGHTS)}
    steps = (one_step(auxiliaries[0]), one_step("l2"))
    three, line, _ = models(["digits", *auxiliaries])
    pictures = Pictures((features(["digits", auxiliaries[0]]),), (three,), (line,))
    return Diagnosis(
        "digits", tuple(findings), plan, steps, 81.0, "forkmerge diagnose digits.toml", ("a note",), pictures
    )


def matrix(algorithm: str, tasks: list[str], shift_by: float) -> TransferMatrix:
    def cell(i: int, j: int) -> Gain | None:
        value = 0.02 * math.sin(3 * i + j) + shift_by
        return None if i == j else Gain(1.0, (value,), value, None, None)

    cells = tuple(tuple(cell(i, j) for j in range(len(tasks))) for i in range(len(tasks)))
    return TransferMatrix(algorithm, tuple(tasks), tuple(tasks), cells, "test")


def history(tasks: list[str], rounds: int, runs: int = 3) -> CoefficientHistory:
    shares = {name: tuple((i + k) % 3 / 3 for i in range(rounds)) for k, name in enumerate(tasks)}
    steps = tuple(10 * (i + 1) for i in range(rounds))
    spread = dict.fromkeys(tasks, (0.1,) * rounds)
    return CoefficientHistory(tasks[0], runs, steps, tuple(tasks), shares, spread, shares)


def saved_results() -> list[Record]:
    """One result of many kinds, as somebody may keep them in a folder."""
    surroundings = models(names(3))
    search = {"alone": 0.5, "joint": 0.5}
    return [
        curve("mnist", 0.1),
        matrix("equal weights", names(3), 0.0),
        features(names(2)),
        *surroundings,
        Replay(3, "nothing", ("alone", "joint"), search, search, 0.8, 0.8, search, 6),
        Counterfactual(3, "joint", 0.8, 0.7, math.nan, {"alone": 1.0}),
        Survival(3, (0.1, 0.2), (0.0, 0.1), 0.15, 0.05, 0.33, "alone"),
    ]


def features(tasks: list[str]) -> FeatureMap:
    draw = random.Random(0)
    places = tuple((draw.gauss(0, 1), draw.gauss(0, 1)) for _ in range(60))
    origins = ("target", "auxiliary", "held-out") * 20
    panels = tuple(FeaturePanel(weight, places, origins, (1,) * 60) for weight in (0.0, *WEIGHTS))
    return FeatureMap(tasks[0], tasks[1], "validation", panels)


def models(tasks: list[str]) -> tuple[CombinationGains, LossLine, LossPlane]:
    """What lies between three models."""
    grid = [(i / 10, j / 10, 1 - i / 10 - j / 10) for i in range(11) for j in range(11 - i)]
    gains = tuple(0.05 - (a - 0.4) ** 2 - (b - 0.3) ** 2 for a, b, _ in grid)
    three = CombinationGains(tuple(tasks[:3]), tuple(grid), gains, gains)
    line = LossLine((tasks[0], tasks[1]), (0.0, 0.5, 1.0), (0.3, 0.5, math.nan), (0.8, 0.7, 0.8), 0.2)
    axis = tuple(i / 5 for i in range(-2, 8))
    losses = tuple(tuple(x * x + y * y for x in axis) for y in axis)
    corners = ((0.0, 0.0), (1.0, 0.0), (0.3, 0.8))
    plane = LossPlane((tasks[0], tasks[1], tasks[2]), corners, {"merge": (0.4, 0.3)}, axis, axis, losses)
    return three, line, plane


def all_figures(hostile: bool = False) -> list[Figure]:
    """Every named figure, of made-up results."""
    tasks = names(4, hostile)
    three, line, plane = models(tasks)
    two = CombinationGains(tuple(tasks[:2]), ((1.0, 0.0), (0.5, 0.5), (0.0, 1.0)), (0.1, 0.3, 0.2), (0.0, 0.2, 0.1))
    curves = [
        LearningCurve(name, "digits", (10, 20, 30), (0.5, 0.6, 0.7), (0.1, 0.1, 0.1), 3) for name in names(9, hostile)
    ]
    costs = [MethodCost(name, 1.0 + i, 0.01 * i - 0.01, 1, 2.0) for i, name in enumerate(tasks)]
    points = [ParetoPoint(name, 0.1 * i, 0.3 - 0.1 * i, True, i > 1) for i, name in enumerate(tasks)]
    effect = IntervalEffect("digits", "accuracy", (10, 100, 1000), (0.7, 0.8, 0.75), (0.1, 0.1, 0.1), (3, 3, 3))
    merged = {"": history(tasks, 6)}
    made = diagnosis((tasks[1], tasks[2], tasks[3]))
    return [
        transfer.gain_curve([finding.curve for finding in made.findings]),
        transfer.gain_matrix([matrix("equal weights", tasks, -0.01), matrix("ForkMerge", tasks, 0.01)]),
        transfer.cosine_distribution([f.similarity for f in made.findings if f.similarity]),
        transfer.cosine_against_gain(made.one_step),
        transfer.shift_curve([f.shift for f in made.findings if f.shift]),
        transfer.feature_map([features(tasks)]),
        merges.coefficients_over_rounds(merged),
        merges.relevance_over_rounds(merged),
        merges.learning_curves(curves),
        merges.interval_effect([effect]),
        merges.cost_per_method(costs),
        merges.pareto_projections([ParetoProjection(tasks[0], tasks[1], tuple(points))]),
        merges.combination_gains([three]),
        merges.loss_lines([line]),
        merges.loss_plane([plane]),
        Figure("pair", "two models", "", merges.combination_gains([two]).panels),
        Figure(
            "many", "many branches", "", merges.coefficients_over_rounds({"": history(names(12, hostile), 9)}).panels
        ),
    ]


def write_diagnosis(folder: Path) -> None:
    """Make a folder that of a diagnosis that has ended."""
    (folder / "diagnosis_plan.json").write_text("{}")
    content = {"format": FORMAT, "diagnosis": diagnosis().to_json()}
    (folder / "diagnosis.json").write_text(json.dumps(content))

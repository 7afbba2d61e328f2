"""The records of one comparison, and what the page of results asks of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from forkmerge.experiments.compared_methods import ComparedMethod, compared_method_from
from forkmerge.experiments.paired_statistics import Paired, compare_paired
from forkmerge.experiments.results_file import read_comparison
from forkmerge.experiments.run_results import RunResult
from forkmerge.experiments.summary import Scores, Summary, average_changes, changes_by_target, summarise

DEFAULT = "forkmerge-win-stay-all"
FEWEST_RIVALS, FEWEST_SEEDS = 5, 3
FORMS = ("forkmerge", "forkmerge-aux", DEFAULT, "forkmerge-win-stay", "forkmerge-in-turn", "recipe")


@dataclass(frozen=True)
class PairGain:
    """The transfer gain of an auxiliary on a target, with equal weights and with ForkMerge, and their upper ends."""

    joint: float
    merged: float
    highest: dict[str, float | None]

    def is_harmful(self, which: str) -> bool:
        """Whether the gain is below zero beyond noise."""
        highest = self.highest[which]
        return highest is not None and highest < 0


Pairs = dict[tuple[str, str], PairGain]
"""By auxiliary and target."""


@dataclass(frozen=True)
class Setting:
    """One comparison.

    Args:
        name: Of its recipe file.
        plan: What was compared.
        outcomes: The records of its runs.
        pairs: What training on pairs of tasks gave, where that was measured.
        remarks: What somebody who looked at the records wrote about them, in Markdown.
        base: The setting that this is a variant of.
        study: The development records of the same setting, which choices are made by that these runs then judge.
    """

    name: str
    plan: dict[str, Any]
    outcomes: list[RunResult]
    pairs: Pairs = field(default_factory=dict)
    remarks: str = ""
    base: Setting | None = None
    study: Setting | None = None

    @cached_property
    def summary(self) -> Summary:
        return summarise(self.outcomes, self.plan)

    @cached_property
    def changes(self) -> dict[str, dict[str, Scores]]:
        """Δ by target, method and seed, on test data, all against STL as the recipe selects its model.

        A comparison's tables take STL with the selection of each row, so that selection does not look like transfer,
        but rows with different references cannot be compared with each other.
        """
        return changes_by_target(self.outcomes, self._one_reference)

    @property
    def _one_reference(self) -> dict[str, Any]:
        methods = [{key: value for key, value in each.items() if key != "references"} for each in self.plan["methods"]]
        return {**self.plan, "methods": methods}

    @cached_property
    def overall(self) -> dict[str, Scores]:
        """Δ_m by method and seed, on test data."""
        return average_changes(self.changes)

    @cached_property
    def on_validation(self) -> dict[str, Scores]:
        """Δ_m by method and seed, on validation data, which choices are made by.

        Methods that were trained on the validation data in the end, and searched nothing before, have no such metrics;
        where single-task training is one of them, the first form of ForkMerge takes its place.
        """
        seen = [replace(outcome, metrics=outcome.validation) for outcome in self.outcomes]
        for baseline in ("stl", *self.forms):
            found = average_changes(changes_by_target(seen, self._one_reference, baseline))
            if found:
                return found
        return {}

    @cached_property
    def contenders(self) -> dict[str, ComparedMethod]:
        return {method["word"]: compared_method_from(method["word"]) for method in self.plan["methods"]}

    @property
    def labels(self) -> dict[str, str]:
        return {method["word"]: method["label"] for method in self.plan["methods"]}

    @property
    def forms(self) -> list[str]:
        """ForkMerge in all its forms that have results on all targets."""
        return [word for word, found in self.contenders.items() if found.base in FORMS and word in self.overall]

    @property
    def is_about_forkmerge(self) -> bool:
        """Whether some form of it is compared, with or without results; else the setting only serves another one."""
        return any(found.base in FORMS for found in self.contenders.values())

    @property
    def compute(self) -> list[str]:
        """What ForkMerge's compute, or more of it, would have bought otherwise."""
        extra = ("-uniform", "-once", "-best", "-average", "grid")
        return [word for word, found in self.contenders.items() if found.base.endswith(extra) and word in self.overall]

    @property
    def others(self) -> list[str]:
        """All methods that are neither, and that nobody would have to know the best auxiliary for."""
        left_out = (*self.forms, *self.compute, *(word for word in self.overall if word.startswith("with:")))
        return [word for word in self.overall if word not in left_out]

    @property
    def seeds(self) -> int:
        """Seeds that have results of all methods on all targets."""
        return min((len(scores) for scores in self.overall.values()), default=0)

    @property
    def chosen(self) -> str | None:
        """The form of ForkMerge that a setting is judged by: the default, or else the validation's best.

        Of the default at several learning rates it is the study's best, as of all other methods; with other options it
        is not the default.
        """
        named = {word: self.contenders[word] for word in self.forms}
        plain = {"interval", "lr"}
        default = [word for word, one in named.items() if one.base == DEFAULT and dict(one.options).keys() <= plain]
        if default:
            return self._best_of_study(default) or default[0]
        known = [word for word in self.forms if word in self.on_validation]
        return max(known, key=lambda word: mean(self.on_validation[word]), default=None)

    def _best_of_study(self, words: Sequence[str]) -> str | None:
        """The best of some methods by their means on development data, over the seeds that all of them have."""
        known = {} if self.study is None else {word: self.study.overall.get(word, {}) for word in words}
        tried = {word: scores for word, scores in known.items() if scores}
        if not tried:
            return None
        shared = set.intersection(*map(set, tried.values()))
        return max(tried, key=lambda word: mean({s: v for s, v in tried[word].items() if s in shared or not shared}))

    @property
    def alone(self) -> str:
        """Single-task training, at the learning rate that the study chose for it."""
        rates = [
            word for word, one in self.contenders.items() if one.base == "stl" and set(dict(one.options)) <= {"lr"}
        ]
        return self._best_of_study([word for word in rates if word in self.overall]) or "stl"

    @property
    def rivals(self) -> list[str]:
        """All methods that take no more steps than the judged form, and that need no knowledge of what helps."""
        most = 1 if self.chosen is None else self.branches(self.chosen)
        return [*self.others, *(word for word in self.compute if self.branches(word) <= most)]

    def at_own_rates(self, words: Sequence[str]) -> list[str]:
        """Return, of methods that differ in their learning rate alone, the study's best, or the recipe's own."""
        families: dict[tuple[Any, ...], list[str]] = {}
        for word in words:
            found = self.contenders[word]
            options = tuple(sorted((key, str(value)) for key, value in found.options if key != "lr"))
            families.setdefault((word.partition("[")[0], options), []).append(word)
        return [self._best_of_study(each) or each[0] for each in families.values()]

    @property
    def rivals_of_study(self) -> list[str]:
        """Those that the study has tried, too; none where these are too few to speak of a choice."""
        known = {} if self.study is None else self.study.overall
        tried = [word for word in self.rivals if word in known]
        return tried if len(tried) >= FEWEST_RIVALS else []

    @property
    def rival_beforehand(self) -> str | None:
        """The best of them by the study, which was there before these runs."""
        return self._best_of_study(self.rivals_of_study)

    @property
    def rival_in_hindsight(self) -> str | None:
        """The best of them on the test data that it is compared on, by its mean over the seeds that both have.

        One that has fewer of them than `FEWEST_SEEDS` is not asked where others have more.
        """
        pairs = {word: self.paired(self.chosen or "", word) for word in self.rivals}
        known = {word: pair for word, pair in pairs.items() if pair is not None}
        least = min(FEWEST_SEEDS, max((pair.count for pair in known.values()), default=0))
        asked = {word: pair.mean for word, pair in known.items() if pair.count >= least}
        return min(asked, key=lambda word: asked[word], default=None)

    @property
    def rival(self) -> str | None:
        """The best of all other methods, by its mean on test data."""
        return max(self.others, key=lambda word: mean(self.overall[word]), default=None)

    def branches(self, word: str) -> int:
        """How many branches a method trains at a time, or how many runs take their place."""
        rounds = [len(each.get("branches", ())) for run in self.finals(word) for each in run.rounds]
        return max(rounds, default=0) or max((run.branches for run in self.finals(word)), default=1)

    def paired(self, ours: str, theirs: str, target: str | None = None) -> Paired | None:
        """The paired difference between two methods, over all targets or on one."""
        scores = self.overall if target is None else self.changes[target]
        return compare_paired(scores.get(ours, {}), scores.get(theirs, {}))

    @staticmethod
    def is_below(found: Paired | None) -> bool:
        """Whether a difference is below zero beyond noise."""
        return found is not None and found.high is not None and found.high < 0

    def finals(self, word: str, target: str | None = None) -> list[RunResult]:
        """The runs of a method that have a result."""
        return [
            o
            for o in self.outcomes
            if o.kind == "final" and o.method == word and o.is_complete and target in (None, o.target)
        ]

    def option(self, word: str, key: str) -> Any:
        """An option that a word sets, or else the recipe's algorithm."""
        own = dict(self.contenders[word].options)
        algorithm = self.plan["settings"].get("algorithm", {})
        return own.get(key, algorithm.get(key) if isinstance(algorithm, dict) else None)


def mean(scores: Scores) -> float:
    return fmean(scores.values())


def read_settings(folder: Path, advice: Path | None = None) -> list[Setting]:
    """Return the comparisons whose records lie in a folder, by name, with the remarks in NAME.md beside them.

    NAME_MORE is a variant of NAME, and development/NAME is its study, and that of NAME-MORE if it has none of its own.

    Args:
        folder: The folder.
        advice: Results of the benchmark that trains pairs.
    """
    found = json.loads(advice.read_text("utf-8"))["results"] if advice is not None and advice.is_file() else {}
    settings: dict[str, Setting] = {}
    for path in sorted(folder.glob("*.json")):
        names = [name for name in settings if path.stem.startswith(f"{name}_")]
        base = settings[max(names, key=len)] if names else None
        remarks = path.with_suffix(".md")
        text = remarks.read_text("utf-8").strip() if remarks.is_file() else ""
        studies = [folder / "development" / f"{stem}.json" for stem in (path.stem, path.stem.rpartition("-")[0])]
        before = next((Setting(path.stem, *read_comparison(file)) for file in studies if file.is_file()), None)
        own = Setting(path.stem, *read_comparison(path), _pairs(found, path.stem), text, base, before)
        settings[path.stem] = own
    return list(settings.values())


def _pairs(found: dict[str, Any], name: str) -> Pairs:
    pairs = {}
    for title, content in found.items():
        setting, _, target = title.partition(", ")
        for auxiliary, pair in content["pairs"].items():
            if setting.lower() == name and "ForkMerge" in pair:
                merged = pair["ForkMerge"]
                highest = {"joint": pair["high"], "merged": merged["high"]}
                pairs[auxiliary, target] = PairGain(pair["gain"], merged["gain"], highest)
    return pairs


def percent(value: float | None) -> str:
    """Return a fraction in per cent, with its sign."""
    if value is None:
        return "–"
    rounded = round(100 * value, 2)
    return f"{rounded:+.2f}".replace("-", "−") if rounded else "0.00"


def show_paired(found: Paired | None) -> str:
    """Return a paired difference with its interval and its wins, ties and losses."""
    if found is None:
        return "no seed in common"
    interval = "" if found.low is None else f" [{percent(found.low)}, {percent(found.high)}]"
    return f"{percent(found.mean)} %{interval}, {found.wins}–{found.ties}–{found.losses}"

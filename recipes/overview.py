"""All settings in one table: ForkMerge beside single-task training and the best other method, for the page and README.

README.md shows the table between two lines, `<!-- results:begin -->` and `<!-- results:end -->`; `./run results` writes
what lies between them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
from setting import DEFAULT, Setting, mean, percent

from forkmerge.experiments.paired_statistics import Paired

_LEGEND = (
    "Change of the target's metrics with its 95 % interval over seeds, and seeds won–tied–lost. *tie*: the interval "
    "includes 0. STL: single-task training."
)
_OTHERS: tuple[tuple[str, Callable[[Setting], str | None]], ...] = (
    ("single-task training", lambda s: s.alone),
    ("the other chosen beforehand", lambda s: s.rival_beforehand),
    ("the best other in hindsight", lambda s: s.rival_in_hindsight),
)
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
WIN, TIE, LOSS, UNSURE = "win", "tie", "loss", "one seed"
_HEAD = (
    "| setting | ForkMerge | against STL, % | | other, chosen beforehand | against it, % | | best other in hindsight | "
    "against it, % | | steps × |"
)
_RESAMPLES = 5_000


def verdict(difference: Paired) -> str:
    """Return whether a difference is beyond noise: its interval over seeds does not hold zero."""
    if difference.low is None or difference.high is None:
        return UNSURE if difference.count < 2 else TIE  # without any spread, seeds agree to the last digit
    return WIN if difference.low > 0 else LOSS if difference.high < 0 else TIE


def compared(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings that can be said something about: ForkMerge, single-task training and another method."""
    return [s for s in settings if s.chosen and s.rivals and s.paired(s.chosen, s.alone)]


def steps_ratio(s: Setting, word: str) -> float:
    """Return the training steps of all branches of a method, as a ratio to those of single-task training.

    With equal labels ForkMerge is trained twice: the refit repeats all rounds on training and validation data.
    """
    return fmean(_steps(s, word)) / fmean(_steps(s, "stl"))


def _steps(s: Setting, word: str) -> list[float]:
    totals = []
    for result in s.finals(word):
        total, start = 0.0, 0
        for each in result.rounds:
            total += (each["end"] - start) * (len(each.get("branches", ())) or result.branches)
            start = each["end"]
        total += (result.steps - start) * result.branches
        totals.append(total * (2 if s.plan.get("equal_labels") and word in s.forms else 1))
    return totals


def table(settings: Sequence[Setting]) -> list[str]:
    """Return the lines of the table, variants of a setting below it."""
    lines = [_HEAD, "|---" * 11 + "|"]
    for s in compared(settings):
        assert s.chosen is not None
        name = s.name if s.base is None else f"*{s.name}*"
        before = _against(s, s.rival_beforehand)
        if s.rival_beforehand is not None:
            before[0] += f", best of {len(s.rivals_of_study)}"
        cells = [name, s.labels[s.chosen], *_against(s, s.alone)[1:], *before]
        cells += [*_against(s, s.rival_in_hindsight), f"{steps_ratio(s, s.chosen):.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _against(s: Setting, word: str | None) -> list[str]:
    """Another method, the difference to it and what is to be thought of that."""
    pair = s.paired(s.chosen or "", word) if word is not None else None
    return ["–", "–", ""] if pair is None else [s.labels[word or ""], _difference(pair), verdict(pair)]


def _difference(pair: Paired) -> str:
    interval = "" if pair.low is None else f" [{percent(pair.low)}, {percent(pair.high)}]"
    return f"{percent(pair.mean)}{interval}, {pair.wins}–{pair.ties}–{pair.losses}"


def tally(settings: Sequence[Setting]) -> str:
    """Say how often ForkMerge wins, ties and loses, without the variants, which are the same data again."""
    own = [s for s in compared(settings) if s.base is None]
    parts = []
    for title, other in _OTHERS:
        verdicts = [verdict(pair) for s in own if (pair := s.paired(s.chosen or "", other(s) or ""))]
        counts = {word: verdicts.count(word) for word in (WIN, TIE, LOSS)}
        parts.append(f"against {title} ForkMerge wins {counts[WIN]}, ties {counts[TIE]} and loses {counts[LOSS]}")
    text = f"Of {len(own)} settings, beyond noise over seeds: {'; '.join(parts)}. {_average(own)}".rstrip()
    variants = any(s.base is not None for s in compared(settings))
    return f"{text} Rows in italics are variants, the same data again, and not counted." if variants else text


def _average(settings: Sequence[Setting]) -> str:
    """Say how far ForkMerge is ahead on average, each setting counting once."""
    parts = []
    for title, other in _OTHERS:
        known = {s.name: _by_target(s, other(s) or "") for s in settings}
        overall = hierarchical({name: targets for name, targets in known.items() if targets})
        if overall is not None:
            average, low, high = map(percent, overall)
            parts.append(f"{average} % [{low}, {high}] against {title} (of {sum(map(bool, known.values()))})")
    how = "On average over settings, intervals by resampling settings, targets and seeds"
    return f"{how}: {'; '.join(parts)}." if parts else ""


def _by_target(s: Setting, word: str) -> list[list[float]]:
    """The paired differences to another method, by target and seed."""
    pairs = [(scores.get(s.chosen or "", {}), scores.get(word, {})) for scores in s.changes.values()]
    differences = [[ours[seed] - theirs[seed] for seed in ours if seed in theirs] for ours, theirs in pairs]
    return [values for values in differences if values]


def hierarchical(differences: Mapping[str, Sequence[Sequence[float]]]) -> tuple[float, float, float] | None:
    """Return the mean over settings of the means over targets and seeds, and its 95 % interval.

    Settings are resampled with replacement, then the targets of each, then the seeds of each target: a bootstrap in
    which what a setting or a target has in common stays together. As means of settings already vary by their seeds,
    that counts the noise of seeds twice: the interval is rather too wide. None with fewer than two settings.

    Args:
        differences: By setting, target and seed.
    """
    if len(differences) < 2:
        return None
    random = np.random.default_rng(0)

    def of_target(values: Sequence[float]) -> np.ndarray:
        return random.choice(values, (_RESAMPLES, len(values))).mean(axis=1)

    def of_some(draw: Callable[[Any], np.ndarray], items: Sequence[Any]) -> np.ndarray:
        """Means over as many of some items, each copy of which is drawn anew."""
        copies = []
        for _ in items:
            picked = random.integers(len(items), size=_RESAMPLES)
            copies.append(np.stack([draw(item) for item in items])[picked, np.arange(_RESAMPLES)])
        return np.mean(copies, axis=0)

    means = of_some(partial(of_some, of_target), list(differences.values()))
    low, high = np.quantile(means, (0.025, 0.975))
    return fmean(fmean(map(fmean, targets)) for targets in differences.values()), float(low), float(high)


def distances(settings: Sequence[Setting]) -> list[str]:
    """Return the lines of a table: how far every method is behind the best of all, in the settings with the default.

    A method has the learning rate that the study chose for it; one that a setting does not have is not judged there.
    """
    judged = [s for s in settings if s.base is None and s.chosen and s.contenders[s.chosen].base == DEFAULT]
    found: dict[str, dict[str, float]] = {}
    for s in judged:
        assert s.chosen is not None
        words = [*s.at_own_rates(s.rivals), s.chosen]
        best = max(mean(s.overall[word]) for word in words)
        for word in words:
            found.setdefault(_family(s, word), {})[s.name] = best - mean(s.overall[word])
    known = {name: each for name, each in found.items() if len(each) > len(judged) / 2}
    rows = sorted(known.items(), key=lambda item: fmean(item[1].values()))
    lines = [
        "| method | settings | behind the best, mean | most | where |",
        "|---|---|---|---|---|",
    ]
    for name, each in rows:
        worst = max(each, key=lambda setting: each[setting])
        cells = [name, str(len(each)), f"{100 * fmean(each.values()):.1f}", f"{100 * each[worst]:.1f}", worst]
        lines.append("| " + " | ".join(cells) + " |")
    return lines if len(judged) > 1 else []


def _family(s: Setting, word: str) -> str:
    """How tables call a method without options of a setting."""
    return "**ForkMerge**" if word == s.chosen else s.labels[word].partition("[")[0]


def meaning(settings: Sequence[Setting]) -> list[str]:
    """Return what the table means for a user, in three sentences."""
    own = [s for s in compared(settings) if s.base is None]
    alone = {s.name: pair for s in own if (pair := s.paired(s.chosen or "", s.alone))}
    lost = [name for name, pair in alone.items() if verdict(pair) == LOSS]
    won = [name for name, pair in alone.items() if verdict(pair) == WIN]
    ratios = [steps_ratio(s, s.chosen) for s in own if s.chosen]
    costs = f"{min(ratios):.1f} to {max(ratios):.1f} times the steps" if ratios else "its branches' steps"
    safe = (
        f"ForkMerge hurt the target beyond noise on {', '.join(lost)}"
        if lost
        else f"ForkMerge did not hurt the target beyond noise in any of these {len(own)} settings"
    )
    gained = f"it helped beyond noise on {', '.join(won)}" if won else "it did not help beyond noise in any either"
    if alone:
        best = max(alone, key=lambda name: alone[name].mean)
        seeds = f"{alone[best].wins} of {alone[best].count} seeds won"
        gained += f"; its highest mean is {percent(alone[best].mean)} %, on {best}, {seeds}"
    rivals = list(dict.fromkeys(s.labels[s.rival_in_hindsight] for s in own if s.rival_in_hindsight))
    return [
        f"{safe}; {gained}.",
        f"It takes {costs} of single-task training, whether anything transfers or not.",
        f"The best other method differs from setting to setting ({', '.join(rivals)}) and was picked after the fact, "
        "so compare a few on your own data, with `forkmerge compare`, before you choose.",
    ]


def block(settings: Sequence[Setting]) -> str:
    """Return what README.md shows between its two marks."""
    return "\n".join([*table(settings), "", f"{_LEGEND} {tally(settings)}"])


def with_block(readme: str, settings: Sequence[Setting]) -> str:
    """Return a README with its table as the records give it; as it is, where it has no marks."""
    return with_lines(readme, BEGIN, END, block(settings).splitlines())


def with_lines(page: str, begin: str, end: str, lines: Sequence[str]) -> str:
    """Return a page with other lines between two marks; as it is, where it has no marks."""
    marks = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
    return marks.sub(lambda _: "\n".join([begin, "", *lines, "", end]), page)

"""The mixture of texts in one table and one figure, for README.md: manual pages in languages with little text.

README.md shows the table between `<!-- mixture:begin -->` and `<!-- mixture:end -->`; `./run results` writes what is
between, and the figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from overview import with_lines
from setting import Setting, mean, percent

from forkmerge.cli.demo_figure import coefficients_figure
from forkmerge.report.figure import Figure

BEGIN, END = "<!-- mixture:begin -->", "<!-- mixture:end -->"
METRIC, FORM = "bits_per_byte", "forkmerge-aux"
LANGUAGES = {"manpages": "Danish", "manpages-nb": "Norwegian", "manpages-ro": "Romanian"}
ROWS = {
    "stl": "target only",
    "ew": "equal weights",
    "proportional": "weights by size",
    "with:": "best single corpus, known afterwards",
    "posttrain": "all, then the target (Post-train)",
    "autolambda": "learned weights (Auto-λ)",
    "stl-average:5": "target only, average of 5 runs",
    "posttrain-average:5": "Post-train, average of 5 runs",
    "joint-then-alone-average:5": "all, then the target at falling rates, average of 5 runs",
    "forkmerge-aux-uniform": "merges with equal coefficients",
    "forkmerge-aux-once": "one searched merge at the end",
    "forkmerge-win-stay-all[interval=25,lr=0.003]": "ForkMerge's default, two branches at a time",
    FORM: "**ForkMerge**, one branch per corpus",
}


def with_mixture(readme: str, settings: Sequence[Setting]) -> str:
    """Return a README with its table as the records give it; as it is without marks or records."""
    known = _mixtures(settings)
    return with_lines(readme, BEGIN, END, _table(known)) if known else readme


def figure(settings: Sequence[Setting]) -> Figure | None:
    """Return the coefficients of every round, a panel per language; None without records."""
    panels = {LANGUAGES[s.name]: _coefficients(s) for s in _mixtures(settings)}
    return coefficients_figure(panels) if panels else None


def _mixtures(settings: Sequence[Setting]) -> list[Setting]:
    known = [s for s in settings if s.name in LANGUAGES and FORM in s.overall]
    return sorted(known, key=lambda s: list(LANGUAGES).index(s.name))


def _coefficients(s: Setting) -> dict[str, Any]:
    seeds = [[each["coefficients"] for each in run.rounds] for run in s.finals(FORM)]
    names = seeds[0][0]
    means = [{name: fmean(each[name] for each in rounds) for name in names} for rounds in zip(*seeds, strict=True)]
    return {"coefficients": seeds, "mean_coefficients": means}


def _table(settings: Sequence[Setting]) -> list[str]:
    counts = {s.name: len(_seeds(s)) for s in settings}
    heads = [f"{LANGUAGES[name]}, {count} seed{'s' * (count > 1)}" for name, count in counts.items()]
    lines = ["| bits per byte of test text, lower is better | " + " | ".join(heads) + " |"]
    lines.append("|---" * (len(settings) + 1) + "|")
    for word, name in ROWS.items():
        lines.append("| " + " | ".join([name, *(_bits(s, word) for s in settings)]) + " |")
    for words, title in ((equal_steps, "steps"), (equal_compute, "compute")):
        cells = [_against_best(s, words(s)) for s in settings]
        lines.append("| " + " | ".join([f"ForkMerge against the best other at equal {title}, %", *cells]) + " |")
    return lines


def equal_steps(s: Setting) -> list[str]:
    """Return what nobody would have to know the best corpus for, with as many steps; merges without a search, too."""
    return [*s.others, *(word for word in s.compute if s.contenders[word].base.endswith(("-uniform", "-once")))]


def equal_compute(s: Setting) -> list[str]:
    """Return what the compute of all branches would have bought otherwise, and merges without a search."""
    return s.compute


def _words(s: Setting, row: str) -> list[str]:
    """Return the methods of a row."""
    return [known for known in s.overall if known == row or (row == "with:" and known.startswith(row))]


def _seeds(s: Setting) -> set[int]:
    """Return the seeds that all methods of the table have ended with."""
    return set.intersection(*(set(s.overall[word]) for row in ROWS for word in _words(s, row)))


def _bits(s: Setting, row: str) -> str:
    words = _words(s, row)
    if not words:
        return "–"
    best = max(words, key=lambda known: mean(s.overall[known]))
    label = f" ({s.labels[best].removeprefix('with ')})" if row == "with:" else ""
    seeds = _seeds(s)
    shown = f"{fmean(run.metrics[METRIC] or 0.0 for run in s.finals(best) if run.seed in seeds):.3f}{label}"
    return f"**{shown}**" if row == FORM else shown


def _against_best(s: Setting, words: Sequence[str]) -> str:
    best = max(words, key=lambda word: mean(s.overall[word]), default=None)
    found = s.paired(FORM, best) if best is not None else None
    if found is None or best is None:
        return "–"
    interval = "" if found.low is None else f" [{percent(found.low)}, {percent(found.high)}]"
    return f"{percent(found.mean)}{interval} ({s.labels[best]})"

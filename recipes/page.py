"""`./run results`: docs/results*.md and docs/what-matters.md from the records in results/, and from nothing else.

python recipes/page.py             make the pages, and the table in README.md
python recipes/page.py NAME …      run recipes/small/NAME.toml, or go on with it, keep its records, make the pages
python recipes/page.py --more NAME …  the same, but what results/NAME.json has is not run again
python recipes/page.py --check     say whether they are what the records give
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from claims import claims_table
from mixture import figure as figure_of_mixture
from mixture import with_mixture
from overview import distances, meaning, table, tally, with_block
from setting import DEFAULT, Setting, mean, percent, read_settings, show_paired
from what_matters import page as page_of_mechanisms

from forkmerge.report.comparison_tables import tables_of
from forkmerge.report.matplotlib_figure import draw
from forkmerge.report.table import to_markdown

ROOT = Path(__file__).resolve().parent.parent
ADVICE = ROOT / "benchmarks" / "results" / "advice.json"
RECIPES, RECORDS = ROOT / "recipes" / "small", ROOT / "results"
PAGE, DETAILS, README = ROOT / "docs" / "results.md", ROOT / "docs" / "results-details.md", ROOT / "README.md"
MECHANISMS, MIXTURE = ROOT / "docs" / "what-matters.md", ROOT / "docs" / "mixture.png"

_SUMMARY_HEAD = """# Results on small real data

ForkMerge's default (*win-stay of all*), or where it was not run the form that validation chose, on test data, against
single-task training (STL) and against the best of all other methods that take no more training steps: the paper's
fifteen, averages and bests of several runs, and merges without a search. That other is chosen twice: *beforehand*, on
development data, among those that were tried there (*best of* so many; learning rates were chosen there, too, for all
methods alike); and *in hindsight*, by the test numbers that it is compared on, which favours it.
"""
_DISTANCES = """In points of Δ_m, how far every method is behind the best of all in the settings that have the default:
what it would cost to choose it for good. Methods have the learning rate that development data chose for them, or where
they were not tried there the recipe's own.
"""
_BEHIND = """The average over settings is not ahead of the other chosen beforehand beyond noise: outside of text the
default is level with it. Where it is behind, and what was tried for that on development data:

- **Digits**, 1.6 % behind GCS: a search has thirty labels to go by, where GCS compares gradients in every step.
  Branches that combine their tasks by GCS reach it (11.4 against 11.8 %), for as many more backward passes. Other
  rules, rates, intervals and optimizer policies did not.
- **SVHN**, 1.9 % behind Auto-λ: on validation data it is 6 % ahead. Methods that learn from images without labels to
  the end gain on the test images, which are of other photographs, and no search on validation images can see that.
- **Taskonomy with ImageNet weights**, 1.2 % behind Post-train: its half of the run on the target alone is worth 3 % on
  normals. A search sees what a merge is worth now, and not after more training; tails on the target lost, and metrics
  that do not add up over images get the plain argmax.
- **CIFAR-10**, 1.4 % behind ARML, Auto-λ and equal weights in hindsight: joint training pays to the end there, and
  auxiliaries have the target's weight. Twice that gained on development data of CIFAR-10 and SVHN and lost on both of
  PACS, all within noise, so one default for all leaves it.
- **Sketches of PACS** and **Taskonomy's segmentation**, 2.5 and 0.6 % below single-task training: hardly any auxiliary
  helps them, and some 300 and 100 validation images let a search believe so now and then.
"""
_READING = """Differences are of Δ_m, in per cent: the mean over targets and metrics of the relative change against
STL, where + is better; with 95% intervals over paired seeds, which are wide where there are three, and seeds
won–tied–lost. *win*, *loss*: the interval does not hold zero; *tie*: it does. *steps ×*: training steps of all branches
over those of one single-task run; what that is in time, [performance](performance.md) has measured: times in the
records are of several machines, beside other work.
"""
_MADE = """Made by `./run results` from the records in `results/`; `./run results NAME` runs `recipes/small/NAME.toml`
again. Every number, target by target, the paper's claims one by one, and how options were chosen:
[results in detail](results-details.md).
"""

_HEAD = """# Results in detail

Made by `./run results` from the records in `results/`; `./run results NAME` runs `recipes/small/NAME.toml` again.
In one table: [results](results.md).

Δ is the mean over a target's metrics of the signed relative change against the mean of single-task training (STL), in
per cent; Δ_m is its mean over targets. Differences are paired over seeds, with the interval of the paired t at 95%, and
w–t–l: seeds won, tied and lost. Numbers are of the test split, which was read once per run, after its fit. Every
choice inside a run was made on validation data. ForkMerge is judged by its default, or where that was not run by the
form that validation chose; the best other method was picked by the test numbers it is compared with, which favours it.

In the tables, *to best other* is the difference to the best of all other rows, ForkMerge's forms included. B: branches,
or the runs that take their place. *time ×*: one run and its tuning, all branches added up, over one run of STL.
*memory*: model sizes held beyond those of STL, activations apart.
"""


_STUDIES = """A third of the training data takes the place of the test split, which these runs never read; searches see
validation data as always."""


def summary_page(settings: Sequence[Setting]) -> str:
    """Return the page that comes first: one table over all settings, and what it means."""
    if not settings:
        return _SUMMARY_HEAD + "\nThere are no records yet.\n"
    parts = [_SUMMARY_HEAD, *table(settings), "", tally(settings), ""]
    if lines := distances(settings):
        parts += ["## How far from the best, over all settings", "", _DISTANCES, *lines, ""]
    parts += ["## What this means for you", "", " ".join(meaning(settings)), ""]
    parts += ["## Where it is behind, and why", "", _BEHIND, "## How to read it", "", _READING, _MADE]
    return "\n".join(parts).rstrip() + "\n"


def page(settings: Sequence[Setting], studies: Sequence[Setting] = ()) -> str:
    """Return the page of details: the comparisons, the paper's claims, and the studies that options were chosen by."""
    if not settings:
        return _HEAD + "\nThere are no records yet.\n"
    verdicts = [_verdict(setting) for setting in settings if setting.is_about_forkmerge]
    lines = [_HEAD, "## Where ForkMerge is best, and where not", "", *verdicts, ""]
    for setting in settings:
        lines += [*_section(setting), ""]
    lines += ["## The paper's claims", "", "A claim holds where it does in every setting that tests it.", ""]
    lines += claims_table(settings)
    lines += _studies(studies)
    return "\n".join(lines).rstrip() + "\n"


def _verdict(s: Setting) -> str:
    """Say in one line how ForkMerge, in the form that validation chose, stands to the best of all others."""
    if s.chosen is None or s.rival is None:
        return f"- **{s.name}**: there is not enough to compare yet."
    found, ours, theirs = s.paired(s.chosen, s.rival), s.labels[s.chosen], s.labels[s.rival]
    if found is None:
        return f"- **{s.name}**: {ours} and {theirs} have no seed in common."
    if found.low is None or found.high is None:
        how = "ahead of" if found.mean > 0 else "not ahead of"
        words = f"{how} {theirs}, with one seed"
    elif found.low > 0:
        words = f"better than {theirs}, the best other method, beyond noise"
    elif found.high < 0:
        words = f"worse than {theirs}, the best other method, beyond noise"
    else:
        words = f"{'ahead of' if found.mean > 0 else 'behind'} {theirs}, the best other method, within noise"
    return f"- **{s.name}**: {ours} is {words}: {show_paired(found)}."


def _studies(studies: Sequence[Setting]) -> Iterator[str]:
    """Show what became of options on data held out from the training split, by which they were chosen."""
    if not studies:
        return
    yield from ("", "## How options were chosen", "", _STUDIES)
    for s in studies:
        yield from ("", f"### {s.name}", "", f"`recipes/development/{s.name}.toml`, {_size(s)}.", "")
        if s.remarks:
            yield from (s.remarks, "")
        yield from ("| method | Δ_m | difference to STL | difference to ForkMerge-aux |", "|---|---|---|---|")
        for word in sorted(s.overall, key=lambda word: -mean(s.overall[word])):
            pairs = [show_paired(s.paired(word, other)) if word != other else "" for other in ("stl", "forkmerge-aux")]
            yield f"| {s.labels[word]} | {percent(mean(s.overall[word]))} | {' | '.join(pairs)} |"


def _size(s: Setting) -> str:
    return f"{len(s.overall)} methods × {len(s.changes)} targets × {s.seeds} seeds"


def _section(s: Setting) -> Iterator[str]:
    settings = s.plan["settings"]
    yield f"## {s.name}"
    yield ""
    before = settings.get("pretrain")
    start = f", from weights pre-trained on `{before['recipe']}`" if before else ""
    labels = " All methods were trained on training ∪ validation data in the end." if s.summary.equal_labels else ""
    yield f"`{settings['recipe']}`{start}: {_size(s)}.{labels}"
    if s.remarks:
        yield from ("", s.remarks)
    yield from _headline(s)
    yield from _validation(s)
    yield from _compute(s)
    yield from _pair_table(s)
    yield from _coefficients(s)
    tables = [replace(table, notes=()) for table in tables_of(s.summary)]
    yield from ("", to_markdown(tables, "###").strip())
    notes = _notes(s)
    yield from ["", *notes] if notes else []


def _headline(s: Setting) -> Iterator[str]:
    if s.rival is None or not s.forms:
        return
    yield from ("", f"Paired difference of Δ_m to {s.labels[s.rival]}, the best of all other methods:", "")
    yield from ("| form | all targets | " + " | ".join(s.changes) + " |", "|---|---" + "|---" * len(s.changes) + "|")
    for word in s.forms:
        cells = [show_paired(s.paired(word, s.rival)), *(_target_cell(s, word, target) for target in s.changes)]
        how = "default" if s.contenders[word].base == DEFAULT else "best on validation"
        name = f"**{s.labels[word]}** ({how})" if word == s.chosen else s.labels[word]
        yield f"| {name} | " + " | ".join(cells) + " |"


def _target_cell(s: Setting, word: str, target: str) -> str:
    """The difference to the best other method on one target."""
    rival = max(s.others, key=lambda other: mean(s.changes[target][other]))
    return f"{show_paired(s.paired(word, rival, target))} ({s.labels[rival]})"


def _validation(s: Setting) -> Iterator[str]:
    """Show how much of a gain on validation is left on test data: what searching on few examples costs."""
    words = [word for word in dict.fromkeys([*s.forms, s.rival, "ew", "posttrain"]) if word in s.on_validation]
    words = [word for word in words if word in s.overall]
    if not words or "stl" not in s.on_validation:
        return
    yield from ("", "| Δ_m | on validation | on test | left |", "|---|---|---|---|")
    for word in words:
        seen, kept = mean(s.on_validation[word]), mean(s.overall[word])
        yield f"| {s.labels[word]} | {percent(seen)} | {percent(kept)} | {percent(kept - seen)} |"


def _compute(s: Setting) -> Iterator[str]:
    """Compare ForkMerge with what the compute of as many branches would have bought otherwise."""
    costs, rows = s.summary.costs, []
    for word in s.compute:
        like = [f for f in s.forms if not s.contenders[f].options and costs[f].branches == costs[word].branches]
        own = [form for form in like if word == f"{form}-uniform"] or like
        rows += [f"| {s.labels[own[0]]} | {s.labels[word]} | {show_paired(s.paired(own[0], word))} |"] if own else []
    if rows:
        yield from ("", "At equal compute:", "", "| form | minus | difference of Δ_m |", "|---|---|---|", *rows)


def _pair_table(s: Setting) -> Iterator[str]:
    """Show the transfer gains of all pairs of tasks, with equal weights and with ForkMerge."""
    if not s.pairs:
        return
    targets = list(dict.fromkeys(target for _, target in s.pairs))
    yield from ("", "One auxiliary at a time: transfer gain with equal weights → with ForkMerge, test data", "")
    yield from ("| auxiliary | " + " | ".join(targets) + " |", "|---" * (len(targets) + 1) + "|")
    for auxiliary in dict.fromkeys(name for name, _ in s.pairs):
        found = [s.pairs.get((auxiliary, target)) for target in targets]
        cells = ["" if pair is None else f"{_gain(pair.joint)} → {_gain(pair.merged)}" for pair in found]
        yield f"| {auxiliary} | " + " | ".join(cells) + " |"


def _gain(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")


def _coefficients(s: Setting) -> Iterator[str]:
    """Show the coefficients of every round, averaged over seeds, for the plain forms."""
    rows = []
    for word in s.forms:
        if s.contenders[word].options and word != s.chosen:
            continue
        for target in s.changes:
            rounds = [outcome.rounds for outcome in s.finals(word, target)]
            names = dict.fromkeys(name for each in rounds for r in each for name in r.get("coefficients", {}))
            for name in names:
                columns = zip(
                    *([r.get("coefficients", {}).get(name, 0.0) for r in each] for each in rounds), strict=False
                )
                shown = [f"{fmean(column):.2f}" for column in columns]
                rows.append((s.labels[word], target, name, " ".join(shown)))
    if not rows:
        return
    yield from ("", "Coefficients round by round, mean over seeds:", "")
    yield from ("| form | target | branch | rounds 1, 2, … |", "|---|---|---|---|")
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _notes(s: Setting) -> list[str]:
    lines = []
    for target, chosen in s.summary.settings.items():
        shown = "; ".join(
            f"{label} {', '.join(f'{k} {v}' for k, v in setting.items())}" for label, setting in chosen.items()
        )
        lines.append(f"Chosen on validation for {target}: {shown}.")
    return [*lines, *(f"Failed: {failure}." for failure in s.summary.failures)]


def run(names: Sequence[str], more: bool = False) -> int:
    """Run small recipes one after the other, each to the end or until it fails, and keep their records.

    Args:
        names: Of the recipes; development/NAME for one that options are chosen by.
        more: Whether to go on from the records there are.
    """
    worst = 0
    for name in names:
        file = (ROOT / "recipes" if name.startswith("development/") else RECIPES) / f"{name}.toml"
        if not file.is_file():
            known = ", ".join(path.stem for path in sorted(RECIPES.glob("*.toml"))) or "none"
            print(f"there is no recipe {name!r}. Known: {known}.", file=sys.stderr)
            return 2
        records = RECORDS / f"{name}.json"
        words = ["compare", str(file), "--out", str(ROOT / "runs" / "results" / name), "--records", str(records)]
        words += ["--earlier", str(records)] if more and records.is_file() else []
        worst = max(worst, subprocess.run([sys.executable, "-m", "forkmerge.cli", *words], check=False).returncode)
    return worst


def _made() -> dict[Path, str]:
    """Return what every file should hold."""
    settings, studies = read_settings(RECORDS, ADVICE), read_settings(RECORDS / "development")
    return {
        PAGE: summary_page(settings),
        DETAILS: page(settings, studies),
        MECHANISMS: page_of_mechanisms(studies),
        README: with_mixture(with_block(README.read_text("utf-8"), settings), settings),
    }


def main(words: Sequence[str]) -> int:
    """Do what the words ask for."""
    if list(words) == ["--check"]:
        stale = [path.name for path, text in _made().items() if not path.is_file() or path.read_text("utf-8") != text]
        print(
            f"{', '.join(stale)} not as the records give it: type ./run results" if stale else "as the records give it"
        )
        return 1 if stale else 0
    status = run([word for word in words if word != "--more"], "--more" in words)
    if status != 2:
        for path, text in _made().items():
            path.write_text(text, "utf-8")
        picture = figure_of_mixture(read_settings(RECORDS))
        if picture is not None:
            draw(picture, MIXTURE)
        print("written to " + ", ".join(str(path.relative_to(ROOT)) for path in (PAGE, DETAILS, MECHANISMS)))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

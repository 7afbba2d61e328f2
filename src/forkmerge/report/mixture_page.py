"""The page of a mixture of corpora: what it reached and what each corpus was worth, and the comparison behind it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

from forkmerge.algorithms.table_data import show_number
from forkmerge.errors import StoreError
from forkmerge.experiments.mix import MixtureResult, find_mix
from forkmerge.experiments.mixture_model import RECIPE
from forkmerge.experiments.run_results import read_plan
from forkmerge.experiments.text_mixture import read_corpora_facts
from forkmerge.report.comparison_page import comparison_page
from forkmerge.report.mixture_tables import corpora_table, mixture_tables
from forkmerge.report.page import Page, Section


def is_mixture(folder: Path) -> bool:
    """Whether the comparison of a folder is that of a mixture."""
    plan = read_plan(folder) if folder.is_dir() else None
    return plan is not None and plan["settings"].get("recipe") == RECIPE


def mixture_page(folder: Path) -> Page:
    """Return the page of a mixture; as long as it has no result, that of its comparison."""
    page = comparison_page(folder)
    try:
        result = find_mix(folder)
    except StoreError:
        return page
    facts = read_corpora_facts(folder)
    tables = (*mixture_tables(result), *([] if facts is None else [corpora_table(facts)]))
    text = "" if result.model is None else f"The model is in {result.model} ({result.model_is}, first seed)."
    return replace(
        page,
        title=f"Mixture {folder.resolve().name}",
        kind="mixture",
        headline=_headline(result),
        facts={"model": "not written yet" if result.model is None else str(result.model), **page.facts},
        sections=(Section("The mixture", text, tables), *page.sections),
    )


def _headline(result: MixtureResult) -> str:
    """Return what the mixture reached beside the target only, and the corpus that was worth most."""
    metric = result.metric.replace("_", " ")
    ours, alone = (show_number(fmean(result.scores[label].values())) for label in ("mixture", "target only"))
    text = f"The mixture reaches {ours} {metric} on {result.split} text, the target only {alone}; lower is better."
    best = max(result.relevance, key=lambda name: result.relevance[name].mean, default=None)
    if best is None or result.relevance[best].mean == 0:
        return f"{text} No other corpus had any weight in the merges."
    return f"{text} The corpus of most weight in the merges is {best}."

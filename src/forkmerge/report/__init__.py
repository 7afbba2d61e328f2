"""Runs, comparisons and diagnoses as pages and figures, made from what is on disk alone."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from forkmerge.engine.storage.atomic_files import check_entries, explained, write_atomically
from forkmerge.errors import ConfigError, StoreError, command, unknown_name
from forkmerge.report.figure import Axis, Figure, Heat, Panel, Series, figure_csv
from forkmerge.report.page import Page, Section, to_html
from forkmerge.report.saved_results import save_result, saved_items

__all__ = [
    "Axis",
    "Figure",
    "Heat",
    "Page",
    "Panel",
    "Section",
    "Series",
    "figure_csv",
    "page_from",
    "save_result",
    "to_html",
    "write_figure",
    "write_report",
]


def page_from(folder: str | os.PathLike[str]) -> Page:
    """Return what a folder reports, whether it is that of a run, a comparison or a diagnosis.

    Results that `save_result` kept there come last.
    """
    with explained(f"read {folder}"):
        check_entries(Path(folder))
    page = _page_of(Path(folder))
    taken, items = page.figures, []
    for item in saved_items(Path(folder)):
        if isinstance(item, Figure) and item.name in taken:
            item = replace(item, name=f"saved-{item.name}")
        items.append(item)
    return replace(page, sections=(*page.sections, Section("Analysis", "", tuple(items)))) if items else page


def _page_of(path: Path) -> Page:
    if path.is_file() or (path / "plan.json").is_file():
        from forkmerge.report.comparison_page import comparison_page
        from forkmerge.report.mixture_page import is_mixture, mixture_page

        return mixture_page(path) if is_mixture(path) else comparison_page(path)
    if (path / "diagnosis_plan.json").is_file():
        from forkmerge.analysis.diagnosis.diagnosis import read_diagnosis
        from forkmerge.report.diagnosis_page import diagnosis_page

        diagnosis = read_diagnosis(path)
        if diagnosis is None:
            raise StoreError(f"the diagnosis in {path} has not ended: type the same command again to continue it.")
        return diagnosis_page(diagnosis, path)
    if (path / "config.json").is_file():
        from forkmerge.algorithms.saved_run import read_saved_run
        from forkmerge.report.run_page import run_page

        return run_page(read_saved_run(path))
    raise StoreError(
        f"{path} holds no run, comparison or diagnosis: give the folder of one, or a comparison's file of records. "
        f"`{command('runs')}` lists runs."
    )


def write_report(folder: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the page of a folder and return where; `report.html` in the folder, unless `out` says otherwise."""
    source = Path(folder)
    path = Path(out) if out else source.with_suffix(".html") if source.is_file() else source / "report.html"
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out {path}: a page is an HTML file, such as report.html; for another form give --figure.")
    text = to_html(page_from(folder))
    _make_place(path)
    write_atomically(path, text.encode("utf-8", "backslashreplace"))
    return path


def write_figure(folder: str | os.PathLike[str], name: str, out: str | os.PathLike[str]) -> Path:
    """Write one figure of a folder as PDF, SVG or PNG, for a paper."""
    from forkmerge.report.matplotlib_figure import draw

    figures = page_from(folder).figures
    if name not in figures:
        raise ConfigError("--figure: " + unknown_name("figure of this folder", name, figures))
    path = Path(out)
    _make_place(path)
    with explained(f"write {path}"):
        draw(figures[name], path)
    return path


def _make_place(path: Path) -> None:
    with explained(f"make the folder {path.parent}"):
        path.parent.mkdir(parents=True, exist_ok=True)

"""The commands `forkmerge runs` and `forkmerge show`, and what `forkmerge export` does."""

from __future__ import annotations

from pathlib import Path

from forkmerge.algorithms.export import PlainTorch, export_run
from forkmerge.algorithms.saved_run import SavedRun, list_saved_runs, read_saved_run
from forkmerge.cli.print_run import runs_table, show_run, show_saved_run
from forkmerge.cli.terminal import print_json, say, stderr, stdout
from forkmerge.engine.storage.json_files import interpreting
from forkmerge.errors import StoreError, command

WHOLE = "as it was written: what its files hold does not fit together"
"""What a folder is not, whose files are each of the right form."""


def list_runs(folder: Path, *, as_json: bool) -> None:
    """List the runs below a folder."""
    if not folder.is_dir() and folder != Path("runs"):
        raise StoreError(f"{folder} is not a folder.")
    rows = list_saved_runs(folder)
    if as_json:
        print_json(rows)
    elif rows:
        stdout().print(runs_table(rows))
    else:
        say(stdout(), f"no runs in {folder}: start one with `{command('run PROBLEM')}`.")


def show_run_folder(folder: Path, *, as_json: bool) -> None:
    """Show the run of a folder; the checkpoints of an interrupted one are verified."""
    with interpreting(folder, WHOLE):
        print_saved_run(read_saved_run(folder, verify=True), as_json=as_json)


def print_saved_run(saved: SavedRun, *, as_json: bool) -> None:
    """Print a run, finished or not."""
    show_warnings(saved)
    if as_json:
        print_json({**saved.to_row(), "run": None if saved.run is None else saved.run.to_json()})
    elif saved.run is not None:
        show_run(stdout(), saved.run)
    else:
        show_saved_run(stdout(), saved)


def show_warnings(saved: SavedRun) -> None:
    """Say what is wrong with the folder of a run."""
    for warning in saved.warnings:
        say(stderr(), f"warning: {warning}", style="yellow")


def export_run_folder(
    folder: Path, out: Path, *, form: PlainTorch | None = None, typed: str | None = None, as_json: bool
) -> None:
    """Write the model of a folder's run, with its card; `typed` made the run, where its own record does not say."""
    with interpreting(folder, WHOLE):
        export_run(folder, out, form, typed)
    files = [str(path) for path in sorted(out.iterdir())]
    print_json({"files": files}) if as_json else say(stdout(), "\n".join(files))

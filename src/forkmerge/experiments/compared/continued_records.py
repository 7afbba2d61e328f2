"""Going on from a file of records where the folder of a comparison is gone, as on another machine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from forkmerge.engine.storage.json_codec import as_read
from forkmerge.engine.storage.lock import locked_folder
from forkmerge.errors import StoreError
from forkmerge.experiments.compared.run_folders import run_folder
from forkmerge.experiments.comparison import Comparison
from forkmerge.experiments.results_file import read_comparison
from forkmerge.experiments.run_results import PLAN, check_same_settings, read_plan, write_plan


def restore_comparison(comparison: Comparison, out: str | os.PathLike[str], file: str | os.PathLike[str]) -> int:
    """Write the results of a file of records into the folder of a comparison, which then need not be made again.

    Runs that failed are left out, so that they are tried again. Of the others there are numbers, and no models.

    Args:
        comparison: What will be compared, with the settings of the file.
        out: The comparison's folder; one that has begun already has its results.
        file: The file of records.

    Returns:
        How many results were taken.
    """
    folder, new = Path(out), as_read(comparison.to_json())
    if read_plan(folder) is not None:
        raise StoreError(f"{folder} has results of its own: leave out the earlier records to continue it.")
    plan, results = read_comparison(file)
    check_same_settings(plan, new, file)
    taken: list[Any] = [each for each in results if each.error is None]
    with locked_folder(folder, PLAN):
        for each in taken:
            tuned = each.kind == "tuning" and comparison.equal_labels
            problem = comparison.recipe.problem
            own = run_folder(problem, each.method, each.target, each.seed, each.setting, searches=tuned)
            target = folder / own
            target.parent.mkdir(parents=True, exist_ok=True)
            replace(each, folder=own).write(folder)
        write_plan(folder, plan)
    return len(taken)

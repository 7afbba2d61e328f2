"""Where the runs of a comparison lie in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forkmerge.engine.storage.atomic_files import safe_name
from forkmerge.problem.definition import Problem


def run_folder(
    problem: Problem, word: str, target: str, seed: int, setting: Mapping[str, Any], *, searches: bool = False
) -> str:
    """Return the folder of a run, relative to the comparison's: TARGET/METHOD-seed0.

    Args:
        problem: What is learned.
        word: The method's word.
        target: The run's target.
        seed: The run's seed.
        setting: What tuning tries or has chosen.
        searches: Whether it is tuned on training data alone, unlike the run of that setting that is reported.
    """
    shown = "".join(f",{key}={value}" for key, value in setting.items())
    name = safe_name(f"{word}{shown}-seed{seed}") + "-search" * searches
    return f"{_target_folder(problem, target)}/{name}"


def _target_folder(problem: Problem, target: str) -> str:
    """A target's folder; names that some file systems take for the same one get a checksum."""
    name = safe_name(target)
    alike = [task for task in problem.tasks if safe_name(task).casefold() == name.casefold()]
    return name if len(alike) == 1 else safe_name(f"{target}:{problem.tasks.index(target)}")

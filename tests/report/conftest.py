"""What tests of reports share."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkmerge.experiments.comparison import plan_comparison, run_comparison


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison that has ended: three methods, two targets, two seeds, one tuned."""
    folder = tmp_path_factory.mktemp("report") / "comparison"
    plan = plan_comparison(
        "compare_problem:recipe", methods="ew,forkmerge", targets="all", seeds=2, tune={"interval": [2, 3]}
    )
    run_comparison(plan, folder)
    return folder

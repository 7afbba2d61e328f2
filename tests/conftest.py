"""What holds for the whole suite: one thread per process, the same Hypothesis examples, no skips but listed ones."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

import forkmerge as fm

# Hooks of pytest, which looks for them here.
from skips import (  # noqa: F401
    pytest_collectreport,
    pytest_runtest_logreport,
    pytest_sessionfinish,
    pytest_terminal_summary,
)

# Sums depend on the number of threads, and two pytest workers already use two cores.
torch.set_num_threads(1)

# Derandomised, so that a failure is the commit's and not the day's; no deadline, as a busy machine is slow.
settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")


@pytest.fixture(scope="session")
def on_ray() -> Iterator[fm.Ray]:
    """Two workers on a Ray cluster of this machine, started once: all tests share its processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))  # instead of one that Ray would keep in the home folder
        patch.delenv("RAY_ADDRESS", raising=False)
        options = fm.Ray(workers=2, address="local")
        with options.connected():
            yield options


@pytest.fixture(autouse=True, scope="session")
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The secret by which runs show who started them is the suite's own, also in the processes it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield

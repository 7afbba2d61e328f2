"""What holds for the whole suite: one thread per process, the same Hypothesis examples, no skips but listed ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

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


@pytest.fixture(autouse=True, scope="session")
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The secret by which runs show who started them is the suite's own, also in the processes it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield

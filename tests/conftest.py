"""What holds for the whole suite: one thread per process, and the same Hypothesis examples on every run."""

from __future__ import annotations

import torch
from hypothesis import settings

# Sums depend on the number of threads, and two pytest workers already use two cores.
torch.set_num_threads(1)

# Derandomised, so that a failure is the commit's and not the day's; no deadline, as a busy machine is slow.
settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")

"""Ranks of torchrun, which does not always come up on a busy machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from paths import ROOT, TESTS


def torchrun(program: Path, arguments: Sequence[str], came_up: Callable[[str], bool], tries: int = 3) -> str:
    """Run a program on two ranks and return what it printed.

    Args:
        program: The program.
        arguments: Its arguments.
        came_up: Whether, by what was printed, the ranks had met: what fails afterwards has failed, and is not tried
            again.
        tries: How often it may fail to come up.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(ROOT / "src"), str(TESTS)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    for attempt in range(1, tries + 1):
        try:
            done = subprocess.run(
                [sys.executable, *launch, str(program), *arguments],
                env=environment,
                capture_output=True,
                text=True,
                timeout=300,
            )
            output = done.stdout + done.stderr
            if done.returncode == 0:
                return done.stdout
        except subprocess.TimeoutExpired as error:
            output = f"{error}: {error.stdout!r} {error.stderr!r}"
        assert not came_up(output), f"two ranks came up and failed, attempt {attempt}:\n{output[-6000:]}"
    pytest.fail(f"torchrun did not come up in {tries} attempts:\n{output[-6000:]}")

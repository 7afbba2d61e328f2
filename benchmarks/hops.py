"""Through how many files a step, a merge and a checkpoint lead, and how often from one into another.

    ./run bench hops

A hop is a call, seen by `sys.setprofile`, of a function of the package whose file differs from that of the call before
it. Measured in the second round of a run of two branches, where nothing is done for the first time but the search.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from harness import parse, save
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import forkmerge as fm

PACKAGE = Path(fm.__file__).parent
GOALS = {"step": (12, None), "merge": (18, 200), "checkpoint": (None, None)}
"""The most files and hops that each should cross."""


@dataclass
class Window:
    """The calls inside the first call of one function.

    Args:
        file: The file of the function, relative to the package.
        function: Its name.
        nth: Which of its calls is looked at.
    """

    file: str
    function: str
    nth: int = 1
    calls: list[str] = field(default_factory=list)
    _frame: FrameType | None = None
    _count: int = 0

    def see(self, frame: FrameType, event: str, file: str) -> None:
        """Take in a call or a return of a function of the package."""
        if self._frame is None and event == "call" and (file, frame.f_code.co_name) == (self.file, self.function):
            self._count += 1
            if self._count == self.nth:
                self._frame = frame
        if self._frame is not None and self._count == self.nth:
            if event == "call":
                self.calls.append(file)
            elif frame is self._frame:
                self._count += 1  # it is over
        elif event == "return" and frame is self._frame:
            self._frame = None

    @property
    def files(self) -> list[str]:
        """The files crossed, in the order of their first call."""
        return list(dict.fromkeys(self.calls))

    @property
    def hops(self) -> int:
        """Calls whose file differs from that of the call before."""
        return sum(one != other for one, other in zip(self.calls, self.calls[1:], strict=False))


def count(windows: Sequence[Window], run: Any) -> None:
    """Run a function and let every window see its calls."""
    root = f"{PACKAGE}/"

    def profile(frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event in ("call", "return") and path.startswith(root) and frame.f_code.co_name not in _ANONYMOUS:
            for window in windows:
                window.see(frame, event, path.removeprefix(root))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)


_ANONYMOUS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")  # parts of a function, whatever Python makes of them

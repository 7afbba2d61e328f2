"""Through how many files a step, a merge and a checkpoint lead, and how often from one file into another.

    ./run bench hops

A hop is a call of one of the package's functions, seen by `sys.setprofile`, whose file differs from that of the call
before it. Counted in a run of two branches: its first merge, from the trained branches to the weights they go on with;
the same with the record that is made of it; a step of its second round; the checkpoint after its first merge.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from harness import begin, parser, save
from page import Goal, Section, Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import forkmerge as fm

ROOT = f"{Path(fm.__file__).parent}/"
GOALS = {"merge": (19, 230), "step": (12, None)}
"""The most files and hops."""


@dataclass
class Window:
    """What is called between the beginning and the end of one call.

    Args:
        file: The file of the function that is called, within the package.
        function: Its name.
        nth: Which of its calls is looked at.
    """

    file: str
    function: str
    nth: int = 1
    calls: list[str] = field(default_factory=list)
    frame: FrameType | None = None
    seen: int = 0

    def see(self, frame: FrameType, event: str, file: str) -> None:
        """Take in a call or a return."""
        if event == "call" and (file, frame.f_code.co_name) == (self.file, self.function):
            self.seen += 1
            if self.seen == self.nth:
                self.frame = frame
        if self.frame is not None and event == "call":
            self.calls.append(file)
        if event == "return" and frame is self.frame:
            self.frame = None

    def result(self) -> dict[str, Any]:
        """Return the files in the order of their first call, and the hops between them."""
        hops = sum(one != other for one, other in zip(self.calls, self.calls[1:], strict=False))
        return {"files": list(dict.fromkeys(self.calls)), "hops": hops, "calls": len(self.calls)}


WINDOWS = {
    "merge": ("algorithms/end_of_round.py", "search", 1),
    "merge and its record": ("algorithms/rounds.py", "_merge", 1),
    "step": ("engine/training/step_loop.py", "_step", 12),
    "checkpoint": ("algorithms/rounds.py", "_save", 2),
}


class Net(nn.Module):
    """A shared layer and a head per task."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 8)
        self.heads = nn.ModuleDict({task: nn.Linear(8, 3) for task in ("target", "auxiliary")})


def losses(model: Any, batch: Any, tasks: Sequence[str], context: fm.Context) -> Mapping[str, Tensor]:
    features = torch.relu(model.body(batch[0]))
    return {task: cross_entropy(model.heads[task](features), batch[1]) for task in tasks}


def predict(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return model.heads["target"](torch.relu(model.body(batch[0]))), batch[1]


def problem() -> fm.Problem:
    """Return two tasks that share a stream, with an accuracy to search by."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(96, 5, generator=draw)
    labels = (inputs @ torch.randn(5, 3, generator=draw)).argmax(1)
    stream = fm.Stream(TensorDataset(inputs[:32], labels[:32]), losses, ("target", "auxiliary"), 8)
    validation = fm.Evaluation(TensorDataset(inputs[32:], labels[32:]), fm.accuracy, predict)
    return fm.Problem("target", {"all": stream}, validation)


def count(run: Callable[[], object]) -> dict[str, dict[str, Any]]:
    """Run a function and return what every window saw."""
    windows = {name: Window(*place) for name, place in WINDOWS.items()}

    def profile(frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event in ("call", "return") and path.startswith(ROOT):
            for window in windows.values():
                window.see(frame, event, path.removeprefix(ROOT))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return {name: window.result() for name, window in windows.items()}


def count_run() -> dict[str, dict[str, Any]]:
    """Count a run of two branches with a folder."""
    optimizer, algorithm = fm.OptimizerOf("SGD", lr=0.1), fm.ForkMerge("mixed", interval=4)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"steps": 8, "threads": 1, "folder": Path(folder) / "run"}
        return count(lambda: algorithm.fit(problem(), model=Net, optimizer=optimizer, **options))


def main() -> None:
    options = begin(parser(__doc__))
    save("hops", count_run(), options.out)


def section(results: Mapping[str, Any]) -> Section:
    """Say what the results mean."""
    rows = [[name, str(len(seen["files"])), str(seen["hops"]), str(seen["calls"])] for name, seen in results.items()]
    goals = []
    for name, (files, hops) in GOALS.items():
        goals.append(Goal(f"{name}: files", files, len(results[name]["files"]), digits=0))
        if hops is not None:
            goals.append(Goal(f"{name}: hops", hops, results[name]["hops"], digits=0))
    return Section(
        "The way through the files",
        "How many files a step, a merge and a checkpoint enter, and how often a call leads from one file into another.",
        [Table(["what", "files", "hops", "calls"], rows)],
        goals,
        ["Which files they are: see [the architecture](architecture.md)."],
    )


if __name__ == "__main__":
    main()

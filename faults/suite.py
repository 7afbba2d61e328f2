"""One run, undisturbed, and a folder for those that are disturbed; what came of each is judged by its bits."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from processes import End, RunProcess
from ray_nodes import RayNodes

STARTING_SECONDS = 3.0  # in which imports, checks and first weights lie


@dataclass(frozen=True)
class Try:
    """One fault, and what came of it.

    Args:
        fault: What was done.
        executor: Where branches ran.
        survived: Whether it ended with the right bits or, where files were damaged, with one error that says so.
        same_bits: Whether it ended with the bits of the undisturbed run.
        message: What was said.
    """

    fault: str
    executor: str
    survived: bool
    same_bits: bool
    message: str = ""


class Suite:
    """What an undisturbed run gives, and a folder for the others.

    Args:
        folder: Where runs are made.
        expected: The checksum of the undisturbed run.
        events: How many events it tells, by executor.
        kilobytes: What its folder takes on a file system of pages of 4 kB.
        seed: Of all random moments.
        share: Of the tries of a full run, to try the suite itself.
        nodes: The Ray cluster, where it is used.
    """

    def __init__(
        self,
        folder: Path,
        expected: str,
        events: dict[str, int],
        *,
        kilobytes: int = 0,
        seed: int = 0,
        share: float = 1.0,
        nodes: RayNodes | None = None,
    ) -> None:
        self.folder, self.expected, self.events, self.kilobytes = folder, expected, events, kilobytes
        self.seed, self.share, self.nodes = seed, share, nodes
        self._count = 0

    @classmethod
    def start(
        cls, folder: Path, seed: int, share: float, executors: Sequence[str], nodes: RayNodes | None = None
    ) -> Suite:
        """Make the undisturbed run, once by every executor."""
        ends = {}
        for name in executors:
            (folder / name).mkdir()
            ends[name] = RunProcess(folder / name / "run", name, nodes.address if name == "ray" and nodes else "").end()
        checksums = {end.checksum for end in ends.values()}
        if len(checksums) != 1 or "" in checksums:
            raise SystemExit(f"the undisturbed runs do not agree: {ends}")
        files = [path for path in (folder / "serial" / "run").rglob("*") if path.is_file()]
        kilobytes = sum(4 * -(-path.stat().st_size // 4096) for path in files)
        events = {name: end.events for name, end in ends.items()}
        return cls(folder, checksums.pop(), events, kilobytes=kilobytes, seed=seed, share=share, nodes=nodes)

    def new_folder(self) -> Path:
        self._count += 1
        folder = self.folder / str(self._count) / "run"
        folder.parent.mkdir()
        return folder

    def at_random_moment(self, draw: random.Random, executor: str) -> tuple[RunProcess, Path]:
        """Return a run that is at a random moment: starting, or between two events, if the machine is fast enough."""
        folder = self.new_folder()
        process = self.run(folder, executor)
        events = draw.randint(0, self.events[executor] - 1)
        process.wait_for_events(events)
        time.sleep(draw.uniform(0, 0.03 if events else STARTING_SECONDS))
        return process, folder

    def run(self, folder: Path, executor: str) -> RunProcess:
        """Start the run, or its resume; on Ray with all nodes, and once no other driver has workers there."""
        if executor == "ray":
            self.cluster.restore()
            self.cluster.wait_until_free()
        return RunProcess(folder, executor, self.address(executor))

    @property
    def cluster(self) -> RayNodes:
        """The Ray cluster."""
        assert self.nodes is not None
        return self.nodes

    def address(self, executor: str) -> str:
        """Return where runs of an executor join a cluster, if they do."""
        return self.cluster.address if executor == "ray" else ""

    def workers(self, process: RunProcess, executor: str) -> list[int]:
        """Return the ids of a run's worker processes."""
        return self.cluster.workers() if executor == "ray" else process.workers()

    def draws(self, fault: str, tries: int) -> Iterator[random.Random]:
        """Yield a source of random numbers for every try, the same in every run of the suite."""
        for index in range(max(1, round(tries * self.share))):
            yield random.Random(f"{self.seed} {fault} {index}")

    def judged(self, fault: str, executor: str, end: End, problem: str = "", *, may_refuse: bool = False) -> Try:
        """Return what came of a fault: the right bits or, where files were damaged, an error that says so."""
        is_same = end.checksum == self.expected
        if end.checksum and not is_same:
            problem = "it ended with other bits"
        survived = not problem and (is_same or (may_refuse and end.is_refusal))
        return Try(fault, executor, survived, is_same, problem or end.message)

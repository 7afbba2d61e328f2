"""Processes of the disturbed run: started, watched event by event, and ended in every way that there is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from disturbed_run import ENDED, EVENT, REFUSED

HERE = Path(__file__).parent
WORKERS = {"serial": 1, "processes": 2, "ray": 2}
"""Where branches run, and how many at the same time."""
LONGEST = 600.0  # seconds that one process may take before it counts as one that hangs


@dataclass(frozen=True)
class End:
    """How a process ended.

    Args:
        checksum: Of its result; empty where there is none.
        message: The library's error, or what else it said last.
        is_refusal: Whether it ended with an error of the library, in one line.
        events: Events that it told.
    """

    checksum: str
    message: str
    is_refusal: bool
    events: int


def environment() -> dict[str, str]:
    """Return the environment of runs, with what a cluster that was started meanwhile needs."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent / "src")}


class RunProcess:
    """One process of the disturbed run.

    Args:
        folder: Of the run.
        executor: Where branches run.
        address: Of the Ray cluster, if there.
    """

    def __init__(self, folder: Path, executor: str, address: str = "") -> None:
        command = [sys.executable, str(HERE / "disturbed_run.py"), str(folder), str(WORKERS[executor]), address]
        self._log = folder.parent / f"{folder.name}-{time.monotonic_ns()}.log"
        with self._log.open("wb") as log:
            # A file, since nobody may read a pipe while the suite waits.
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment())

    @property
    def id(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def wait_for_events(self, count: int) -> bool:
        """Wait until so many events were told; False if the process ended before."""
        ends = time.monotonic() + LONGEST
        while time.monotonic() < ends:
            if self._lines().count(EVENT) >= count:
                return True
            if self._process.poll() is not None:
                return False
            time.sleep(0.002)
        return False

    def workers(self) -> list[int]:
        """Return the ids of its worker processes."""
        ids = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (facts := facts_of(entry)) is not None:
                parent, command = facts
                if parent == self._process.pid and "resource_tracker" not in command:
                    ids.append(int(entry.name))
        return sorted(ids)

    def kill(self) -> bool:
        """End the process at once, as a lack of memory or a power cut does; False if it had ended by itself."""
        self._process.kill()
        return self._process.wait() == -signal.SIGKILL

    def end(self) -> End:
        """Wait for the process and return how it ended; one that hangs is ended and told."""
        try:
            self._process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            self.kill()
            return End("", f"it did not end in {LONGEST:.0f} s", is_refusal=False, events=0)
        lines = self._lines()
        events = lines.count(EVENT)
        last = next((line for line in reversed(lines) if line.split(" ")[0] in (ENDED, REFUSED)), "")
        if last.startswith(ENDED):
            return End(last.split(" ", 1)[1], "", is_refusal=False, events=events)
        if last:
            return End("", last.split(" ", 1)[1], is_refusal=True, events=events)
        tail = " | ".join(lines[-3:])
        return End("", f"it ended with {self._process.returncode}: {tail}", is_refusal=False, events=events)

    def _lines(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines()


def is_alive(process_id: int) -> bool:
    """Whether a process still runs; one that has ended and that nobody has asked for does not."""
    facts = facts_of(Path(f"/proc/{process_id}"))
    return facts is not None


def wait_until_gone(process_ids: list[int], seconds: float = 20.0) -> list[int]:
    """Return those that still run after so long."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and any(map(is_alive, process_ids)):
        time.sleep(0.05)
    return [each for each in process_ids if is_alive(each)]


def send(process_id: int, number: signal.Signals) -> bool:
    """Send a signal; False if the process has ended."""
    try:
        os.kill(process_id, number)
    except ProcessLookupError:
        return False
    return True


def facts_of(entry: Path) -> tuple[int, str] | None:
    """Return the parent and the command of a process in /proc; None if it has ended."""
    try:
        state = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        return None if state[0] == "Z" else (int(state[1]), (entry / "cmdline").read_text())
    except (OSError, IndexError):
        return None

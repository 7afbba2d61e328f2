"""The faults: each is tried on the same run, which must end with its bits, or refuse files that were damaged."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from disturbed_run import ENDED, REFUSED, train
from processes import ENVIRONMENT, HERE, End, RunProcess, send, wait_until_gone

import forkmerge as fm

EXECUTORS = {"serial": 1, "processes": 2}
STOPPED_SECONDS = 60.0


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
    ) -> None:
        self.folder, self.expected, self.events, self.kilobytes = folder, expected, events, kilobytes
        self.seed, self.share = seed, share
        self._count = 0

    @classmethod
    def start(cls, folder: Path, seed: int, share: float) -> Suite:
        """Make the undisturbed run, once by every executor."""
        ends = {}
        for name, workers in EXECUTORS.items():
            (folder / name).mkdir()
            ends[name] = RunProcess(folder / name / "run", workers).end()
        checksums = {end.checksum for end in ends.values()}
        if len(checksums) != 1 or "" in checksums:
            raise SystemExit(f"the undisturbed runs do not agree: {ends}")
        files = [path for path in (folder / "serial" / "run").rglob("*") if path.is_file()]
        kilobytes = sum(4 * -(-path.stat().st_size // 4096) for path in files)
        events = {name: end.events for name, end in ends.items()}
        return cls(folder, checksums.pop(), events, kilobytes=kilobytes, seed=seed, share=share)

    def new_folder(self) -> Path:
        self._count += 1
        folder = self.folder / str(self._count) / "run"
        folder.parent.mkdir()
        return folder

    def at_random_moment(self, draw: random.Random, executor: str) -> tuple[RunProcess, Path]:
        """Return a run that is at a random moment: between two events, as far as the machine is fast enough."""
        folder = self.new_folder()
        process = RunProcess(folder, EXECUTORS[executor])
        process.wait_for_events(draw.randint(1, self.events[executor] - 1))
        time.sleep(draw.uniform(0, 0.03))
        return process, folder

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


def kill_driver(suite: Suite, executor: str, tries: int) -> Iterator[Try]:
    """SIGKILL at a random moment, then a resume; workers must end by themselves."""
    fault, workers = "driver killed", EXECUTORS[executor]
    for draw in suite.draws(f"{fault} {executor}", tries):
        is_hit = False
        while not is_hit:  # a run that ends before the kill comes is none that was killed
            process, folder = suite.at_random_moment(draw, executor)
            children = process.workers()
            is_hit = process.kill()
        left = wait_until_gone(children)
        yield suite.judged(
            fault, executor, RunProcess(folder, workers).end(), f"workers {left} live on" if left else ""
        )


def kill_worker(suite: Suite, executor: str, tries: int) -> Iterator[Try]:
    """SIGKILL of one worker at a random moment: the run goes on by itself, or its resume does."""
    fault, workers = "worker killed", EXECUTORS[executor]
    for draw in suite.draws(f"{fault} {executor}", tries):
        is_hit = False
        while not is_hit:
            process, folder = suite.at_random_moment(draw, executor)
            children = process.workers()
            is_hit = bool(children) and send(draw.choice(children), signal.SIGKILL)
            end = process.end()
        if end.is_refusal:
            again = RunProcess(folder, workers).end()
            end = End(again.checksum, end.message, again.is_refusal, end.events)
        yield suite.judged(fault, executor, end)


def stop_worker(suite: Suite, executor: str, tries: int) -> Iterator[Try]:
    """SIGSTOP of a worker, or of the process itself where there is none, for a minute."""
    fault = f"stopped for {STOPPED_SECONDS:.0f} s"
    for draw in suite.draws(f"{fault} {executor}", tries):
        process, _ = suite.at_random_moment(draw, executor)
        children = process.workers()
        stopped = draw.choice(children) if children else process.id
        send(stopped, signal.SIGSTOP)
        time.sleep(STOPPED_SECONDS)
        send(stopped, signal.SIGCONT)
        yield suite.judged(fault, executor, process.end())


def remove_folder(suite: Suite, executor: str, tries: int) -> Iterator[Try]:
    """The run's folder is removed under it; then the run is started anew."""
    fault, workers = "folder removed", EXECUTORS[executor]
    for draw in suite.draws(f"{fault} {executor}", tries):
        folder = suite.new_folder()
        process = RunProcess(folder, workers)
        process.wait_for_events(draw.randint(1, suite.events[executor] - 2))
        shutil.rmtree(folder, ignore_errors=True)
        first = process.end()
        shutil.rmtree(folder, ignore_errors=True)
        again = RunProcess(folder, workers).end()
        is_fine = first.is_refusal or first.checksum == suite.expected
        problem = "" if is_fine else first.message or "it ended with other bits"
        end = End(again.checksum, first.message or again.message, again.is_refusal, again.events)
        yield suite.judged(fault, executor, end, problem)


def resume_twice(suite: Suite, executor: str, tries: int) -> Iterator[Try]:
    """Two resumes of an interrupted run at once: one goes on, the other is refused or finds it finished."""
    fault, workers = "two resumes at once", EXECUTORS[executor]
    for draw in suite.draws(f"{fault} {executor}", tries):
        folder = suite.new_folder()
        process = RunProcess(folder, workers)
        process.wait_for_events(draw.randint(1, suite.events[executor] // 2))
        process.kill()
        both = [RunProcess(folder, workers) for _ in range(2)]
        ends = [each.end() for each in both]
        refused = [end for end in ends if end.is_refusal and end.message.startswith("StoreError")]
        done = [end for end in ends if end.checksum]
        message = refused[0].message if refused else "both ended, one after the other"
        problem = "" if done and len(done) + len(refused) == 2 else f"{[end.message for end in ends]}"
        if any(end.checksum != suite.expected for end in done):
            problem = "one ended with other bits"
        checksum = done[0].checksum if done else ""
        yield suite.judged(fault, executor, End(checksum, message, is_refusal=False, events=0), problem)


def fill_disk(suite: Suite, executor: str, tries: int) -> Iterator[Try]:
    """A disk of a random size that is too small; then it gets room, and the run is resumed.

    A file system in memory, in a name space of its own (`unshare`), which needs no other rights on most systems.
    """
    fault, workers = "disk full", EXECUTORS[executor]
    script = (
        'mount -t tmpfs -o size="$1"k tmpfs "$2" && "$3" "$4" "$2/run" "$5"; echo "code $?"; '
        'mount -o remount,size=64m "$2" && "$3" "$4" "$2/run" "$5"'
    )
    for draw in suite.draws(f"{fault} {executor}", tries):
        folder = suite.new_folder()
        folder.mkdir()
        size = draw.randint(4, suite.kilobytes * 3 // 4)
        words = [str(size), str(folder), sys.executable, str(HERE / "disturbed_run.py"), str(workers)]
        command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", *words]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines()
        messages = [line.split(" ", 1)[1] for line in lines if line.startswith(REFUSED)]
        results = [line.split(" ", 1)[1] for line in lines if line.startswith(ENDED)]
        message = next((each for each in messages if "No space left" in each), "")
        problem = "" if message else f"no error named the disk: {messages} {(done.stderr or done.stdout)[-300:]}"
        yield suite.judged(fault, executor, End(results[-1] if results else "", message, False, 0), problem)


def damage_files(suite: Suite, executor: str, tries: int) -> Iterator[Try]:
    """Every file of an interrupted and of a finished run, truncated or with a flipped bit, then resumed."""
    for state in ("interrupted", "finished"):
        original = suite.new_folder()
        process = RunProcess(original, EXECUTORS[executor])
        if state == "interrupted":
            process.wait_for_events(suite.events[executor] // 2)
            process.kill()
        else:
            process.end()
        for path in sorted(path.relative_to(original) for path in original.rglob("*") if path.is_file()):
            for damage, change in DAMAGES.items():
                fault = f"{damage}, {state} run"
                for draw in suite.draws(f"{fault} {path}", tries):
                    folder = suite.new_folder()
                    shutil.copytree(original, folder)
                    data = bytearray((folder / path).read_bytes())
                    if data:
                        (folder / path).write_bytes(change(data, draw))
                        yield _resumed(suite, fault, executor, folder)


def _truncated(data: bytearray, draw: random.Random) -> bytes:
    return bytes(data[: draw.randrange(len(data))])


def _flipped(data: bytearray, draw: random.Random) -> bytes:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


DAMAGES: dict[str, Callable[[bytearray, random.Random], bytes]] = {
    "file truncated": _truncated,
    "bit flipped": _flipped,
}


def _resumed(suite: Suite, fault: str, executor: str, folder: Path) -> Try:
    """Resume in this process: nothing is killed here, and starting one takes longer than the run."""
    problem = ""
    end = End("", "", is_refusal=False, events=0)
    try:
        end = End(train(folder, 1), "", is_refusal=False, events=0)
    except fm.StoreError as error:
        end = End("", f"{type(error).__name__}: {error}", is_refusal=True, events=0)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    return suite.judged(fault, executor, end, problem, may_refuse=True)


PLAN: list[tuple[Callable[[Suite, str, int], Iterator[Try]], str, int]] = [
    (kill_driver, "serial", 20),
    (kill_driver, "processes", 20),
    (kill_worker, "processes", 20),
    (stop_worker, "serial", 1),
    (stop_worker, "processes", 2),
    (fill_disk, "serial", 5),
    (fill_disk, "processes", 5),
    (remove_folder, "serial", 4),
    (remove_folder, "processes", 4),
    (resume_twice, "serial", 3),
    (resume_twice, "processes", 3),
    (damage_files, "serial", 4),
]
"""Faults, where they are tried, and how often; `damage_files` so often in every file."""


def all_tries(seed: int, share: float, names: list[str]) -> Iterator[Try]:
    """Try every fault, or those named."""
    with tempfile.TemporaryDirectory(prefix="forkmerge-faults-") as folder:
        suite = Suite.start(Path(folder), seed, share)
        for function, executor, tries in PLAN:
            if not names or function.__name__ in names:
                yield from function(suite, executor, tries)

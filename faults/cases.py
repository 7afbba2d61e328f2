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
from pathlib import Path

from disturbed_run import ENDED, REFUSED, train
from processes import HERE, WORKERS, End, RunProcess, environment, send, wait_until_gone
from ray_nodes import RayNodes
from suite import Suite, Try

import forkmerge as fm

STOPPED_SECONDS = 60.0


def kill_driver(suite: Suite, executor: str, tries: int) -> Iterator[Try]:
    """SIGKILL at a random moment, then a resume; workers must end by themselves."""
    fault = "driver killed"
    for draw in suite.draws(f"{fault} {executor}", tries):
        is_hit = False
        while not is_hit:  # a run that ends before the kill comes is none that was killed
            process, folder = suite.at_random_moment(draw, executor)
            children = suite.workers(process, executor)
            is_hit = process.kill()
        left = wait_until_gone(children)
        yield suite.judged(
            fault, executor, suite.run(folder, executor).end(), f"workers {left} live on" if left else ""
        )


def kill_worker(suite: Suite, executor: str, tries: int) -> Iterator[Try]:
    """SIGKILL of one worker at a random moment: the run goes on by itself, or its resume does."""
    fault = "worker killed"
    for draw in suite.draws(f"{fault} {executor}", tries):
        is_hit = False
        while not is_hit:
            process, folder = suite.at_random_moment(draw, executor)
            children = suite.workers(process, executor)
            is_hit = bool(children) and send(draw.choice(children), signal.SIGKILL)
            end = process.end()
        yield suite.judged(fault, executor, _resumed_if_refused(suite, executor, folder, end))


def kill_node(suite: Suite, executor: str, tries: int) -> Iterator[Try]:
    """SIGKILL of all processes of a node at a random moment: the run goes on with what is left, or its resume does."""
    fault = "node killed"
    suite.cluster.keep_states_on_nodes()
    for draw in suite.draws(f"{fault} {executor}", tries):
        is_hit = False
        while not is_hit:
            process, folder = suite.at_random_moment(draw, executor)
            is_hit = suite.cluster.kill_node(draw)
            suite.cluster.restore()
            end = process.end()
        yield suite.judged(fault, executor, _resumed_if_refused(suite, executor, folder, end))


def _resumed_if_refused(suite: Suite, executor: str, folder: Path, end: End) -> End:
    """Return how a run ended or, if it gave up with an error, how its resume did."""
    if not end.is_refusal:
        return end
    again = suite.run(folder, executor).end()
    return End(again.checksum, end.message, again.is_refusal, end.events)


def stop_worker(suite: Suite, executor: str, tries: int) -> Iterator[Try]:
    """SIGSTOP of a worker, or of the process itself where there is none, for a minute."""
    fault = f"stopped for {STOPPED_SECONDS:.0f} s"
    for draw in suite.draws(f"{fault} {executor}", tries):
        is_hit = False
        while not is_hit:
            process, _ = suite.at_random_moment(draw, executor)
            candidates = [process.id] if executor == "serial" else suite.workers(process, executor)
            stopped = draw.choice(candidates) if candidates else None
            is_hit = stopped is not None and process.is_running and send(stopped, signal.SIGSTOP)
        time.sleep(STOPPED_SECONDS)
        send(stopped, signal.SIGCONT)
        yield suite.judged(fault, executor, process.end())


def remove_folder(suite: Suite, executor: str, tries: int) -> Iterator[Try]:
    """The run's folder is removed under it; then the run is started anew."""
    fault = "folder removed"
    for draw in suite.draws(f"{fault} {executor}", tries):
        is_hit = False
        while not is_hit:
            folder = suite.new_folder()
            process = suite.run(folder, executor)
            process.wait_for_events(draw.randint(1, suite.events[executor] - 2))
            is_hit = process.is_running
            shutil.rmtree(folder, ignore_errors=True)
            first = process.end()
        shutil.rmtree(folder, ignore_errors=True)
        again = suite.run(folder, executor).end()
        is_fine = first.is_refusal or first.checksum == suite.expected
        problem = "" if is_fine else first.message or "it ended with other bits"
        end = End(again.checksum, first.message or again.message, again.is_refusal, again.events)
        yield suite.judged(fault, executor, end, problem)


def resume_twice(suite: Suite, executor: str, tries: int) -> Iterator[Try]:
    """Two resumes of an interrupted run at once: one goes on, the other is refused or finds it finished."""
    fault = "two resumes at once"
    for draw in suite.draws(f"{fault} {executor}", tries):
        folder = suite.new_folder()
        process = suite.run(folder, executor)
        process.wait_for_events(draw.randint(1, suite.events[executor] // 2))
        process.kill()
        first = suite.run(folder, executor)
        both = [first, RunProcess(folder, executor, suite.address(executor))]
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
    """A disk of a random size that is too small; then it gets room, and the run is resumed or begun.

    A file system in memory, in a name space of its own (`unshare`), which needs no other rights on most systems.
    """
    fault = "disk full"
    script = (
        'mount -t tmpfs -o size="$1"k tmpfs "$2" && "$3" "$4" "$2/run" "$5" "$6"; echo "code $?"; '
        'mount -o remount,size=64m "$2" && "$3" "$4" "$2/run" "$5" "$6"'
    )
    for draw in suite.draws(f"{fault} {executor}", tries):
        folder = suite.new_folder()
        folder.mkdir()
        size = draw.randint(4, suite.kilobytes * 3 // 4)
        words = [str(size), str(folder), sys.executable, str(HERE / "disturbed_run.py"), str(WORKERS[executor])]
        words.append(suite.address(executor))
        command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", *words]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines()
        messages = [line.split(" ", 1)[1] for line in lines if line.startswith(REFUSED)]
        results = [line.split(" ", 1)[1] for line in lines if line.startswith(ENDED)]
        message = disk_message(messages)
        problem = "" if message else f"no error named the disk: {messages} {(done.stderr or done.stdout)[-300:]}"
        yield suite.judged(fault, executor, End(results[-1] if results else "", message, False, 0), problem)


def disk_message(messages: list[str]) -> str:
    """Return the error that names the disk: that it is full or, before anything is written, too small; "" for none."""
    return next((each for each in messages if "No space left" in each or "are free there" in each), "")


def damage_files(suite: Suite, executor: str, tries: int) -> Iterator[Try]:
    """Every file of an interrupted and of a finished run, truncated or with a flipped bit, then resumed."""
    for state in ("interrupted", "finished"):
        original = suite.new_folder()
        process = suite.run(original, executor)
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
    (kill_driver, "ray", 6),
    (kill_worker, "ray", 6),
    (stop_worker, "ray", 1),
    (fill_disk, "ray", 1),
    (remove_folder, "ray", 1),
    (resume_twice, "ray", 1),
    (kill_node, "ray", 5),  # the last there, since it changes the cluster
]
"""Faults, where they are tried, and how often; `damage_files` so often in every file."""


def all_tries(seed: int, share: float, names: list[str], executors: list[str]) -> Iterator[Try]:
    """Try every fault everywhere, or those named, there where it is asked for."""
    plan = [each for each in PLAN if (not names or each[0].__name__ in names) and each[1] in executors]
    needed = [name for name in WORKERS if name == "serial" or any(executor == name for _, executor, _ in plan)]
    nodes = RayNodes() if "ray" in needed else None
    try:
        with tempfile.TemporaryDirectory(prefix="forkmerge-faults-") as folder:
            suite = Suite.start(Path(folder), seed, share, needed, nodes)
            for function, executor, tries in plan:
                yield from function(suite, executor, tries)
    finally:
        if nodes is not None:
            nodes.close()

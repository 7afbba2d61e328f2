"""docs/reliability.md, made of the results of the fault suite."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_HEAD = """# Reliability

What the fault suite did to a run, and what came of it. `./run faults` repeats it in at most 40 minutes and writes this
page; `./run faults --share 0.1` only tries it. The run is small, and has in it all that a checkpoint holds: three
branches, snapshots, a floor, a refit. Moments are random and seeded.

*Survived*: the run, or its resume, ended with the bits of an undisturbed run; where files were damaged, it may also end
with one error that names them. *Same bits*: model, coefficients, scores and candidates have the sha256 of the
undisturbed run. Anything else, a traceback, a hang or other bits, is a failure.

"""
_COLUMNS = ("fault", "branches run", "tries", "survived", "same bits", "message, where there was one")
_FAULTS = """
## What the faults are

- **driver killed**: SIGKILL while the run starts or between two events, then a resume. Workers must end by themselves;
  those that live on count as a failure.
- **worker killed**: SIGKILL of a random worker. The segment is trained again by another one; the run is not resumed
  unless it gave up.
- **node killed**: SIGKILL of all processes of a simulated node of a Ray cluster, and with them of a worker and of the
  states that were there; a new node comes up. The run goes on by itself, and is resumed only if it gave up.
- **stopped for 60 s**: SIGSTOP, and SIGCONT a minute later, of a worker, or of the process itself where there is none.
- **disk full**: the folder is on a file system of a random size below what it needs, which is noticed before training
  or by a write. Then it gets room, and the run is begun or resumed.
- **folder removed**: while the run goes on. It must end with an error, or with the right result in memory; then the
  run is started anew.
- **two resumes at once** of an interrupted run: one goes on, the other is refused, or finds it finished.
- **file truncated**, **bit flipped**: in every file of an interrupted and of a finished run, at random places, one file
  at a time; then the run is resumed.
"""


def render(results: Mapping[str, Any]) -> str:
    """Return the page of saved results."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---|---|---:|---:|---:|---|"]
    rows: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for each in results["tries"]:
        rows.setdefault((each["fault"], each["executor"]), []).append(each)
    for (fault, executor), tries in rows.items():
        counts = [len(tries), sum(each["survived"] for each in tries), sum(each["same_bits"] for each in tries)]
        lines.append(f"| {fault} | {executor} | {' | '.join(map(str, counts))} | {_message(tries)} |")
    facts = results["facts"]
    made = f"Seed {results['seed']}, {facts['minutes']:.0f} minutes on {facts['cores']} cores; {facts['versions']}.\n"
    kills = sum(each["fault"].endswith("killed") for each in results["tries"])
    total = f"{len(results['tries'])} tries, {kills} of them kills. {made}"
    not_run = "\nNot tried here: a power cut, a network file system, " + facts["not_run"] + ".\n"
    return _HEAD + "\n".join(lines) + "\n\n" + total + not_run + _FAULTS


def _message(tries: Iterable[Mapping[str, Any]]) -> str:
    """Return the message that a row's tries had most often, failures first, without what differs from run to run."""
    failed = [each["message"] for each in tries if not each["survived"]]
    said = [general(message) for message in failed or [each["message"] for each in tries] if message]
    if not said:
        return ""
    common = max(dict.fromkeys(said), key=said.count)
    text = common if len(common) <= 160 else f"{common[:157]}…"
    others = len(set(said)) - 1
    return ("**failed:** " if failed else "") + text.replace("|", "\\|") + (f" (and {others} others)" if others else "")


def general(message: str) -> str:
    """Return a message without the paths, numbers and checksums of one run."""
    message = re.sub(r"/\S*?/run\b(/run\b)?", "RUN", message)
    message = re.sub(r"[0-9a-f]{16,}", "…", message)
    return re.sub(r"\b\d{8}\b", "N", message)

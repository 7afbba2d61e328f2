"""What all benchmarks share: their options, interleaved timing, and the JSON a result becomes.

Every contender runs in turn, round after round, so that a busy machine hurts all alike. Absolute times mean nothing
across machines; what is reported is each contender's ratio to the baseline of the same round: median and quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
RESULTS, QUICK = HERE / "results", HERE / "quick"
BUSY = 0.25  # cores at work for others: above, times are more noise than signal

_started = time.perf_counter()
_load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None


@dataclass(frozen=True)
class Ratio:
    """A contender's time over the baseline's: quartiles over rounds, and its own median time."""

    median: float
    low: float
    high: float
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.median:5.2f} ({self.low:.2f}–{self.high:.2f})"


def quartiles(values: Sequence[float], seconds: float | None = None) -> Ratio:
    """Return median and quartiles of some ratios, or of any other numbers."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else list(values) * 3
    return Ratio(median, low, high, seconds)


def interleave(
    contenders: Mapping[str, Callable[[], None]], baseline: str, *, rounds: int, warm_up: int = 1
) -> dict[str, Ratio]:
    """Time every contender once per round and return its ratios to the baseline of the same round."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(warm_up + rounds):
        for name, run in contenders.items():
            started = time.perf_counter()
            run()
            if turn >= warm_up:
                times[name].append(time.perf_counter() - started)
    return {
        name: quartiles(
            [value / base for value, base in zip(values, times[baseline], strict=True)], statistics.median(values)
        )
        for name, values in times.items()
    }


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options every benchmark has."""
    result = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--quick", action="store_true", help="a small version, saved where it overwrites nothing")
    result.add_argument("--out", type=Path, help="folder of the JSON (default: results, or quick with --quick)")
    return result


def begin(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options, warn if the machine is busy, and go on with one thread."""
    options = parser.parse_args(argv)
    options.out = options.out or (QUICK if options.quick else RESULTS)
    torch.set_num_threads(1)
    warn_if_busy()
    return options


def warn_if_busy() -> None:
    """Say on stderr that others are using the machine."""
    busy = busy_cores()
    if busy is not None and busy > BUSY:
        print(f"the machine is busy ({busy:.1f} cores at work): what follows is noise.", file=sys.stderr)


def busy_cores(seconds: float = 0.5) -> float | None:
    """Return how many cores were at work while this process slept; None where the system does not say.

    The load average remembers the last minutes, this process's own included; this does not.
    """
    try:
        first = _cpu_ticks()
        time.sleep(seconds)
        idle, total = (after - before for after, before in zip(_cpu_ticks(), first, strict=True))
    except (OSError, ValueError):
        return None
    return (1 - idle / total) * (os.cpu_count() or 1) if total else None


def _cpu_ticks() -> tuple[int, int]:
    ticks = [int(word) for word in Path("/proc/stat").read_text("ascii").splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)  # idle and waiting for the disk; all


def machine() -> dict[str, Any]:
    """Facts a reader needs to judge the numbers; the load is that of the moment this process started."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": None if _load is None else round(_load, 2),
    }


def command() -> str:
    """Return what to type to get this result again, without machine paths."""
    words, given = [], iter(sys.argv[1:])
    for word in given:
        if word == "--out":
            next(given, None)
        elif not word.startswith("--out="):
            words.append(word)
    return " ".join(["./run bench", Path(sys.argv[0]).stem, *words])


def read_results(name: str, folder: Path) -> dict[str, Any]:
    """Return the results of an earlier run, so that some of them can be measured again; empty without one."""
    path = folder / f"{name}.json"
    return dict(json.loads(path.read_text("utf-8"))["results"]) if path.exists() else {}


def save(name: str, results: Mapping[str, Any], folder: Path) -> Path:
    """Write results as JSON beside the machine's facts and the command that made them."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"

    def plain(value: Any) -> Any:
        return asdict(value) if isinstance(value, Ratio) else str(value)

    whole = {
        "command": command(),
        "seconds": round(time.perf_counter() - _started, 1),
        "machine": machine(),
        "results": results,
    }
    path.write_text(json.dumps(whole, default=plain, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return path

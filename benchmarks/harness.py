"""Interleaved timing: every contender runs in turn, round after round, so that a busy machine hurts all alike.

Absolute times mean nothing across machines; what is reported is each contender's ratio to the baseline of the same
round: median and quartiles.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Ratio:
    """A contender's time over the baseline's: quartiles over rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:5.2f} ({self.low:.2f}–{self.high:.2f})"


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
    ratios = {}
    for name, values in times.items():
        shares = sorted(value / base for value, base in zip(values, times[baseline], strict=True))
        low, median, high = statistics.quantiles(shares, n=4) if len(shares) > 1 else shares * 3
        ratios[name] = Ratio(median, low, high)
    return ratios


def machine() -> dict[str, Any]:
    """Facts a reader needs to judge the numbers."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def save(name: str, results: Mapping[str, Any], folder: Path) -> Path:
    """Write results as JSON beside the machine's facts."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"

    def plain(value: Any) -> Any:
        return asdict(value) if isinstance(value, Ratio) else str(value)

    path.write_text(json.dumps({"machine": machine(), "results": results}, default=plain, indent=1) + "\n", "utf-8")
    return path

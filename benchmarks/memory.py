"""Peak memory of a whole ForkMerge run in model sizes, each case in a fresh process.

    ./run bench memory [--repeats 3]

Resident memory at its highest, above what the process holds after all imports and a whole small run, default
policies, checkpoints included. The network is a full ResNet-18 (11.2M parameters) at two 8×8 images a step, so that
activations are about a hundredth of the model; nothing is subtracted for them.
"""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from harness import begin, parser, quartiles, save
from nets import Case, resnet
from page import Goal, Section, Table, show
from rich.progress import track

import forkmerge as fm
from forkmerge.algorithms.events import CheckpointWritten, Event

OPTIMIZERS = {
    "SGD": (1, fm.OptimizerOf("SGD", lr=1e-3, momentum=0.9)),
    "AdamW": (2, fm.OptimizerOf("AdamW", lr=1e-3)),
}
"""How many tensors of a parameter's shape the optimizer keeps for it (s), and the optimizer."""

STEPS, INTERVAL = 4, 2
MODES = {
    "run": "a run with checkpoints",
    "resume": "the same, resumed after its first merge",
    "memory": "a run without a folder",
}


def case_of(branches: int, width: int) -> Case:
    """Two 8×8 images a step: the smallest that leaves BatchNorm two values of a channel."""
    images = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return Case("memory", lambda: resnet(width), [8 * width], images, max(branches, 2), batch=2)


def train(branches: int, optimizer: str, width: int, folder: Path | None, *, stop: bool = False) -> int:
    """Fit, or stop after the first merge, and return the size of the model in bytes."""
    case = case_of(branches, width)
    target, *others = case.tasks
    mixtures = {"alone": {target: 1.0}, **{task: {target: 1.0, task: 1.0} for task in others}}
    model = case.model()
    size = sum(parameter.nbytes for parameter in model.parameters())

    def observe(event: Event) -> None:
        if stop and isinstance(event, CheckpointWritten) and event.step == INTERVAL:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        fm.ForkMerge(mixtures, interval=INTERVAL).fit(
            case.problem(),
            model=model,
            optimizer=OPTIMIZERS[optimizer][1],
            steps=STEPS,
            folder=folder,
            resume=folder is not None,
            on_event=observe,
            progress=False,
            threads=1,
        )
    return size


def measure(branches: int, optimizer: str, mode: str, width: int, folder: Path) -> dict[str, float]:
    """Measure one case in this process."""
    place = None if mode == "memory" else folder / "run"
    if mode == "stop":
        train(branches, optimizer, width, place, stop=True)
        return {}
    train(2, optimizer, 8, None if place is None else folder / "warm-up")
    gc.collect()
    before = start_peak()
    size = train(branches, optimizer, width, place)
    return {"peak": (peak() - before) / size, "model": size}


def start_peak() -> int:
    """Forget the highest memory so far, where the system can, and return what is resident now."""
    try:
        Path("/proc/self/clear_refs").write_text("5", "ascii")
        return _status("VmRSS")
    except OSError:
        return peak()  # then only what exceeds the warm-up counts, which is small beside the model


def peak() -> int:
    """Return the highest resident memory, in bytes."""
    try:
        return _status("VmHWM")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def in_fresh_process(branches: int, optimizer: str, mode: str, width: int) -> float:
    """Measure one case in a process of its own; a resumed run is started in another."""
    with tempfile.TemporaryDirectory() as folder:
        answer: dict[str, float] = {}
        for part in ["stop", "resume"] if mode == "resume" else [mode]:
            words = [str(branches), optimizer, part, str(width), folder]
            done = subprocess.run([sys.executable, __file__, "--case", *words], check=True, stdout=subprocess.PIPE)
            answer = json.loads(done.stdout)
        return answer["peak"]


def section(results: Mapping[str, Any]) -> Section:
    """Say what the results mean."""
    rows, goals = [], []
    for case in results["cases"]:
        found, name = case["peak"], f"B={case['branches']}, {case['optimizer']}"
        bound = case["branches"] * (1 + case["s"]) + 2
        cells = f"{found['median']:.2f}", f"{case['worst']:.2f}"
        rows.append([f"{name}: {MODES[case['mode']]}", str(bound), *cells])
        if case["mode"] == "run":
            goals.append(Goal(f"{name}, the worst of {results['repeats']}", bound, case["worst"], unit=" P"))
    return Section(
        "Memory",
        "Peak resident memory of a whole run, in model sizes P, beside B(1+s)+2: one row of weights and s of optimizer "
        "state for each of B branches, one of gradients and one for the merge.",
        [Table(["case", "B(1+s)+2", "median", "worst"], rows)],
        goals,
        [
            f"{results['model'] / 4e6:.1f}M float32 parameters; each case in a fresh process, above what it holds "
            "after imports and a small run. With a folder, the last merge lies in a file while branches train; without "
            "one it stays in memory. Temporaries of the optimizer and of convolutions are included: `AdamW` needs two "
            "tensors of the largest layer's size, 0.4 P here."
        ],
        [("How much memory does a run take, in model sizes?", _sizes(results["cases"]))],
    )


def _sizes(cases: Sequence[Mapping[str, Any]]) -> str:
    """Say what runs with checkpoints hold, by optimizer."""
    runs = [case for case in cases if case["mode"] == "run"]
    parts = []
    for optimizer in dict.fromkeys(case["optimizer"] for case in runs):
        mine = [f"B={case['branches']} {case['worst']:.1f}" for case in runs if case["optimizer"] == optimizer]
        parts.append(f"{optimizer}: {', '.join(mine)}")
    return f"{'; '.join(parts)}, activations apart"


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int)
    arguments.add_argument("--case", nargs=5, metavar=("B", "OPTIMIZER", "MODE", "WIDTH", "FOLDER"), help="for itself")
    known = arguments.parse_args(argv)
    if known.case:
        torch.set_num_threads(1)
        branches, optimizer, mode, width, folder = known.case
        print(json.dumps(measure(int(branches), optimizer, mode, int(width), Path(folder))))
        return
    options = begin(arguments, argv)
    repeats, width = options.repeats or (1 if options.quick else 3), 16 if options.quick else 64
    plan = [(b, o, "run") for o in OPTIMIZERS for b in ((2,) if options.quick else (2, 3, 6))]
    plan += [] if options.quick else [(3, o, mode) for o in OPTIMIZERS for mode in ("resume", "memory")]
    cases = []
    for branches, optimizer, mode in track(plan, description="memory"):
        found = [in_fresh_process(branches, optimizer, mode, width) for _ in range(repeats)]
        case = {"branches": branches, "optimizer": optimizer, "s": OPTIMIZERS[optimizer][0], "mode": mode}
        cases.append({**case, "peak": quartiles(found), "worst": max(found)})
    size = sum(parameter.nbytes for parameter in case_of(3, width).model().parameters())
    save("memory", {"repeats": repeats, "model": size, "cases": cases}, options.out)
    show("memory", options.out)


if __name__ == "__main__":
    main()

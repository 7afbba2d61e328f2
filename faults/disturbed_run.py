"""The run that the fault suite disturbs: small, with everything in it that a checkpoint has to hold.

    python faults/disturbed_run.py FOLDER WORKERS [ADDRESS OF A RAY CLUSTER]

It goes on where the folder ends, prints a line at every event, and at the end a checksum of all that must be the same.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

import forkmerge as fm
from forkmerge.testing.small_training import SmallNet, small_problem

EVENT, ENDED, REFUSED = "event", "ended", "refused"
_NOT_BITS = ("seconds", "environment", "settings", "trained_steps", "verdict", "notes")


def make_net() -> SmallNet:
    return SmallNet()


def do_nothing(event: object) -> None:
    """Watch no event."""


def train(folder: Path, workers: int = 1, on_event: Any = do_nothing, address: str = "") -> str:
    """Run, or go on, and return the checksum of model, coefficients, scores and candidates."""
    algorithm = fm.ForkMerge(
        "per_auxiliary", interval=6, checkpoint="best_so_far", validate_every=2, select="best", refit=True, floor=True
    )
    run = algorithm.fit(
        small_problem(own_inputs=True),
        model=make_net,
        optimizer=fm.OptimizerOf("Adam", lr=0.01),
        steps=32,
        checkpoint_every=2,
        seed=3,
        threads=1,
        **({"executor": fm.Ray(workers=workers, address=address)} if address else {"workers": workers}),
        folder=folder,
        resume=True,
        progress=False,
        on_event=on_event,
    )
    return checksum(run)


def checksum(run: fm.Run) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(run.model.state_dict().items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    facts = {key: value for key, value in run.to_json().items() if key not in _NOT_BITS}
    for finished in facts["rounds"]:
        finished.pop("seconds", None)
    digest.update(json.dumps(facts, sort_keys=True).encode())
    return digest.hexdigest()


def main(folder: str, workers: str, address: str = "") -> int:
    torch.set_num_threads(1)
    try:
        result = train(Path(folder), int(workers), lambda event: print(EVENT, flush=True), address)
    except fm.ForkMergeError as error:
        print(REFUSED, f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)
        return 2
    print(ENDED, result, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))

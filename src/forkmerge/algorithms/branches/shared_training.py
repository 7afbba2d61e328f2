"""What several runs train alike until their first merge, trained once: the same branches from the same weights.

Until its first merge, a branch does not depend on the others, nor on who the target is, unless an option says so. Runs
that differ in the target, the search or other branches have the same bits there, so that a run may take what another
one has trained, and records it as if it had trained it itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch

from forkmerge.algorithms.branches.tail import RoundSteps
from forkmerge.algorithms.checkpoint import Phase, RunState
from forkmerge.engine.executors.branch_worker import TrainingJob
from forkmerge.engine.storage.json_codec import encode, plain
from forkmerge.engine.storage.shared_store import SharedStore
from forkmerge.engine.training.branch import BranchResult, join_results
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.options import Mixture
from forkmerge.engine.training.state import State

_DATA = [item.name for item in fields(BranchResult) if item.name != "state"]


class SharedTraining:
    """The first steps of a run's branches, taken from another run, or left to others.

    Args:
        states: Where they are kept.
        job: What is trained, and how.
        config: The resolved config of the run.
        facts: What its bits depend on besides.
    """

    def __init__(
        self, states: SharedStore, job: TrainingJob, config: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> None:
        self.states, self.job = states, job
        parts = {"training": config["training"], "model": config["model"], "streams": config["problem"]["streams"]}
        self._common = {**parts, "weights": config["problem"]["weights"], "facts": dict(facts)}
        self._results: dict[str, BranchResult] = {}
        self._keys: dict[str, str] = {}

    def take(self, run: RunState, steps: RoundSteps, binding: ModelBinding, add: Callable[[int, Any], None]) -> None:
        """Let branches of a run that has not begun take what another one has trained.

        Args:
            run: Where the run stands.
            steps: The steps of its first round.
            binding: Places states on their devices.
            add: Called with the position of a branch and the result of its training.
        """
        self._results, self._keys = {}, {}
        if run.phase is not Phase.SEARCH or run.step != 0 or run.rounds:
            return
        first = _checksum(run.merged)
        for index, mixture in enumerate(run.mixtures):
            key = self._key(mixture, first, steps.tail)
            if key is None:
                continue
            value = self.states.get(key)
            if value is None:
                self._keys[mixture.name] = key
                continue
            state = binding.place(State.from_value(value["state"]))
            add(index, BranchResult(state, **value["result"]))

    def note(self, name: str, result: BranchResult) -> None:
        """Note what a segment of a branch gave."""
        if name in self._keys:
            before = self._results.get(name)
            self._results[name] = result if before is None else join_results([before, result])

    def leave(self, run: RunState, mark: int) -> None:
        """Leave to others what was trained from the first step to this one, where they may want it."""
        for mixture, state in zip(run.mixtures, run.branches, strict=True):
            result = self._results.get(mixture.name)
            if result is not None and result.steps == state.step == mark:
                data = {name: getattr(result, name) for name in _DATA}
                self.states.put(self._keys.pop(mixture.name), {"state": state.to_value(), "result": data})
        self._results = {}

    def _key(self, mixture: Mixture, first: str, steps: int) -> str | None:
        """Return a checksum of all that the state of a branch after its first steps is a function of; None of a method.

        What a method, which combines tasks, does depends on the target, so nobody else would have it.
        """
        problem, training = self.job.problem, self.job.training
        tasks = mixture.active(problem.tasks)
        if training.method is not None and len(tasks) > 1:
            return None
        follows_target = training.statistics == "target" or mixture.auxiliary_streams == "one"
        # Steps that are shared out are drawn in the order of the tasks, which begins with the target.
        order = tasks if problem.weights == "sampling" else sorted(tasks)
        about = {
            **self._common,
            "target": problem.target if follows_target else None,
            "name": None if training.paired else mixture.name,
            "task_weights": [[task, float(mixture.task_weights[task])] for task in order],
            "mixture": [mixture.lr_scale, mixture.auxiliary_streams],
            "first": first,
            "steps": steps,
        }
        return hashlib.sha256(encode(plain(about))).hexdigest()


def _checksum(state: State) -> str:
    digest = hashlib.sha256()
    for name, tensor in (*state.rows.items(), *state.buffers.items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

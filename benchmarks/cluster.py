"""What a round costs besides training: own processes, Ray on one node, and Ray between two simulated nodes, in turn.

    ./run bench cluster [--sizes 1,10] [--rounds 9]

Two branches on two workers, Adam, `optimizer_state="keep"`. A round trains every branch for two steps, gives all the
same weights, and writes a checkpoint. What is reported is the wall time of training and of the checkpoint, less the
steps themselves, per branch and segment. Each contender is a process of its own that waits for its turn.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import begin, parser, quartiles, read_results, save
from nets import Case
from page import Goal, Section, Table, ratio
from torch import nn

import forkmerge as fm
from forkmerge.engine.executors.branch_execution import BranchExecution, open_branches
from forkmerge.engine.executors.branch_worker import Segment, TrainingJob
from forkmerge.engine.executors.executor import Executor
from forkmerge.engine.executors.serial import local_executor
from forkmerge.engine.merging.synchronise import synchronise
from forkmerge.engine.storage.run_folder import RunFolder

BRANCHES = WORKERS = 2
STEPS = 2
PROCESSES, ONE_NODE, TWO_NODES = "own processes", "Ray, one node", "Ray, two nodes"
BOUNDS = {ONE_NODE: 4.0, TWO_NODES: 6.0}
GOAL_SIZE = "10"  # millions of parameters
SHARE = 0.05  # of training, that the overhead should stay under
_MARK = "turn "


def case(parameters: float) -> Case:
    """Two wide layers, whose steps cost little for their size."""
    width = round(math.sqrt(parameters / 2))
    inputs = torch.randn(16, width, generator=torch.Generator().manual_seed(0))
    return Case("wide", partial(layers, width), [width], inputs, 2, 2)


def layers(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


class Contender:
    """Rounds of two branches on an executor, each timed."""

    def __init__(self, execution: BranchExecution, tasks: Sequence[str], store: RunFolder) -> None:
        self.execution, self.store, self.saves = execution, store, 0
        weights = [dict.fromkeys(tasks, 1.0) | {tasks[1]: 0.5 * index} for index in range(BRANCHES)]
        self.segments = [Segment("search", fm.Mixture(f"branch{k}", each), STEPS) for k, each in enumerate(weights)]
        initial = execution.binding.initial()
        self.states, self.merged = [initial.clone() for _ in weights], initial

    def turn(self) -> dict[str, float]:
        """Do a round and return its seconds: of calls and states, and of the checkpoint."""
        self.saves += 1
        started = time.perf_counter()
        results = list(self.execution.train(self.segments, self.states, f"round {self.saves}"))
        trained = time.perf_counter()
        self.states = [result.state for result in results]
        self.merged.take_weights(self.states[0])
        synchronise(self.states, self.merged, (1.0, 0.0), "keep")
        merged = time.perf_counter()
        branches = [{**state.to_value(), "rows": {}} for state in self.states]
        self.store.save({"merged": self.merged.to_value(), "branches": branches}, self.saves)
        ended = time.perf_counter()
        # The branches train at the same time, so that the longest is what all of them took.
        steps = max(result.seconds for result in results)
        return {"segments": (trained - started - steps) / BRANCHES, "checkpoint": (ended - merged) / BRANCHES}


def contend(name: str, parameters: float, address: str) -> None:
    """Do a round whenever a line is read."""
    torch.set_num_threads(1)
    wide = case(parameters)
    training = fm.Training(fm.OptimizerOf("Adam", lr=1e-3))
    job = TrainingJob(wide.problem().sealed(), wide.model(), training, 0, 1)
    executor: Executor = local_executor(WORKERS) if name == PROCESSES else fm.Ray(WORKERS, address=address).open()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        store = stack.enter_context(RunFolder.create(Path(folder) / "run", {}))
        stack.enter_context(executor)
        contender = Contender(stack.enter_context(open_branches(job, executor)), wide.tasks, store)
        for _ in sys.stdin:
            print(_MARK + json.dumps(contender.turn()), flush=True)


class Opponent:
    """A contender as this process sees it."""

    def __init__(self, name: str, parameters: float, address: str) -> None:
        words = [sys.executable, __file__, "--contend", name, "--parameters", str(parameters), "--address", address]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def turn(self) -> dict[str, float]:
        """Let it do a round."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return dict(json.loads(line.removeprefix(_MARK)))
        raise SystemExit(f"a contender ended with {self._process.wait()}")

    def close(self) -> None:
        """Let it end."""
        self._process.communicate()


@contextmanager
def clusters() -> Iterator[dict[str, str]]:
    """Yield the addresses of a cluster of one node, and of one whose two workers are on other nodes than the driver."""
    os.environ.update(RAY_AUTH_TOKEN=secrets.token_hex(16), RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")
    os.environ.pop("RAY_ADDRESS", None)
    from ray.cluster_utils import Cluster

    common = {"object_store_memory": 2 << 30}
    with ExitStack() as stack:
        addresses = {}
        for name, on_head in ((ONE_NODE, WORKERS), (TWO_NODES, 0)):
            head = {"num_cpus": on_head, "include_dashboard": False, **common}
            cluster = Cluster(initialize_head=True, connect=False, head_node_args=head)
            stack.callback(cluster.shutdown)
            for _ in range(0 if on_head else WORKERS):
                cluster.add_node(num_cpus=1, **common)
            addresses[name] = str(cluster.address)
        yield addresses


def time_size(parameters: float, rounds: int, addresses: Mapping[str, str]) -> dict[str, Any]:
    """Let the contenders take turns; ratios are to own processes in the same turn."""
    opponents = {name: Opponent(name, parameters, addresses.get(name, "")) for name in (PROCESSES, *addresses)}
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in opponents}
    try:
        for number in range(2 + rounds):  # the first are for starting, and for memory that is new
            for name, opponent in opponents.items():
                seconds = opponent.turn()
                if number >= 2:
                    turns[name].append(seconds)
    finally:
        for opponent in opponents.values():
            opponent.close()
    totals = {name: [sum(each.values()) for each in found] for name, found in turns.items()}
    results: dict[str, Any] = {}
    for name, found in turns.items():
        ratios = [own / base for own, base in zip(totals[name], totals[PROCESSES], strict=True)]
        parts = {part: quartiles([each[part] for each in found]) for part in ("segments", "checkpoint")}
        results[name] = {"ratio": quartiles(ratios), "seconds": quartiles(totals[name]), **parts}
        print(
            f"{parameters / 1e6:g}M {name:16} {results[name]['ratio']} times {PROCESSES}, {results[name]['seconds']} s"
        )
    return results


def section(results: Mapping[str, Any]) -> Section:
    """Say what the results mean."""
    costs, least, goals = [], [], []
    for size, found in results.items():
        for name, seen in found.items():
            parts = [f"{1000 * seen[part]['median']:.0f}" for part in ("segments", "checkpoint")]
            costs.append([f"{size}M, {name}", *parts, ratio(seen["ratio"])])
            if name in BOUNDS and size == GOAL_SIZE:
                goals.append(Goal(f"{size}M parameters: {name}", BOUNDS[name], seen["ratio"]["median"], unit="×"))
        seconds = [f"{_least(seen):.1f} s" for seen in found.values()]
        least.append([f"{size}M", *seconds])
    what = f"Seconds of training per interval Δt, from which a round of two branches costs less than {SHARE:.0%} of it:"
    return Section(
        "What a cluster costs",
        "A round of two branches with Adam on two workers, less the steps themselves, per branch and segment: own "
        "processes, Ray on one node, and Ray with a driver and two workers on three simulated nodes of this machine.",
        [
            Table(["parameters, workers", "segment, ms", "checkpoint, ms", f"of {PROCESSES}"], costs),
            Table(["parameters", PROCESSES, ONE_NODE, TWO_NODES], least, what),
        ],
        goals,
        [
            "A segment's part is to bring the weights to workers and back; the checkpoint's, to fetch the optimizer's "
            "rows and to write all of it. Nodes of one machine share its memory and disk, and have no "
            "network between them: seconds on a real cluster are others."
        ],
        [("From which Δt on is a cluster worth it?", _answer(results))] if GOAL_SIZE in results else [],
    )


def _least(seen: Mapping[str, Any]) -> float:
    return BRANCHES * float(seen["seconds"]["median"]) / SHARE


def _answer(results: Mapping[str, Any]) -> str:
    seen = results[GOAL_SIZE]
    times = [f"{_least(seen[name]):.0f} s ({name})" for name in (PROCESSES, ONE_NODE, TWO_NODES) if name in seen]
    return f"with {GOAL_SIZE}M parameters, overhead is under {SHARE:.0%} where Δt trains for {', '.join(times)}"


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--sizes", help="millions of parameters (default: 1,10)")
    arguments.add_argument("--rounds", type=int)
    arguments.add_argument("--contend", help="be this contender, for another process")
    arguments.add_argument("--parameters", type=float)
    arguments.add_argument("--address", default="")
    options = arguments.parse_args(argv)
    if options.contend:
        contend(options.contend, options.parameters, options.address)
        return
    options = begin(arguments, argv)
    sizes = (options.sizes or ("0.1" if options.quick else f"1,{GOAL_SIZE}")).split(",")
    results = {} if options.quick else read_results("cluster", options.out)
    with clusters() as addresses:
        for size in sizes:
            rounds = options.rounds or (2 if options.quick else 9)
            results[size] = time_size(float(size) * 1e6, rounds, addresses)
            save("cluster", results, options.out)


if __name__ == "__main__":
    main()

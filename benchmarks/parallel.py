"""What two cores give: one worker process per core against one process, with one thread and with two.

    ./run bench parallel [--rounds 7] [--cases conv,mlp] [--branches 3,4]

What is not asked for keeps the results it has.

Worker processes live as long as a run, so a round is timed in processes that have started; what starting takes is
given beside it. Seeds of a comparison are timed with it, because every comparison starts its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from harness import begin, interleave, parser, read_results, save
from nets import Case, conv_case, mlp_case
from page import Goal, Section, Table
from torch import Tensor
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.engine.executors.branch_execution import BranchExecution, open_branches
from forkmerge.engine.executors.branch_worker import Segment, TrainingJob
from forkmerge.engine.executors.executor import Tell
from forkmerge.engine.executors.parallel_calls import run_calls, using_threads
from forkmerge.engine.executors.serial import local_executor
from forkmerge.engine.merging.measure_candidate import MeasureRequest

CASES: dict[str, tuple[Callable[[int], Case], int, int]] = {
    "conv": (conv_case, 30, 1024),
    "mlp": (mlp_case, 400, 16384),
}
"""Networks, steps per round, and examples of a validation pass."""
BRANCHES = (2, 3, 4)
ONE, TWO, THREADS = "one worker", "two workers", "one worker, two threads"
OPTIMIZER = fm.OptimizerOf("AdamW", lr=1e-3)
BOUNDS = {"conv": {2: 1.8, 3: 1.7, 4: 1.8}, "mlp": {2: 1.6, 3: 1.6, 4: 1.6}}


def segments(case: Case, branches: int, steps: int) -> list[Segment]:
    """Branches that train the same tasks with different weights."""
    weights = [dict.fromkeys(case.tasks, 1.0) | {case.tasks[1]: 0.5 + 0.1 * b} for b in range(branches)]
    return [Segment("search", fm.Mixture(f"branch{b}", w), steps) for b, w in enumerate(weights)]


def errors(predictions: Tensor, targets: Tensor) -> float:
    """The largest error of a class: a score that does not add up over examples."""
    wrong = predictions.argmax(1) != targets
    return -max(wrong[targets == label].double().mean().item() for label in targets.unique())


def job(case: Case, threads: int, examples: int) -> TrainingJob:
    """The case as a run would have it."""
    problem = case.problem()
    places = torch.arange(examples) % len(case.inputs)
    data = TensorDataset(case.inputs[places], case.labels[0][places])
    validation = fm.Evaluation(data, errors, problem.target_validation.predict, batch_size=64)
    sealed = fm.Problem(problem.target, list(problem.stream_map.values()), validation).sealed()
    return TrainingJob(sealed, case.model(), fm.Training(OPTIMIZER), 0, threads)


@contextmanager
def executions(case: Case, examples: int) -> Iterator[tuple[dict[str, tuple[BranchExecution, int]], float]]:
    """Yield an execution of every kind with its threads, and what it took to start the processes."""
    with ExitStack() as stack:

        def opened(workers: int, threads: int) -> BranchExecution:
            executor = stack.enter_context(local_executor(workers))
            return stack.enter_context(open_branches(job(case, threads, examples), executor))

        one, threads = opened(1, 1), opened(1, 2)
        started = time.perf_counter()
        two = opened(2, 1)
        list(two.train(segments(case, 2, 1), states(two, 2)))  # ends when both have started
        yield {ONE: (one, 1), TWO: (two, 1), THREADS: (threads, 2)}, time.perf_counter() - started


def states(execution: BranchExecution, branches: int) -> list[Any]:
    """Fresh branches."""
    initial = execution.binding.initial()
    return [initial.clone() for _ in range(branches)]


def training(execution: BranchExecution, threads: int, case: Case, branches: int, steps: int) -> Callable[[], None]:
    """One round of training."""
    parts, held = segments(case, branches, steps), states(execution, branches)

    def run() -> None:
        with using_threads(threads):
            list(execution.train(parts, held))

    return run


def measuring(execution: BranchExecution, threads: int) -> Callable[[], None]:
    """One full pass for each of the four combinations that a grid tries."""
    held = states(execution, 2)
    requests = [MeasureRequest((1 - alpha, alpha)) for alpha in (0.2, 0.4, 0.6, 0.8)]

    def run() -> None:
        with using_threads(threads):
            execution.measure(held, requests)

    return run


def one_seed(steps: int, seed: int, tell: Tell) -> float:
    """One run of a comparison."""
    case = conv_case(3)
    with using_threads(1):
        run = fm.Joint().fit(case.problem(), model=case.model, optimizer=OPTIMIZER, steps=steps, seed=seed, threads=1)
    return run.score or 0.0


def seeds(workers: int, count: int, steps: int) -> Callable[[], None]:
    """All runs of a comparison, as `forkmerge compare` does them."""
    return lambda: list(run_calls(partial(one_seed, steps), list(range(count)), workers)) and None


def time_case(name: str, rounds: int, quick: bool, counts: Sequence[int] = ()) -> dict[str, Any]:
    """Time the training of 2, 3 and 4 branches and the passes of a search, or of so many branches alone."""
    make, steps, examples = CASES[name]
    case = make(3)
    if quick:
        steps, examples = max(steps // 10, 16), examples // 8
    results: dict[str, Any] = {}
    with executions(case, examples) as (executions_by_kind, seconds):
        results["start-up"] = seconds
        for branches in counts or BRANCHES:
            contenders = {
                name: training(execution, threads, case, branches, steps)
                for name, (execution, threads) in executions_by_kind.items()
            }
            results[f"{branches} branches"] = interleave(contenders, ONE, rounds=rounds)
            show(name, f"{branches} branches", results[f"{branches} branches"])
        if counts:
            return results
        passes = {name: measuring(execution, threads) for name, (execution, threads) in executions_by_kind.items()}
        results["full passes"] = interleave(passes, ONE, rounds=rounds)
        show(name, "full passes", results["full passes"])
    return results


def time_seeds(rounds: int, quick: bool) -> dict[str, Any]:
    """Time the seeds of a comparison, starting the processes included."""
    count, steps = (2, 2) if quick else (4, 200)
    found = interleave({ONE: seeds(1, count, steps), TWO: seeds(2, count, steps)}, ONE, rounds=rounds, warm_up=0)
    show("compare", f"{count} seeds", found)
    return {"seeds": found}


def show(case: str, what: str, ratios: Mapping[str, Any]) -> None:
    """Print one line of numbers."""
    print(f"{case:8} {what:12} " + "  ".join(f"{name}: {1 / ratio.median:.2f}×" for name, ratio in ratios.items()))


def section(results: Mapping[str, Any]) -> Section:
    """Say what the results mean."""
    rows, goals = [], []
    for case, found in results.items():
        for what, ratios in found.items():
            if what == "start-up":
                continue
            faster = {name: 1 / ratio["median"] for name, ratio in ratios.items()}
            rows.append(
                [
                    f"{case}: {what}",
                    f"{faster[TWO]:.2f}",
                    f"{faster[THREADS]:.2f}" if THREADS in faster else "",
                    f"{found['start-up']:.1f} s" if "start-up" in found else "included",
                ]
            )
            bound = BOUNDS.get(case, {}).get(int(what[0]) if what[0].isdigit() else 0, 1.8 if case != "mlp" else 1.6)
            goals.append(Goal(f"{case}: {what}, two workers", bound, faster[TWO], at_least=True))
    return Section(
        "What two cores give",
        "How much faster than one process with one thread: a worker process per core, or one process with two threads.",
        [Table(["", TWO, THREADS, "start-up"], rows)],
        goals,
        [
            "A round of training is timed in processes that have started; `start-up` is what starting both takes, once "
            "per run, the first step included. `full passes` are the four combinations of a grid, on a score that does "
            "not add up over examples. The seeds of `compare` are four runs of 200 steps, timed with starting."
        ],
        [("What do two cores give?", _gained(results))],
    )


def _gained(results: Mapping[str, Any]) -> str:
    """Say between which factors two workers, and two threads, are faster."""
    ratios = [each for found in results.values() for what, each in found.items() if what != "start-up"]
    parts = []
    for name in (TWO, THREADS):
        faster = [1 / each[name]["median"] for each in ratios if name in each]
        parts += [f"{min(faster):.2f} to {max(faster):.2f}× with {name}"] if faster else []
    return ", ".join(parts)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int)
    arguments.add_argument("--cases", default="conv,mlp,compare")
    arguments.add_argument("--branches", default="", help="only so many branches, e.g. 3,4")
    options = begin(arguments, argv)
    rounds = options.rounds or (1 if options.quick else 7)
    results = {} if options.quick else read_results("parallel", options.out)
    counts = [int(count) for count in options.branches.split(",") if count]
    for name in options.cases.split(","):
        if name == "compare":
            results[name] = time_seeds(options.rounds or (1 if options.quick else 3), options.quick)
        else:
            results[name] = {**results.get(name, {}), **time_case(name, rounds, options.quick, counts)}
        save("parallel", results, options.out)


if __name__ == "__main__":
    main()

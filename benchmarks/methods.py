"""What a step costs under every method, as a ratio to a hand-written equal-weight loop on the same network.

    ./run bench methods [--rounds 9] [--cases mlp3,conv3] [--methods PCGrad,MGDA]

TorchJD's own `mtl_backward` stands beside the methods it has, in its default form (all tasks' products at once) and
one at a time. One thread, contenders interleaved, medians with quartiles. `--cases` measures some cases again, with
`--methods` some methods of them; all others keep their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness import Ratio, begin, interleave, parser, read_results, save
from nets import Case, conv_case, large_embedding_case, mlp_case
from page import Goal, Section
from page import Table as PageTable
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import forkmerge as fm
from forkmerge.engine.training.branch import train_branch
from forkmerge.engine.training.options import Mixture, Training
from forkmerge.methods import METHODS, GramianMethod, LossMethod
from forkmerge.methods.base import has_hook

PEERS = {
    "MGDA": "MGDA",
    "PCGrad": "PCGrad",
    "IMTLG": "IMTLG",
    "CAGrad": "CAGrad",
    "GradVac": "GradVac",
    "NashMTL": "NashMTL",
}
CASES: dict[str, tuple[Callable[[], Case], int]] = {
    "mlp3": (lambda: mlp_case(3), 60),
    "mlp8": (lambda: mlp_case(8), 60),
    "mlp3-own": (lambda: mlp_case(3, own_inputs=True), 60),
    "conv3": (lambda: conv_case(3), 3),
    "conv8": (lambda: conv_case(8), 3),
    "conv3-own": (lambda: conv_case(3, own_inputs=True), 3),
    "embedding3": (lambda: large_embedding_case(3), 50),
}
OPTIMIZER = fm.OptimizerOf("SGD", lr=1e-3, momentum=0.9)


def plain(case: Case, steps: int) -> Callable[[], None]:
    """The baseline."""
    model = case.model()
    optimizer = OPTIMIZER(model)
    return lambda: case.plain_steps(model, optimizer, steps)


def library(case: Case, steps: int, method: str | None) -> Callable[[], None]:
    """The library's own loop."""
    chosen = METHODS[method]() if method else None
    # Everybody's kernels are the same: what a method costs is asked here, not what a memory format gains.
    training = Training(OPTIMIZER, method=chosen, channels_last=False)
    binding = training.binding(case.model())
    state, problem = binding.initial(), case.problem()
    mixture = Mixture("joint", dict.fromkeys(case.tasks, 1.0))

    def run() -> None:
        train_branch(binding, problem, mixture, state, steps=steps, training=training, seed=0)

    return run


def peer(case: Case, steps: int, name: str, chunk: int | None) -> Callable[[], None]:
    """TorchJD's `mtl_backward` with one of its aggregators."""
    from torchjd import aggregation
    from torchjd.autojac import jac_to_grad, mtl_backward

    model = case.model()
    optimizer = OPTIMIZER(model)
    options = {"n_tasks": len(case.tasks)} if name == "NashMTL" else {"c": 0.4} if name == "CAGrad" else {}
    aggregator = getattr(aggregation, name)(**options)

    def run() -> None:
        for _ in range(steps):
            losses, features = case.plain_losses(model)
            optimizer.zero_grad()
            mtl_backward(losses, features=features, parallel_chunk_size=chunk)
            jac_to_grad(model.encoder.parameters(), aggregator)
            optimizer.step()

    return run


def contenders(case: Case, steps: int, methods: list[str]) -> dict[str, Callable[[], None]]:
    """Everything that is timed on a case; peers that cannot run here are left out."""
    found = {"plain": plain(case, steps), "fixed weights": library(case, steps, None)}
    for name in methods:
        found[name] = library(case, steps, name)
        if name in PEERS and not case.own_inputs:
            for label, chunk in (("TorchJD", None), ("TorchJD, one at a time", 1)):
                try:
                    candidate = peer(case, steps, PEERS[name], chunk)
                    candidate()
                except (ImportError, AttributeError, TypeError) as error:
                    print(f"{case.name}: {label} {name} left out: {error}")
                    continue
                found[f"{name} ({label})"] = candidate
    return found


def kind(name: str) -> str:
    """How a table groups a contender."""
    method = METHODS.get(name)
    if method is None:
        return ""
    return "loss" if issubclass(method, LossMethod) else "gradient" if issubclass(method, GramianMethod) else "other"


def show(case: Case, ratios: dict[str, Ratio], console: Console) -> None:
    """Print one case."""
    table = Table(title=f"{case.name}: time of a step over a plain equal-weight loop", title_justify="left")
    table.add_column("method")
    table.add_column("kind")
    table.add_column("ratio (quartiles)", justify="right")
    for name, ratio in ratios.items():
        table.add_row(name, kind(name), str(ratio))
    console.print(table)


# What a step may cost, from the prototypes: the cases by name, each with its bounds by kind.
BOUNDS = {
    "conv3": {"loss": 1.08, "gradient": 2.45},
    "conv8": {"loss": 1.08, "gradient": 5.5},
    "mlp3": {"loss": 1.08, "gradient": 2.4},
    "mlp8": {"loss": 1.08, "gradient": 3.3},
    "embedding3": {"gradient": 4.5},
    "conv3-own": {"gradient": 1.1},
    "mlp3-own": {"gradient": 1.4},
}


def section(results: Mapping[str, Any]) -> Section:
    """Say what the results mean."""
    names = dict.fromkeys(name for ratios in results.values() for name in ratios)
    rows = [
        [name, *(f"{ratios[name]['median']:.2f}" if name in ratios else "" for ratios in results.values())]
        for name in names
    ]
    goals = []
    for case, bounds in BOUNDS.items():
        for wanted, bound in bounds.items():
            found = {r["median"]: name for name, r in results.get(case, {}).items() if _is_plain(name, wanted)}
            if found:
                goals.append(Goal(f"{case}: {wanted} methods, the worst: {found[max(found)]}", bound, max(found)))
    return Section(
        "What a step takes under every method",
        "The time of a step over that of a hand-written equal-weight loop on the same network.",
        [PageTable(["method", *results], rows)],
        goals,
        [
            "`conv`: a ResNet-18-like network at 32×32; `mlp`: an embedding, an MLP and a tower per task; `own`: every "
            "task reads its own batch; `embedding`: a table of five million parameters; the number is K. TorchJD's "
            "`mtl_backward` stands beside the methods it has. Gradient methods cost what K products with the encoder "
            "cost; `FAMO` takes one more forward pass, and `AutoLambda` several."
        ],
        [("What does a step take under other methods?", _worst_steps(results))],
    )


def _worst_steps(results: Mapping[str, Any]) -> str:
    """Say what the slowest methods of both kinds take on the convolutional networks."""
    parts = []
    for case, bounds in BOUNDS.items():
        worst = {}
        for wanted in bounds:
            ratios = [r["median"] for name, r in results.get(case, {}).items() if _is_plain(name, wanted)]
            worst |= {wanted: max(ratios)} if ratios else {}
        if case in ("conv3", "conv8") and worst:
            shown = ", ".join(f"{wanted} methods at most {value:.2f}×" for wanted, value in worst.items())
            parts.append(f"{case[-1]} tasks: {shown}")
    return f"{'; '.join(parts)}, beside an equal-weight loop by hand"


def _is_plain(name: str, wanted: str) -> bool:
    """Whether a contender is a method of that kind that takes no pass of its own besides combining."""
    return kind(name) == wanted and not any(has_hook(METHODS[name](), hook) for hook in ("before_step", "after_step"))


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int)
    arguments.add_argument("--cases")
    arguments.add_argument("--methods", default=",".join(METHODS))
    options = begin(arguments, argv)
    rounds = options.rounds or (1 if options.quick else 9)
    names = (options.cases or ("mlp3" if options.quick else ",".join(CASES))).split(",")
    console = Console()
    results = read_results("methods", options.out) if options.cases else {}
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("timing", total=len(names))
        for name in names:
            make, steps = CASES[name]
            case = make()
            progress.update(bar, description=case.name)
            ratios = interleave(contenders(case, steps, options.methods.split(",")), "plain", rounds=rounds)
            show(case, ratios, console)
            results[name] = {**results.get(name, {}), **ratios}
            save("methods", results, options.out)
            progress.advance(bar)


if __name__ == "__main__":
    main()

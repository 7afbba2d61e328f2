"""What a step costs under every method, as a ratio to a hand-written equal-weight loop on the same network.

    python benchmarks/methods.py [--rounds 9] [--cases mlp,conv] [--methods PCGrad,MGDA] [--out results]

TorchJD's own `mtl_backward` stands beside the methods it has, in its default form (all tasks' products at once) and
one at a time. One thread, contenders interleaved, medians with quartiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from harness import Ratio, interleave, save
from nets import Case, conv_case, large_embedding_case, mlp_case
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import forkmerge as fm
from forkmerge.branch import Mixture, Training, train_branch
from forkmerge.methods import METHODS, GramianMethod, LossMethod

PEERS = {
    "MGDA": "MGDA",
    "PCGrad": "PCGrad",
    "IMTLG": "IMTLG",
    "CAGrad": "CAGrad",
    "GradVac": "GradVac",
    "NashMTL": "NashMTL",
}
CASES: dict[str, tuple[Callable[[], Case], int]] = {
    "mlp3": (lambda: mlp_case(3), 30),
    "mlp8": (lambda: mlp_case(8), 30),
    "mlp3-own": (lambda: mlp_case(3, own_inputs=True), 30),
    "conv3": (lambda: conv_case(3), 3),
    "conv8": (lambda: conv_case(8), 3),
    "conv3-own": (lambda: conv_case(3, own_inputs=True), 3),
    "embedding3": (lambda: large_embedding_case(3), 10),
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
    training = Training(OPTIMIZER, method=chosen)
    bench = training.bench(case.model())
    state, problem = bench.initial(), case.problem()
    mixture = Mixture("joint", dict.fromkeys(case.tasks, 1.0))

    def run() -> None:
        train_branch(bench, problem, mixture, state, steps=steps, training=training, seed=0)

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


def markdown(results: dict[str, dict[str, Ratio]]) -> str:
    """All cases as one Markdown table of medians, methods down, cases across."""
    names = list(dict.fromkeys(name for ratios in results.values() for name in ratios))
    lines = ["| method | " + " | ".join(results) + " |", "|---|" + "---:|" * len(results)]
    for name in names:
        cells = [f"{ratios[name].median:.2f}" if name in ratios else "" for ratios in results.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    console, results = Console(), {}
    with Progress(console=console, transient=True) as progress:
        names = options.cases.split(",")
        bar = progress.add_task("timing", total=len(names))
        for name in names:
            make, steps = CASES[name]
            case = make()
            progress.update(bar, description=case.name)
            ratios = interleave(contenders(case, steps, options.methods.split(",")), "plain", rounds=options.rounds)
            show(case, ratios, console)
            results[name] = ratios
            save("methods", results, options.out)
            (options.out / "methods.md").write_text(markdown(results), "utf-8")
            progress.advance(bar)


if __name__ == "__main__":
    main()

"""Runs and plans as the command prints them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forkmerge.algorithms.run_record import Round, Run, show_metrics
from forkmerge.algorithms.saved_run import SavedRun
from forkmerge.cli.terminal import say
from forkmerge.experiments.cost_of_run import BranchCost, RunCost
from forkmerge.experiments.units import show_bytes, show_seconds

_MEANINGS = {
    "loss": "a task weight multiplies the task's loss",
    "sampling": "a task weight is the share of steps that train on the task",
}


def rounds_table(rounds: Sequence[Round]) -> Table:
    """Return the coefficients of every round, with each branch's own score behind them."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    names = list(dict.fromkeys(name for r in rounds for name in r.branches))
    for title in ("round", "step", *names, "score"):
        table.add_column(escape(title), justify="right")
    for r in rounds:
        table.add_row(str(r.index), str(r.end), *(_share(r, name) for name in names), _number(r.score))
    return table


def _share(r: Round, name: str) -> str:
    if name not in r.branches:
        return ""
    score = r.branches[name].score
    share = f"{r.coefficients[name]:.2f}" if name in r.coefficients else "faulty"
    return share if score is None else f"{share} ({_number(score)})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def show_run(console: Console, run: Run) -> None:
    """Print a run: its summary, the table of its rounds, where the time went."""
    lines = [line for line in repr(run).splitlines() if not line.startswith("  round ")]
    say(console, "\n".join(line for line in lines if not line.startswith("  note: ")))
    show_rounds(console, run.searched)
    if run.probes:
        say(console, f"  probes      {show_metrics(run.probes)}")
    if run.seconds:
        say(console, "  time        " + ", ".join(f"{name} {show_seconds(s)}" for name, s in run.seconds.items()))
    for note in run.notes:
        say(console, f"  note: {note}", style="yellow")


def show_rounds(console: Console, rounds: Sequence[Round]) -> None:
    """Print the coefficients of every searched round, where there were several branches; a refit repeats them."""
    if any(len(r.branches) > 1 for r in rounds):
        say(console, "\n  coefficients by branch, each with the branch's own score in brackets")
        console.print(rounds_table(rounds))
        say(console, "")


def runs_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of `forkmerge runs`."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("run", "algorithm", "target", "status", "step", "validation", "test", "last change"):
        table.add_column(title, overflow="fold")
    colours = {"finished": "green", "running": "cyan", "interrupted": "yellow", "unreadable": "red"}
    for row in rows:
        status = row["status"]
        cells = [row["name"], row["algorithm"], row["target"], status, row["progress"], row["validation"], row["test"]]
        shown = [escape(str(cell or "")) for cell in (*cells, row["changed"])]
        shown[3] = f"[{colours[status]}]{status}[/]"
        table.add_row(*shown)
    return table


def show_saved_run(console: Console, story: SavedRun) -> None:
    """Print a run that is not finished: what its record holds so far, and how to continue it."""
    phase = " of the refit" if story.phase == "refit" else ""
    say(console, f"{story.algorithm} on {story.target!r}: {story.status} at step {story.step} of {story.steps}{phase}")
    show_rounds(console, [r for r in story.rounds if r.phase == "search"])
    if story.status == "interrupted":
        place = story.checkpoint or "the beginning: there is no undamaged checkpoint"
        say(console, f"  it continues from {place} with: {story.how_to_resume}")


def show_cost(console: Console, plan: RunCost) -> None:
    """Print what a run would do and cost."""
    pause = "a merge" if len(plan.branches) > 1 else "a validation"
    say(console, f"{plan.algorithm} on {plan.target!r}: {plan.steps} steps, {pause} every {plan.interval}")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("branch", "task weights", "a step takes"):
        table.add_column(title)
    for kind, branches in (("", plan.branches), ("probe: ", plan.probes)):
        for branch in branches:
            table.add_row(escape(kind + branch.name), escape(_weights(branch)), show_seconds(branch.seconds_per_step))
    console.print(table)
    for name, text in _facts(plan).items():
        say(console, f"{name:<12}{text}")


def _facts(plan: RunCost) -> dict[str, str]:
    phases = [f"{phase} {count}" for phase, count in plan.branch_steps.items() if phase != "total"]
    disk = f"two checkpoints of {show_bytes(plan.disk['checkpoint'])}, the model {show_bytes(plan.disk['model'])}"
    if plan.disk["branches"]:
        disk += f", every round's branches {show_bytes(plan.disk['branches'])}"
    merges = f"{plan.merges}, each with up to {plan.passes['per merge']:.4g} validation passes"
    workers = "" if plan.workers == 1 else f" in {plan.workers} processes"
    times = ", ".join(f"{name} {show_seconds(plan.seconds[name])}" for name in ("training", "validation"))
    memory = f"{show_bytes(plan.memory['total'])} for {plan.parameters} trainable parameters"
    return {
        "weights": _MEANINGS[plan.weights],
        "steps": f"{plan.branch_steps['total']} in all: {' + '.join(phases)}",
        **({"merges": merges} if len(plan.branches) > 1 else {}),
        "validation": f"up to {plan.passes['total']:.4g} passes over {plan.examples} examples",
        "memory": f"{memory}; activations and data come on top",
        "disk": f"{show_bytes(plan.disk['total'])}: {disk}",
        "time": f"about {show_seconds(plan.seconds['total'])}{workers}: {times}",
    }


def _weights(branch: BranchCost) -> str:
    return ", ".join(f"{task} {weight:.4g}" for task, weight in branch.task_weights.items())

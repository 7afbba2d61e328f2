"""Runs and plans as the command prints them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forkmerge.algorithms.run_record import Round, Run, rounds_table
from forkmerge.algorithms.saved_run import SavedRun
from forkmerge.algorithms.table_data import show_metrics
from forkmerge.cli.terminal import say
from forkmerge.experiments.cost_of_run import BranchCost, RunCost
from forkmerge.experiments.units import show_bytes, show_seconds
from forkmerge.report.table import to_rich

_MEANINGS = {
    "loss": "a task weight multiplies the task's loss",
    "sampling": "a task weight is the share of steps that train on the task",
}


def show_run(console: Console, run: Run) -> None:
    """Print a run: what it reached, the table of its rounds, where the time went."""
    say(console, run.title)
    show_facts(console, run.facts)
    show_rounds(console, run.searched)
    times = ", ".join(f"{name} {show_seconds(seconds)}" for name, seconds in run.seconds.items())
    rest = {"probes": show_metrics(run.probes), "time": times}
    show_facts(console, {name: text for name, text in rest.items() if text})
    for note in (*run.notes, *run.remarks):
        say(console, f"  note: {note}", style="yellow")


def show_facts(console: Console, facts: Mapping[str, str]) -> None:
    """Print facts under their names, one per line."""
    for name, text in facts.items():
        say(console, f"  {name:<11} {text}")


def show_rounds(console: Console, rounds: Sequence[Round]) -> None:
    """Print the coefficients of every searched round, where there were several branches; a refit repeats them."""
    if any(len(r.branches) > 1 for r in rounds):
        say(console, "")
        console.print(to_rich(rounds_table(rounds, with_branch_scores=True)))
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

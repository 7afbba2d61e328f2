"""Runs and what they would cost as the command prints them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from forkmerge.algorithms.run_record import Round, Run, rounds_table, shown_score
from forkmerge.algorithms.saved_run import SavedRun
from forkmerge.algorithms.table_data import show_bytes, show_metrics, show_number, show_seconds, word_table
from forkmerge.cli.print_tables import show_table
from forkmerge.cli.terminal import say
from forkmerge.experiments.cost_of_run import RunCost
from forkmerge.experiments.verdict import Verdict

_MEANINGS = {
    "loss": "a task weight multiplies the task's loss",
    "sampling": "a task weight is the share of steps that train on the task",
}


def show_run(console: Console, run: Run) -> None:
    """Print a run: what it reached, the table of its rounds, where the time went."""
    say(console, run.title)
    show_facts(console, run.facts)
    if run.verdict is not None:
        first, *others = Verdict.from_json(run.verdict).lines
        say(console, f"  {'verdict':<11} {first}", style="bold")
        for line in others:
            say(console, f"  {'':<11} {line}")
    show_rounds(console, run.searched)
    times = ", ".join(f"{name} {show_seconds(seconds)}" for name, seconds in run.seconds.items())
    for text in run.legend:
        say(console, f"  {text}", style="dim")
    sign = shown_score(run.searched)[1]  # an error is shown as one
    rest = {"probes": show_metrics({name: sign * score for name, score in run.probes.items()}), "time": times}
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
        show_table(console, rounds_table(rounds, with_branch_scores=True))
        say(console, "")


def runs_table(rows: Sequence[Mapping[str, Any]]) -> RichTable:
    """Return the table of `forkmerge runs`."""
    table = RichTable(box=None, header_style="bold", pad_edge=False)
    for title in ("run", "algorithm", "target", "status", "step", "validation", "test", "last change"):
        table.add_column(title, overflow="fold")
    colours = {"finished": "green", "running": "cyan", "interrupted": "yellow", "unreadable": "red", "failed": "red"}
    for row in rows:
        status = row["status"]
        cells = [row["name"], row["algorithm"], row["target"], status, row["progress"], row["validation"], row["test"]]
        shown = [escape(str(cell or "")) for cell in (*cells, row["changed"])]
        shown[3] = f"[{colours[status]}]{status}[/]"
        table.add_row(*shown)
    return table


def show_saved_run(console: Console, saved: SavedRun) -> None:
    """Print a run that is not finished: what its record holds so far, and how to continue it."""
    phase = " of the refit" if saved.phase == "refit" else ""
    say(console, f"{saved.algorithm} on {saved.target!r}: {saved.status} at step {saved.step} of {saved.steps}{phase}")
    show_rounds(console, [r for r in saved.rounds if r.phase == "search"])
    if saved.reason is not None:
        say(console, f"  {saved.reason}", style="red")
    if saved.status == "interrupted":
        start = saved.checkpoint or "the beginning: there is no undamaged checkpoint"
        say(console, f"  it continues from {start} with: {saved.how_to_resume}")


def show_cost(console: Console, cost: RunCost) -> None:
    """Print what a run would do and cost."""
    pause = "a merge" if len(cost.branches) > 1 else "a validation"
    say(console, f"{cost.algorithm} on {cost.target!r}: {cost.steps} steps, {pause} every {cost.interval}")
    rows = []
    for kind, branches in (("", cost.branches), ("probe: ", cost.probes)):
        for branch in branches:
            weights, seconds = show_metrics(branch.task_weights), show_seconds(branch.seconds_per_step)
            weights += "" if branch.lr_scale == 1 else f", learning rate × {branch.lr_scale:g}"
            rows.append((f"{kind}{branch.name}", weights, seconds))
    show_table(console, word_table("", ("branch", "task weights", "a step takes"), rows))
    if cost.in_round:
        say(console, f"A round trains {cost.in_round} of these {len(cost.branches)} branches: they take turns.")
    for name, text in _facts(cost).items():
        say(console, f"{name:<12}{text}")


def _facts(cost: RunCost) -> dict[str, str]:
    phases = [f"{phase} {count}" for phase, count in cost.branch_steps.items() if phase != "total"]
    disk = f"two checkpoints of {show_bytes(cost.disk['checkpoint'])}, the model {show_bytes(cost.disk['model'])}"
    if cost.disk["branches"]:
        disk += f", every round's branches {show_bytes(cost.disk['branches'])}"
    merges = f"{cost.merges}, each with up to {show_number(cost.passes['per merge'])} validation passes"
    tail = f"; the last {cost.tail} of every round on {cost.target!r} alone" if cost.tail else ""
    workers = "" if cost.workers == 1 else f" in {cost.workers} processes"
    times = ", ".join(f"{name} {show_seconds(cost.seconds[name])}" for name in ("training", "validation"))
    memory = f"{show_bytes(cost.memory['total'])} for {cost.parameters} trainable parameters"
    return {
        "weights": _MEANINGS[cost.weights],
        "steps": f"{cost.branch_steps['total']} in all: {' + '.join(phases)}{tail}",
        **({"merges": merges} if len(cost.branches) > 1 else {}),
        "validation": f"up to {show_number(cost.passes['total'])} passes over {cost.examples} examples",
        "memory": f"{memory}; activations and data come on top",
        "disk": f"{show_bytes(cost.disk['total'])}: {disk}",
        "time": f"about {show_seconds(cost.seconds['total'])}{workers}: {times}",
    }

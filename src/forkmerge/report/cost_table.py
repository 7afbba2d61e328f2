"""What a comparison would cost, as a table."""

from __future__ import annotations

from forkmerge.algorithms.table_data import Cell, Column, Table, show_bytes, show_seconds
from forkmerge.experiments.cost_of_comparison import ComparisonCost


def cost_table(cost: ComparisonCost) -> Table:
    """Return what would run, as a table."""
    columns = [
        Column("method", is_words=True),
        *(Column(name, decimals=0) for name in ("B", "runs", "tuning runs", "steps")),
    ]
    columns += [Column(name, is_words=True) for name in ("time", "memory")]
    rows = [
        (
            Cell(text=m.label),
            *(Cell(value) for value in (m.branches, m.runs, m.tuning_runs, m.steps)),
            Cell(text=show_seconds(m.seconds)),
            Cell(text=show_bytes(m.memory)),
        )
        for m in cost.methods
    ]
    before = cost.pretraining
    notes = [
        f"{len(cost.methods)} methods × {len(cost.targets)} targets × {len(cost.seeds)} seeds: {cost.runs} runs, "
        f"{cost.steps:,} training steps over all branches.",
        f"In all about {show_seconds(cost.seconds)} with {cost.workers} processes, by two steps of every method on "
        f"{cost.targets[0]!r}; about {show_bytes(cost.memory)} of memory, activations and data apart.",
        "Rows: all runs of a method one after the other, and the memory of one. Nothing has been written.",
    ]
    if before is not None:
        how = "is done already" if before.is_done else f"comes first: about {show_seconds(before.seconds)}"
        notes.insert(0, f"Pre-training on {before.recipe}, {before.steps} steps, {how}.")
    return Table("what would run", tuple(columns), tuple(rows), tuple(notes))

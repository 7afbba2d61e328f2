"""Where a command carries its runs out: --executor, --address and --workers, over a recipe's [execution] table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forkmerge.engine.executors.executor_options import ExecutorOptions
from forkmerge.experiments.execution import execution_from


@dataclass(frozen=True)
class ExecutorArguments:
    """What was typed.

    Args:
        executor: "processes" or "ray".
        address: Of a Ray cluster, which is what then is meant.
        workers: How many.
    """

    executor: str | None = None
    address: str | None = None
    workers: int | None = None

    def table(self, own: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the [execution] table of a recipe as it is overridden; empty if there is none, and nothing is typed.

        A number of workers alone changes a table, and makes none.
        """
        table = dict(own or {})
        name = self.executor or ("ray" if self.address is not None else None)
        if name is not None and name != table.get("executor", "processes"):
            table = {"executor": name, **{key: table[key] for key in ("workers",) if key in table}}
        if self.address is not None:
            table["address"] = self.address
        if self.workers is not None and (table or name):
            table["workers"] = self.workers
        return table

    def options(self, own: Mapping[str, Any] | None = None) -> ExecutorOptions | None:
        """Return the executor of that table."""
        return execution_from(self.table(own))

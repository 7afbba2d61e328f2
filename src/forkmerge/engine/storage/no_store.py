"""The store of a run that keeps nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from forkmerge.engine.storage.rounds_file import NoRounds
from forkmerge.errors import StoreError


class NoStore:
    """The methods of `RunFolder`, without a folder."""

    path: Path | None = None
    warnings: tuple[str, ...] = ()
    rounds = NoRounds()

    def record(self, event: Mapping[str, Any]) -> None:
        """Forget the event."""

    def save(self, value: Any, index: int) -> None:
        """Forget the checkpoint."""

    def load(self) -> Any | None:
        """Find no checkpoint."""
        return None

    def keep_branches(self, value: Any, index: int) -> None:
        """Forget the branches."""

    def load_branches(self, index: int) -> Any:
        """Say that there are none."""
        raise StoreError(f"the branches of round {index} were not kept: give the run a folder.")

    def finish(self, result: Mapping[str, Any], model_tensors: Mapping[str, Tensor]) -> None:
        """Forget the result."""

    def result(self) -> dict[str, Any] | None:
        """Find no result."""
        return None

    def model_tensors(self) -> dict[str, Tensor]:
        """Say that there is no model."""
        raise StoreError("the model was not kept: give the run a folder.")

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield nothing."""
        return iter(())

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> NoStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

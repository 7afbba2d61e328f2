"""Optimizer rows that another process has: they come here when somebody reads them, and not before."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor


class RemoteRows(MutableMapping[str, Tensor]):
    """Rows by name, as a dict has them once they are here.

    Args:
        fetch: Brings them; called at most once, with
        memory: rows whose memory they may take, if these have the right size.
        source: Where they are, for whoever made this.
        are_finite: Whether none of them is infinite or NaN, which those who only ask for that need not fetch them for.
    """

    def __init__(
        self,
        fetch: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
        source: Any,
        *,
        are_finite: bool,
        memory: Mapping[str, Tensor],
    ) -> None:
        self._fetch, self.source, self.are_finite, self._memory = fetch, source, are_finite, memory
        self._rows: dict[str, Tensor] | None = None
        self._changes: list[Callable[[MutableMapping[str, Tensor]], None]] = []

    @property
    def is_here(self) -> bool:
        """Whether they have been fetched."""
        return self._rows is not None

    @property
    def memory(self) -> Mapping[str, Tensor]:
        """Rows whose memory the next ones may take."""
        return self._memory if self._rows is None else dict(self._rows)

    @property
    def here(self) -> dict[str, Tensor]:
        """The rows, which are fetched if need be."""
        if self._rows is None:
            self._rows = self._fetch(self._memory)
            for change in self._changes:
                change(self._rows)
        return self._rows

    def when_here(self, change: Callable[[MutableMapping[str, Tensor]], None]) -> None:
        """Do something with the rows: now if they are here, and otherwise as soon as they are."""
        if self._rows is None:
            self._changes.append(change)
        else:
            change(self._rows)

    def __getitem__(self, name: str) -> Tensor:
        return self.here[name]

    def __setitem__(self, name: str, row: Tensor) -> None:
        self.here[name] = row

    def __delitem__(self, name: str) -> None:
        del self.here[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.here)

    def __len__(self) -> int:
        return len(self.here)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Tensor]:
        return copy.deepcopy(self.here, memo)

    def __reduce__(self) -> Any:
        return dict, (self.here,)

"""The finished rounds of a run, each written once: a checkpoint says how many of them it stands on.

If every checkpoint held all rounds, each would be longer than the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from forkmerge.engine.storage import atomic_files
from forkmerge.engine.storage.atomic_files import explained, write_atomically
from forkmerge.engine.storage.json_codec import encode, pack, unpack
from forkmerge.engine.storage.json_files import parse_object, with_checksum
from forkmerge.errors import StoreError


class RoundsFile:
    """One line per round, in order: whose it is, its position, counted from 1, its value, and their checksum.

    Lines that come after those of a checkpoint are the traces of a kill; `keep` removes them. The record in the same
    folder holds the same numbers, for people, with null for those that are not finite.

    Args:
        path: The file; it is made with the first line.
        run_id: Whose rounds they are, which every line says; None where an earlier version began the run.
        check: Called before a line is added: an error where the folder is gone.
    """

    def __init__(self, path: Path, run_id: str | None = None, check: Callable[[], object] = lambda: None) -> None:
        self.path, self.run_id, self._check = path, run_id, check

    def append(self, position: int, value: Any) -> None:
        """Add a round; it has reached the disk when this returns."""
        self._check()
        with explained(f"append to {self.path}"), self.path.open("ab") as file:
            atomic_files.write(file, self._line(position, value))
            atomic_files.sync(file)

    def read(self, count: int) -> list[Any]:
        """Return the first rounds; a damaged or lost one as the record has it, where that is whole.

        Raises:
            StoreError: a round is damaged in both, or they are another run's.
        """
        values = {data.get("round"): data.get("value") for data in self._own_lines(self.path)}
        recorded: dict[Any, Any] | None = None
        rounds = []
        for position in range(1, count + 1):
            if position in values:
                rounds.append(unpack(values[position], {}))
                continue
            if recorded is None:
                events = self._own_lines(self.path.with_name("record.jsonl"))
                recorded = {event.get("index"): event for event in events if event.get("event") == "round"}
            if position not in recorded:
                raise StoreError(
                    f"{self.path.parent}: round {position} is damaged in rounds.jsonl and in record.jsonl, and without "
                    "it the run cannot go on. Put back an undamaged copy of one, or start anew in another folder."
                )
            rounds.append(recorded[position])
        return rounds

    def keep(self, values: Sequence[Any]) -> None:
        """Let the file hold exactly these rounds; nothing is written where it does."""
        text = b"".join(self._line(position, value) for position, value in enumerate(values, start=1))
        if text != _text(self.path):
            write_atomically(self.path, text)

    def _own_lines(self, path: Path) -> Iterator[dict[str, Any]]:
        for data in _whole_lines(path):
            check_owner(path, data, self.run_id)
            yield data

    def _line(self, position: int, value: Any) -> bytes:
        data, tensors = pack(value)
        if tensors:
            raise StoreError(f"round {position}: {next(iter(tensors))} is a tensor, which a line cannot hold.")
        owner = {} if self.run_id is None else {"run_id": self.run_id}
        return encode(with_checksum({**owner, "round": position, "value": data}, "crc32"))


class NoRounds:
    """The rounds of a run that keeps nothing."""

    def append(self, position: int, value: Any) -> None:
        """Forget the round."""

    def read(self, count: int) -> list[Any]:
        """Find none."""
        return []

    def keep(self, values: Sequence[Any]) -> None:
        """Forget them."""


def check_owner(path: Path, line: dict[str, Any], run_id: str | None) -> None:
    """Refuse a line that says that it is another run's; most lines of a record, and earlier versions, do not say."""
    if line.pop("run_id", run_id) != run_id:
        raise StoreError(f"{path} was written by another run than this folder's: put each back where it belongs.")


def _text(path: Path) -> bytes:
    with explained(f"read {path}"):
        return path.read_bytes() if path.exists() else b""


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of undamaged lines."""
    for line in _text(path).splitlines():
        try:
            data = parse_object(line, str(path), "crc32")
        except StoreError:
            continue
        if not any(isinstance(data.get(key), list | dict) for key in ("round", "index")):  # which can be no position
            yield data

"""Large CSV files as columns: converted once, and nothing half-written is ever read."""

from __future__ import annotations

import errno
import os
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import forkmerge as fm
from aliexpress_files import NAMES, load_countries, text, values, write_country
from forkmerge.datasets import _tables
from forkmerge.engine.storage import atomic_files


@pytest.fixture
def small_chunks(monkeypatch) -> None:
    monkeypatch.setattr(_tables, "_CHUNK", 7)


@pytest.mark.usefixtures("small_chunks")
class TestConversion:
    def test_keeps_every_row_of_both_files_in_order(self, tmp_path: Path) -> None:
        whole = write_country(tmp_path, "NL")
        table = load_countries(tmp_path)["NL"]
        codes, numbers, labels = table.read_batch(torch.arange(40))
        assert np.array_equal(codes.numpy(), whole[:, 1:17])
        assert np.array_equal(numbers.numpy(), whole[:, 17:80].astype(np.float32))
        assert np.array_equal(labels.numpy(), whole[:, 80:])
        assert (codes.dtype, numbers.dtype, labels.dtype) == (torch.int64, torch.float32, torch.float32)
        assert table.largest == whole[:, 1:17].max(0).tolist()
        assert table.positives == [20, 10]

    def test_a_single_file_is_the_same(self, tmp_path: Path) -> None:
        whole = values(40, 0)
        (tmp_path / "AliExpress_NL.csv").write_text(text(whole).rstrip("\n"))  # no newline at the end
        table = load_countries(tmp_path)["NL"]
        assert len(table) == 40
        assert np.array_equal(table.read_batch(torch.tensor([39, 3]))[0].numpy(), whole[[39, 3], 1:17])

    def test_single_rows_are_those_of_a_batch(self, tmp_path: Path) -> None:
        write_country(tmp_path, "NL")
        table = load_countries(tmp_path)["NL"]
        batch = table.read_batch(torch.tensor([5, 39]))
        for position, index in enumerate((5, -1)):
            for column, row in zip(batch, table[index], strict=True):
                assert torch.equal(column[position], row)
        with pytest.raises(IndexError):
            table[40]

    def test_is_done_once(self, tmp_path: Path, monkeypatch) -> None:
        write_country(tmp_path, "NL")
        first = load_countries(tmp_path)["NL"]
        monkeypatch.setattr(_tables, "_chunks", None)  # a second conversion would fail
        again = load_countries(tmp_path)["NL"]
        assert again.folder == first.folder

    def test_a_changed_file_is_converted_anew(self, tmp_path: Path) -> None:
        write_country(tmp_path, "NL")
        load_countries(tmp_path)
        (tmp_path / "AliExpress_NL" / "test.csv").write_text(text(values(3, 1)))
        assert len(load_countries(tmp_path)["NL"]) == 33

    @pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
    def test_interrupted_it_leaves_nothing_that_is_read(self, tmp_path: Path, monkeypatch, stop: type) -> None:
        whole = write_country(tmp_path, "NL")
        real, calls = atomic_files.write, []

        def fail(file: object, data: bytes) -> None:
            calls.append(len(data))
            if len(calls) == 8:
                raise stop
            real(file, data)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(atomic_files, "write", fail)
            with pytest.raises(KeyboardInterrupt if stop is KeyboardInterrupt else fm.StoreError):
                load_countries(tmp_path)
        assert list((tmp_path / "cache").iterdir()) == []
        assert np.array_equal(load_countries(tmp_path)["NL"].read_batch(torch.arange(40))[0].numpy(), whole[:, 1:17])

    def test_what_a_kill_has_left_is_removed_after_a_day_and_not_before(self, tmp_path: Path) -> None:
        write_country(tmp_path, "NL")
        key = load_countries(tmp_path)["NL"].folder
        leftovers = [key.with_name(f".tmp-{key.name}-{number}-1") for number in (1, 2)]
        for folder in leftovers:
            folder.mkdir()
        old = time.time() - 100_000
        os.utime(leftovers[0], (old, old))
        atomic_files.remove(key)
        load_countries(tmp_path)
        assert [folder.exists() for folder in leftovers] == [False, True]

    @pytest.mark.parametrize("file", ["categorical.bin", "facts.json"])
    def test_damaged_columns_are_made_anew(self, tmp_path: Path, file: str) -> None:
        whole = write_country(tmp_path, "NL")
        path = load_countries(tmp_path)["NL"].folder / file
        path.write_bytes(path.read_bytes()[:-1])
        assert np.array_equal(load_countries(tmp_path)["NL"].read_batch(torch.arange(40))[0].numpy(), whole[:, 1:17])

    def test_only_some_rows_are_held_at_a_time(self, tmp_path: Path, monkeypatch) -> None:
        write_country(tmp_path, "NL")
        seen, real = [], _tables._parsed
        monkeypatch.setattr(_tables, "_parsed", lambda p, s, lines, n: seen.append(len(lines)) or real(p, s, lines, n))
        load_countries(tmp_path)
        assert seen == [7, 7, 7, 7, 2, 7, 3]

    def test_pickling_a_table_copies_no_rows(self, tmp_path: Path) -> None:
        write_country(tmp_path, "NL")
        table = load_countries(tmp_path)["NL"]
        table.read_batch(torch.tensor([0]))
        sent = pickle.dumps(table)
        assert len(sent) < 5000
        assert torch.equal(pickle.loads(sent)[7][1], table[7][1])


@pytest.mark.usefixtures("small_chunks")
class TestBadFiles:
    def broken(self, folder: Path, change: object) -> None:
        write_country(folder, "NL")
        path = folder / "AliExpress_NL" / "train.csv"
        path.write_text(change(path.read_text()))  # type: ignore[operator]
        load_countries(folder)

    def test_a_file_that_cannot_be_read_to_its_end_is_named(self, tmp_path: Path, monkeypatch) -> None:
        write_country(tmp_path, "NL")

        def fail(lines: object, count: int) -> object:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(_tables, "islice", fail)
        with pytest.raises(fm.ProblemError, match=r"cannot read .*train.csv: Input/output error"):
            load_countries(tmp_path)

    def test_a_truncated_row_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(fm.ProblemError, match=r"train.csv, line 31: expected 82 values, found \d+"):
            self.broken(tmp_path, lambda old: old[:-80])

    def test_an_empty_line_is_named(self, tmp_path: Path) -> None:
        def change(old: str) -> str:
            lines = old.split("\n")
            return "\n".join([*lines[:11], "", *lines[11:]])

        with pytest.raises(fm.ProblemError, match=r"line 12: expected 82 values, found 0"):
            self.broken(tmp_path, change)

    @pytest.mark.parametrize(
        ("column", "value", "message"),
        [
            (17, "zero", r"line 10: numerical_1 is 'zero', no number"),
            (17, "nan", r"line 10: numerical_1 is nan, not a finite number"),
            (17, "", r"line 10: numerical_1 is '', no number"),
            (2, "-1", r"line 10: categorical_2 is -1, not an integer from 0 to 65535"),
            (2, "0.5", r"line 10: categorical_2 is 0.5, not an integer"),
            (81, "2", r"line 10: conversion is 2, not an integer from 0 to 1"),
        ],
    )
    def test_a_bad_value_is_named(self, tmp_path: Path, column: int, value: str, message: str) -> None:
        def change(old: str) -> str:
            lines = old.split("\n")
            cells = lines[9].split(",")
            cells[column] = value
            lines[9] = ",".join(cells)
            return "\n".join(lines)

        with pytest.raises(fm.ProblemError, match=message):
            self.broken(tmp_path, change)

    def test_other_columns_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(fm.ProblemError, match=r"column 81 must be 'click', found 'clicks'"):
            self.broken(tmp_path, lambda old: old.replace("click,", "clicks,", 1))

    def test_a_file_without_rows_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "AliExpress_NL.csv").write_text(NAMES)
        with pytest.raises(fm.ProblemError, match="no row"):
            load_countries(tmp_path)
        (tmp_path / "AliExpress_NL.csv").write_text("")
        with pytest.raises(fm.ProblemError, match="column 1 must be 'search_id', found nothing"):
            load_countries(tmp_path)

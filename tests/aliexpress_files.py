"""AliExpress in miniature: files of the true schema."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from forkmerge.datasets import _tables, aliexpress

CODES, NUMBERS = [f"categorical_{i}" for i in range(1, 17)], [f"numerical_{i}" for i in range(1, 64)]
NAMES = ",".join(["search_id", *CODES, *NUMBERS, "click", "conversion"])


def values(rows: int, seed: int) -> np.ndarray:
    """Rows of the schema as numbers with six digits, as in the files."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, [10, 4, 7, 2, 21, 7, 50, 8, 8, 2, 2, 2, 2, 2, 2, 2], (rows, 16))
    labels = np.stack([np.arange(rows) % 2, np.arange(rows) % 4 == 1], 1)
    return np.hstack([np.arange(rows)[:, None], codes, rng.random((rows, 63)).round(6), labels])


def text(table: np.ndarray) -> str:
    def cell(column: int, value: float) -> str:
        return repr(float(value)) if 17 <= column < 80 else str(int(value))

    lines = [",".join(cell(column, value) for column, value in enumerate(row)) for row in table]
    return "\n".join([NAMES, *lines]) + "\n"


def write_country(folder: Path, country: str, seed: int = 0, rows: tuple[int, int] = (30, 10)) -> np.ndarray:
    whole = values(sum(rows), seed)
    subfolder = folder / f"AliExpress_{country}"
    subfolder.mkdir()
    (subfolder / "train.csv").write_text(text(whole[: rows[0]]))
    (subfolder / "test.csv").write_text(text(whole[rows[0] :]))
    return whole


def load_countries(folder: Path, *countries: str) -> dict[str, _tables.MappedTable]:
    return aliexpress.load(folder, countries=countries or ("NL",), cache=folder / "cache", check_counts=False)

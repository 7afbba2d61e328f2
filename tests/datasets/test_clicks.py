"""Yes-or-no tasks: items drawn for comparison, losses and rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import forkmerge as fm
from aliexpress_files import load_countries, write_country
from forkmerge.datasets import _clicks, aliexpress
from forkmerge.models import ESMM
from small_packs import RNG


def test_items_drawn_for_comparison_were_never_chosen() -> None:
    rng = RNG(0)
    users, items = rng.integers(0, 5, 100), rng.integers(0, 30, 100)
    drawn = _clicks.draw_others(users, users * 30 + items, 30, 3, "a seed")
    assert drawn[0].tolist() == np.repeat(users, 3).tolist()
    assert not set(zip(users.tolist(), items.tolist(), strict=True)) & set(
        zip(drawn[0].tolist(), drawn[1].tolist(), strict=True)
    )
    again, other = (_clicks.draw_others(users, users * 30 + items, 30, 3, s) for s in ("a seed", "another"))
    assert np.array_equal(drawn[1], again[1])
    assert not np.array_equal(drawn[1], other[1])


def test_users_who_chose_everything_are_refused() -> None:
    with pytest.raises(fm.ProblemError, match="nearly all of the 2 items"):
        _clicks.draw_others(np.zeros(1), np.array([0, 1]), 2, 1)


def test_the_loss_is_the_binary_cross_entropy_of_the_tasks_asked_for(tmp_path: Path) -> None:
    write_country(tmp_path, "NL")
    tables = load_countries(tmp_path)
    stream = aliexpress.problem_of(tables, "NL_CTR").stream_map["NL"]
    model = ESMM(aliexpress.field_sizes(tables.values()), 63, aliexpress.tasks_of("NL"), width=2, hidden=(4,)).eval()
    batch = tables["NL"].read_batch(torch.arange(10))
    losses = stream.losses(model, batch, ["NL_CTCVR"], fm.Context(0, 0))
    logits = model(batch[0], batch[1])["NL_CTCVR"]
    slow = [-(y * p.log() + (1 - y) * (1 - p).log()) for p, y in zip(logits.sigmoid(), batch[2][:, 1], strict=True)]
    assert list(losses) == ["NL_CTCVR"]
    torch.testing.assert_close(losses["NL_CTCVR"], torch.stack(slow).mean())

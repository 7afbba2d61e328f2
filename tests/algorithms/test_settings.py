"""The options of a fork–merge run: defaults that follow the run's length, and values that are refused."""

from __future__ import annotations

import forkmerge as fm


def test_validation_happens_five_times_per_interval_unless_said_otherwise() -> None:
    settings = fm.ForkMerge(interval=20)
    assert settings.validate_every_of(100) == 4
    assert fm.ForkMerge(interval=20, validate_every=7).validate_every_of(100) == 7


def test_the_default_search_follows_the_number_of_branches() -> None:
    settings = fm.ForkMerge()
    assert isinstance(settings.search_for(2), fm.Grid)
    assert isinstance(settings.search_for(3), fm.Greedy)

"""The options of a fork–merge run: defaults that follow the run's length, and values that are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

import forkmerge as fm
from problems import Refuse


def test_validation_happens_five_times_per_interval_unless_said_otherwise() -> None:
    settings = fm.ForkMerge("mixed", interval=20)
    assert settings.validate_every_of(100) == 4
    assert fm.ForkMerge("mixed", interval=20, validate_every=7).validate_every_of(100) == 7


def test_the_default_search_follows_the_number_of_branches() -> None:
    settings = fm.ForkMerge("mixed")
    assert isinstance(settings.search_for(2), fm.Grid)
    assert isinstance(settings.search_for(3), fm.Greedy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": 0}, "interval must be a positive integer, got 0"),
        ({"checkpoint": "best"}, "checkpoint must be one of last, best_in_interval, best_so_far, got 'best'"),
        ({"bn": "sum"}, "bn must be one of average, recompute, got 'sum'"),
        ({"optimizer_state": "drop"}, "optimizer_state must be one of keep, average, reset, got 'drop'"),
        ({"select": "first"}, "select must be one of last, best, got 'first'"),
        ({"prune_keeps": "all"}, "prune_keeps must be one of target, largest, got 'all'"),
        ({"prune_to": 0}, "prune_to must be a positive integer, got 0"),
        ({"search_examples": -3}, "search_examples must be a positive integer, got -3"),
        ({"validate_every": True}, "validate_every must be a positive integer, got True"),
        ({"bn_batches": 1.5}, r"bn_batches must be a positive integer, got 1\.5"),
        ({"auxiliary_scale": 0}, "auxiliary_scale must be positive and finite, got 0"),
        ({"auxiliary_scale": math.nan}, "auxiliary_scale must be positive and finite, got nan"),
        ({"auxiliary_scale": "3"}, "auxiliary_scale must be positive and finite, got '3'"),
        ({"refit": "perhaps"}, "refit must be True or False, got 'perhaps'"),
        ({"floor": 1}, "floor must be True or False, got 1"),
        ({"keep_branches": None}, "keep_branches must be True or False, got None"),
        ({"search": "gird"}, r"unknown search 'gird'\. Did you mean 'grid'"),
        ({"search": 3}, "search must be a search, its name or"),
    ],
)
def test_impossible_options_of_the_algorithm(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fm.ProblemError, match=message):
        fm.ForkMerge(**{"mixtures": "mixed", **options})


@pytest.mark.parametrize("algorithm", [fm.Joint, fm.SingleTask])
def test_options_of_the_other_algorithms_are_checked_too(algorithm: Any, refused: Refuse) -> None:
    refused("select must be one of last, best, got 'first'", algorithm(select="first"))
    refused("interval must be a positive integer, got -1", algorithm(interval=-1))
    refused("refit must be True or False, got 'yes'", algorithm(refit="yes"))

"""What a comparison is told: the [compare] table, and options that override it."""

from __future__ import annotations

from typing import Any

import pytest

from forkmerge.errors import ConfigError
from forkmerge.experiments.compare_options import CompareOptions, options_from


def test_without_a_table_the_defaults_stand() -> None:
    assert options_from({}) == CompareOptions()


def test_options_that_are_not_none_override_the_table() -> None:
    table = {"methods": ["stl", "ew[lr=0.1], forkmerge[interval=5,prune_to=2]"], "seeds": 3, "workers": 4}
    options = options_from(table, seeds=[7, 7, 0], workers=None, equal_labels=True)
    assert options.methods == ("stl", "ew[lr=0.1]", "forkmerge[interval=5,prune_to=2]")
    assert options.seeds == (7, 0)
    assert (options.workers, options.equal_labels, options.equal_compute) == (4, True, False)


def test_targets_and_methods_are_words_in_a_list_or_with_commas() -> None:
    assert options_from({"targets": " a, b ,a"}).targets == ("a", "b")
    assert options_from({"targets": ["a,b", "c"]}).targets == ("a", "b", "c")
    assert options_from({"tune": {"lr": (0.1, 0.3)}}).tune == {"lr": [0.1, 0.3]}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], r"\[compare\] must be a table"),
        ({"sedes": 3}, r"\[compare\]: unknown key 'sedes'. Did you mean 'seeds'"),
        ({"methods": 3}, "methods must be a string or a list of strings, got 3"),
        ({"methods": " , "}, "--methods names no method: write e.g. --methods stl,ew,forkmerge"),
        ({"targets": ""}, "--targets names no task: write e.g. --targets all"),
        ({"seeds": 0}, "at least one seed"),
        ({"seeds": []}, "at least one seed"),
        ({"seeds": [1, -1]}, "at least one seed"),
        ({"seeds": True}, "at least one seed"),
        ({"tune": [1]}, "tune must be a table of lists"),
        ({"tune": {"lr": "0.1"}}, "--tune lr has no values"),
        ({"tune": {"lr": []}}, "--tune lr has no values"),
        ({"tune_seeds": 3, "seeds": 2}, "tune_seeds must be from 1 to the number of seeds, 2, got 3"),
        ({"tune_seeds": 0}, "tune_seeds must be a positive integer, got 0"),
        ({"workers": True}, "workers must be a positive integer, got True"),
        ({"equal_labels": 1}, "equal_labels must be true or false, got 1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(table: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options_from(table)

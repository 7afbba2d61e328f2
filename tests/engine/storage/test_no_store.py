"""A run without a folder keeps nothing, and says so where something is asked back."""

from __future__ import annotations

import inspect

import pytest

from forkmerge.engine.storage.no_store import NoStore
from forkmerge.engine.storage.run_folder import RunFolder
from forkmerge.errors import StoreError


def test_what_is_given_to_it_is_forgotten() -> None:
    with NoStore() as store:
        store.record({"event": "step"})
        store.save({"step": 1}, 1)
        store.keep_branches([1], 1)
        store.finish({"status": "finished"}, {})
        assert (store.load(), store.result(), list(store.records()), store.path) == (None, None, [], None)


def test_what_was_forgotten_is_not_made_up() -> None:
    store = NoStore()
    with pytest.raises(StoreError, match="branches of round 3 were not kept: give the run a folder"):
        store.load_branches(3)
    with pytest.raises(StoreError, match="model was not kept: give the run a folder"):
        store.model_tensors()


def test_it_is_called_as_a_folder_is() -> None:
    for name, method in inspect.getmembers(NoStore, inspect.isfunction):
        if not name.startswith("_"):
            theirs = inspect.signature(getattr(RunFolder, name)).parameters
            assert list(inspect.signature(method).parameters) == list(theirs)

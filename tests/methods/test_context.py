"""The context of a step as methods know it: an interface, which the engine's own context fulfils."""

from __future__ import annotations

import inspect

import pytest

from forkmerge.engine.training.method_context import StepContext
from forkmerge.methods.context import MethodContext

MEMBERS = {name: value for name, value in vars(MethodContext).items() if not name.startswith("_")}


def test_it_says_what_there_is() -> None:
    assert {"losses", "gradient", "moved", "products", "lr"} <= set(MEMBERS)


@pytest.mark.parametrize("name", [name for name, value in MEMBERS.items() if inspect.isfunction(value)])
def test_the_engines_context_takes_the_same_arguments(name: str) -> None:
    ours, wanted = (inspect.signature(getattr(kind, name)).parameters for kind in (StepContext, MethodContext))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in wanted.values()
    ]

"""What a Ray executor knows of a state or a call: where its rows are, and what they can be made from again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forkmerge.engine.executors.executor import Handle, Tell
from forkmerge.engine.executors.ray.arrays import Arrays
from forkmerge.engine.executors.ray.call_thread import SentState
from forkmerge.engine.executors.state_bytes import Wire, from_wire
from forkmerge.engine.training.state import State


def no_note(value: Any) -> None:
    """Tell nobody."""


@dataclass(eq=False, repr=False)
class RayHandle(Handle):
    """A state in the cluster, or a call and the state that it ends with.

    Args:
        name: What it is.
        payload: What a call is about, pickled.
        inputs: Its states, until it has ended.
        note: Called with what it tells.
        status: "waiting", "done", "failed" or "died".
        value: A call's data, its traceback, or how its worker ended.
        rest: The state without its rows.
        rows: Where its parameter rows are, and
        optimizer_rows: those of its optimizer.
        node: The node that holds them.
        number: Of the call that ended with the optimizer's rows, for the worker that may hold them.
        lender: The state that was put, whose rows this process has until what a call made of it is fetched.
        maker: The call that ended with the parameter rows of a state that was put; None if this process put them.
        weights: These rows, kept here while what is made of them could be lost.
        source: The call that ended with the optimizer's rows of a state that was put, unless they are here.
        made_from: The inputs of a call that has ended, for as long as its optimizer's rows are not here.
        attempts: How often a call was made, or found a state gone that was put for it; submitted again, it counts on.
        are_finite: Whether the optimizer's rows are.
    """

    name: str
    payload: bytes = b""
    inputs: Sequence[RayHandle] = ()
    note: Tell = no_note
    status: str = "waiting"
    value: Any = None
    rest: Wire | None = None
    rows: Any = None
    optimizer_rows: Any = None
    node: str = ""
    number: int | None = None
    lender: State | None = None
    maker: RayHandle | None = None
    weights: Arrays | None = None
    source: RayHandle | None = None
    made_from: Sequence[RayHandle] = ()
    attempts: int = 1
    are_finite: bool = True

    @property
    def spoiler(self) -> RayHandle | None:
        """The call that failed or was lost: itself or, before it can begin, what it waits for."""
        if self.status in ("failed", "died"):
            return self
        return next((spoiler for each in self.inputs if (spoiler := each.spoiler) is not None), None)

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.status == "done" or self.spoiler is not None

    @property
    def depth(self) -> int:
        """How many calls, one after the other, it takes to make the optimizer's rows from what this process has."""
        return sum(1 + each.depth for each in self.made_from[:1]) + (0 if self.source is None else self.source.depth)

    @property
    def step(self) -> int | None:
        """The step of the state, if there is one."""
        return None if self.rest is None else from_wire(self.rest).step

    @property
    def nodes(self) -> list[str]:
        """The nodes that hold its rows, as far as calls left them there."""
        return [each.node for each in (self, self.maker) if each is not None and each.node]

    def die(self, reason: str) -> None:
        """Let a call be one that was lost; only `again` makes it anew."""
        self.status, self.value, self.inputs = "died", reason, ()

    def end_loan(self) -> None:
        """Forget parameter rows of this process that are about to become others; those in the cluster stay."""
        if self.lender is not None:
            self.lender.rows = {}

    def sent(self) -> SentState:
        """The state as it is sent: where it is."""
        assert self.rest is not None, f"{self.name} ended without a state"
        optimizer_rows = [] if self.optimizer_rows is None else [self.optimizer_rows]
        return SentState(self.rest, [self.rows], optimizer_rows, self.number)

    def again(self) -> None:
        """Let a call that has ended be one that waits, with the inputs that it had."""
        self.status, self.inputs, self.note = "waiting", self.made_from, no_note
        self.attempts += 1

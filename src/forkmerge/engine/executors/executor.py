"""Where calls run: the one interface between what a run needs done and the workers that do it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from forkmerge.engine.training.state import State
from forkmerge.errors import WorkerError as WorkerError  # what executors raise

Tell = Callable[[Any], None]
"""What a call uses to say how far it is: anything that pickles."""
Self = TypeVar("Self", bound="Executor")


class WorkerLost(RuntimeError):
    """A worker, or the machine it ran on, is gone, and a call with it.

    Args:
        handle: The call to make again: the one whose result was asked for or, where the state of one of its inputs went
            with the worker, that input.
        reason: How the worker ended.
    """

    def __init__(self, handle: Handle, reason: str) -> None:
        super().__init__(f"{handle.name}: its worker ended with {reason}")
        self.handle, self.reason = handle, reason


class Handle:
    """Stands for a state that was put, or for a call, its data and the state that it ends with.

    A handle belongs to the executor that gave it, and is compared by identity. It keeps what it stands for: dropping it
    lets go of memory, and of a call that has not begun. A state is *spent*, and its handle of no more use, when a call
    that takes it has ended well, or when it has been fetched; a state that one call takes is an input of no other.

    Args:
        name: What it is, for people: on dashboards and in errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name


class Inputs(ABC):
    """The states that a call works on, as its worker sees them."""

    @abstractmethod
    def read(self) -> list[State]:
        """Return all of them; their tensors may be everybody's and are not written to."""

    @abstractmethod
    def take(self) -> State:
        """Return the first one to change it, and to end with it: the state itself, or a copy of it."""

    @abstractmethod
    def scratch(self) -> State:
        """Return parameter rows like those of the first one, of any content, to write to until the call ends."""


@dataclass(frozen=True)
class Answer:
    """What a call gives back.

    Args:
        data: Plain data: anything that pickles, and is small.
        state: The state that it ends with; it takes the place of the first input, which is spent.
    """

    data: Any
    state: State | None = None


Call = Callable[[Any, Inputs, Tell], Answer]
"""`call(payload, inputs, tell) -> answer`: what a worker does. It neither prints nor writes to its worker's files."""


class Executor(ABC):
    """Workers that do calls: in this process, in others, or on other machines, with the same bits.

    A call is a pure function of its payload and its input states, so it does not matter which worker does it, when, or
    whether it is done again. Each worker does one call at a time. Calls begin in the order in which they were submitted
    as workers get free, except that one with an input that is still being computed lets others pass; where `runs_here`,
    a call begins when its result is asked for, and not before. An executor makes no attempt of its own to repeat what
    was lost: `PendingCalls` does that, for all of them.

    All methods are called from one thread of one process: nothing happens behind its back, and notes are given while it
    waits inside `submit`, `result` or `first_done`.

    Attributes:
        workers: How many calls are done at the same time.
        attempts: How often a call is made, at most, where its workers are lost.
        runs_here: Whether calls use this process's own objects; then nothing needs to pickle, and none can be lost.
    """

    workers: int
    attempts: int = 3
    runs_here: ClassVar[bool] = False

    @abstractmethod
    def start(self, make: Callable[[int], Call]) -> None:
        """Say what workers do; called once, before all else.

        Args:
            make: Every worker calls it once, with its position among the workers, for the function that does its calls;
                so does one that takes the place of another. Unless `runs_here` it must pickle: if not, a `ProblemError`
                says so now. What it raises in a worker is raised here as `WorkerError` by the next wait for a result,
                and a worker that cannot even start as `ProblemError`.
        """

    @abstractmethod
    def put(self, state: State) -> Handle:
        """Return a handle of a state as it is now.

        The state is lent: until the calls that read it have ended nobody writes to it; once a call takes it, it has no
        defined content until the handle of the last such call is fetched into it. An executor may move the state's rows
        to memory that workers share, in the state's own dicts, so that nothing is copied the next time.
        """

    @abstractmethod
    def submit(
        self, payload: Any, handles: Sequence[Handle] = (), *, name: str = "call", note: Tell = lambda value: None
    ) -> Handle:
        """Return a handle of a call, without waiting for it.

        Args:
            payload: What the call is about; unless `runs_here` it must pickle.
            handles: Its input states: those that were put, and those with which other calls end, which need not have
                ended yet. If one of these fails or is lost, so is this call.
            name: What it is, for people, e.g. "branch 'joint' at steps 100 to 200".
            note: Called here with None when a worker begins with the call, then with whatever the call tells, in order.
        """

    @abstractmethod
    def result(self, handle: Handle) -> Any:
        """Wait for a call and return its data; asked for once, after which the executor has forgotten it.

        Raises:
            WorkerLost: A worker is gone that did the call or had one of its inputs. Inputs that were put, or came from
                calls on other workers, are as they were: the call can be submitted again.
            WorkerError: The call raised, or its data could not be sent. Where `runs_here`, what the call raised is
                raised as it is. The worker goes on.
        """

    @abstractmethod
    def fetch(self, handle: Handle, into: State) -> None:
        """Make a state the one with which a call ended, whose result was asked for before; the handle is spent.

        Memory changes hands instead of contents where that is possible: the rows that `into` had are the executor's,
        for later calls, and nobody may keep views of them. Rows on another device than the CPU's are written to.

        Raises:
            WorkerLost: The state was lost after the call had ended; the handle that it names is the call to make again.
        """

    @abstractmethod
    def close(self) -> None:
        """End all workers, also those in the middle of a call; may be called again, and before `start`."""

    def first_done(self, handles: Sequence[Handle]) -> Handle:
        """Return the call whose result to ask for next: one that has ended, if need be after a wait for it.

        Where calls are done one at a time that is the first of them; an executor with several workers says better.
        """
        return handles[0]

    def interrupt(self) -> None:  # noqa: B027 (nothing to do is an answer)
        """Ask workers that are in the middle of a call to end it early, if they can; may be called in a handler.

        Where this does nothing, calls that run elsewhere take as long as they take.
        """

    def __enter__(self: Self) -> Self:
        """Return the executor, which is closed at the end of the `with`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all workers."""
        self.close()

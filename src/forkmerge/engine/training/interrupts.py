"""Ctrl-C and SIGTERM held back until the step under way has ended and a checkpoint is written; a second one is not."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE = 5.0  # seconds in which a program that was interrupted should have ended
_NEWS = b"\nstopping after this step, to write a checkpoint; once more ends at once\n"


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C."""


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Handle SIGTERM like Ctrl-C."""
    raise Terminated


class InterruptOnce:
    """The handler of Ctrl-C of a program: it raises KeyboardInterrupt once; more of them, while it ends, do nothing.

    If it has not ended after some seconds, one more ends it at once: what is on the disk is whole at any moment.
    """

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a SIGINT."""
        now = time.monotonic()
        if self.first is None:
            self.first = now
            raise KeyboardInterrupt
        if now - self.first > _PATIENCE:
            os._exit(128 + number)


class _Request:
    """What this process was asked for; signals belong to a process, so there is one."""

    number: int | None = None
    handlers: dict[int, Any] = {}  # noqa: RUF012 (those that were there before, replaced as a whole)


def is_stop_requested() -> bool:
    """Whether training is to end at the next step."""
    return _Request.number is not None


def request_stop(number: int, frame: FrameType | None) -> None:
    """Ask this process to end its training at the next step: the handler of worker processes."""
    _Request.number = number


def hear_interrupts() -> None:
    """Let a SIGINT end the training of this process at its next step; only a main thread can have handlers."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, request_stop)


@contextmanager
def held_back(forward: Callable[[], None]) -> Iterator[None]:
    """Hold the first Ctrl-C or SIGTERM inside back until `stop_now` is called.

    Only where it would end the program, by Python's handler or Ray's: whoever has one of their own keeps it. Other
    threads than the main one cannot have handlers, so there nothing is held back.

    Args:
        forward: Called when there is one, to ask worker processes, too.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    mine = {int(number): handler for number, handler in before.items() if _ends_program(handler)}
    if threading.current_thread() is not threading.main_thread() or not mine:
        yield
        return
    owner = os.getpid()

    def hold(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a process that reads examples, forked from this one
            return
        if is_stop_requested():
            stop_now(number)
        _Request.number = number
        if number == signal.SIGINT:  # somebody is watching
            with suppress(OSError):
                os.write(2, _NEWS)  # nothing that is buffered may be used in a handler
        forward()

    _Request.number, _Request.handlers = None, mine
    try:
        for number in mine:
            signal.signal(number, hold)
        yield
    finally:
        _restore()


def stop_now(number: int | None = None) -> None:
    """Let the signal that was held back take effect: end the program, or raise KeyboardInterrupt."""
    number, handlers = number or _Request.number, _Request.handlers
    if number is None:
        return
    _restore()
    handler = handlers[number]
    if callable(handler) and handler is not signal.SIG_DFL:
        handler(number, None)
    signal.raise_signal(number)


def _ends_program(handler: Any) -> bool:
    if handler in (signal.default_int_handler, signal.SIG_DFL, terminate) or isinstance(handler, InterruptOnce):
        return True
    return str(getattr(handler, "__module__", "")).split(".")[0] == "ray"  # ray.init sets one for SIGTERM


def _restore() -> None:
    for number, handler in _Request.handlers.items():
        signal.signal(number, handler)
    _Request.number, _Request.handlers = None, {}

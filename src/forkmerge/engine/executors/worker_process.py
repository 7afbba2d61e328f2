"""What a worker process does: it waits for jobs, does them, and says what came of each, also of those that fail."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from typing import Any

from forkmerge.engine.executors.executor import Tell
from forkmerge.engine.executors.lost_output import tolerate_lost_output
from forkmerge.engine.executors.resources import is_shortage, shortage
from forkmerge.engine.executors.shared_memory import Memory, Parcel, receive, send
from forkmerge.errors import ResourceError, shows_all_frames, user_traceback

Handler = Callable[[Any, list[Memory], Tell], tuple[Any, list[Memory]]]
"""`handler(job, memory, tell) -> (answer, memory)`: does a job in a worker process."""

BROKEN = (EOFError, OSError, pickle.UnpicklingError)
"""What is raised at one end of a pipe when the other has died."""


def serve(connection: Connection[Any, Any]) -> None:
    """Make what does the jobs, and do them until the parent ends or closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    tolerate_lost_output()
    sys.stdout = sys.stderr  # standard output is the parent's, for results
    send(connection, ("up", None))
    try:
        (index, places), memories = receive(connection, private=True)
    except (*BROKEN, MemoryError, ResourceError) as error:
        if is_shortage(error):
            _say_lost(connection, error)
        return  # or the run ended before it began
    try:
        handler: Handler = Parcel.open(places, memories[0])(index)
    except Exception as error:
        _fail(connection, error)
        return
    send(connection, ("ready", None))
    while True:
        try:
            job, memories = receive(connection)
        except (*BROKEN, MemoryError, ResourceError) as error:
            if is_shortage(error):
                _say_lost(connection, error)
            return
        try:
            answer, made = handler(job, memories, lambda value: send(connection, ("news", value)))
            send(connection, ("done", answer), made)
        except Exception as error:
            if not _fail(connection, error):
                return


def _fail(connection: Connection[Any, Any], error: Exception) -> bool:
    """Send an error, as text: not every exception survives the way back; False if the process had better end."""
    own = user_traceback(error)
    if isinstance(error, ResourceError) or (own is None and is_shortage(error)):
        _say_lost(connection, error)
        return False
    send(connection, ("failed", own if own and not shows_all_frames() else traceback.format_exc()))
    return True


def _say_lost(connection: Connection[Any, Any], error: BaseException) -> None:
    with suppress(OSError):
        send(connection, ("lost", str(shortage("it has too little of something", error)).rstrip(".")))


def _end_with_parent() -> None:
    """Wait for the parent's end: killed outright, it cannot end its workers, which would wait for work for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

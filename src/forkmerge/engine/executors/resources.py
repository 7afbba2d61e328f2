"""What the machine must have for worker processes: files counted beforehand, and one clear error where it runs out."""

from __future__ import annotations

import errno
import math
import os

from forkmerge.errors import ProblemError, ResourceError

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]

_ADVICE = {
    errno.EMFILE: "raise the limit of open files with ulimit -n, or use fewer workers",
    errno.ENFILE: "the machine has as many files open as it can: end other programs, or use fewer workers",
    errno.ENOMEM: "free some memory, or use fewer workers",
    errno.ENOBUFS: "free some memory, or use fewer workers",
    errno.ENOSPC: "free some memory, or use fewer workers",
    errno.EAGAIN: "the limit of processes is reached (ulimit -u): end other programs, or use fewer workers",
}
_TORCH_HAS_NO_MEMORY = ("can't allocate memory", "not enough memory")  # on Linux and macOS, and on Windows
_PER_MEMORY = 2  # Python's map of a file keeps the file open a second time
_PER_WORKER = 8  # its pipe and its end's sentinel, and what it takes for a moment to start one or to send something
_MORE = 64  # the record, checkpoints, data sets, libraries


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that the machine has nothing left of something."""
    is_known = isinstance(error, ResourceError) or (isinstance(error, OSError) and error.errno in _ADVICE)
    return is_known or is_out_of_memory(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, which may be torch's, says that there is no memory left."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, of a GPU
        return True
    return type(error) is RuntimeError and any(words in str(error) for words in _TORCH_HAS_NO_MEMORY)


def shortage(doing: str, error: BaseException) -> ResourceError:
    """Return the one error of a shortage.

    Args:
        doing: What could not be done.
        error: Why: an `is_shortage`.
    """
    if isinstance(error, ResourceError):
        return error
    number = error.errno if isinstance(error, OSError) else errno.ENOMEM
    return ResourceError(f"{doing}: {os.strerror(number or 0).lower()}. {_capital(_ADVICE[number or errno.ENOMEM])}.")


def check_descriptors(rows: int, branches: int, workers: int) -> None:
    """Refuse a run whose branches need more open files than a process of this user may have.

    Args:
        rows: Rows of one branch, each of which is a file in memory that several processes hold.
        branches: How many branches a run holds.
        workers: How many processes train them, each in a spare one.
    """
    if resource is None or workers < 2:
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # What a call ends with is a branch for a moment, too: until the one that it began with is given back.
    needed = _PER_MEMORY * rows * (branches + 2 * workers) + _PER_WORKER * workers + _MORE
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise ProblemError(
            f"{branches} branches with {workers} workers take up to {needed} open files, and a process may have "
            f"{limit}: type ulimit -n {2 ** math.ceil(math.log2(needed))} first, or use workers=1."
        )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]

"""The Ray actor behind a worker, sent by value: it says which versions its node has before it imports any of them."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import ray


def actor_class() -> Any:
    """Return the class of actors; nothing of this package is needed to make one."""

    class ForkMergeWorker:
        """Does calls, one at a time, in a thread of its own; another thread listens meanwhile."""

        def facts(self) -> tuple[dict[str, str], str, int]:
            """Return the versions of this node's packages, the node's id and address, and the process."""
            import platform
            from importlib.metadata import PackageNotFoundError, version

            versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
            with suppress(PackageNotFoundError):
                versions["torch"] = version("torch")
            with suppress(ImportError):
                from forkmerge._version import __version__

                versions["forkmerge"] = __version__
            return versions, ray.get_runtime_context().get_node_id(), os.getpid()

        def prepare(self, index: int, make: list[Any], path: list[str], folder: str) -> tuple[str, str | None]:
            """Make what does the calls, with the driver's modules where this node has them; or say why that failed."""
            import sys

            sys.path += [each for each in path if each not in sys.path]
            if not ray.get_runtime_context().runtime_env.get("working_dir"):
                with suppress(OSError):  # it may be another machine
                    os.chdir(folder)
            from forkmerge.engine.executors.ray.call_thread import CallThread

            self.calls = getattr(self, "calls", None) or CallThread()
            return self.calls.prepare(index, make[0])

        def do(self, message: Any) -> Any:
            """Do a call; what it tells, and what comes of it, are the items of a stream."""
            yield from self.calls.stream(message)

        def release(self) -> None:
            """Forget what does the calls."""
            self.calls.release()

        @ray.method(concurrency_group="listen")  # type: ignore[untyped-decorator]  # Ray's
        def interrupt(self) -> None:
            """End the training under way at its next step."""
            self.calls.interrupt()

    return ray.remote(concurrency_groups={"listen": 1}, max_restarts=0, max_task_retries=0)(ForkMergeWorker)

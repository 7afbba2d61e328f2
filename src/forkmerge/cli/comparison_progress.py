"""How far the runs of a comparison, or the pieces of a diagnosis, are, from the events that either passes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forkmerge.cli.progress import ProgressView


class ComparisonView(ProgressView):
    """Where a comparison stands: how many of its runs have ended, and how many failed."""

    runs = ended = failed = 0
    _phase = 0  # tuning, then the runs that are reported, at the pace of both

    def take(self, event: Mapping[str, Any]) -> str | None:
        """Take in an event and return the line that it deserves, if any."""
        kind, key = event["event"], (self._phase, event.get("index", -1))
        if kind == "begin":
            self.runs, self.ended, self._phase = event["runs"], event["ended"], self._phase + 1
            for index, (method, work) in enumerate(zip(event["kinds"], event["work"], strict=True)):
                self.progress.add((self._phase, index), method, work)
            kept = f", {event['ended']} of them done already" if event["ended"] else ""
            return f"{event['runs']} runs{kept}" if event["runs"] else None
        if kind == "start":
            self.progress.start(key)
        elif kind == "progress":
            self.progress.advance(key, event["steps"])
        elif kind == "end":
            return self._end(event, key)
        return None

    def _end(self, event: Mapping[str, Any], key: tuple[int, int]) -> str:
        self.ended += 1
        if event["error"] is None:
            self.progress.end(key)
        else:
            self.failed += 1
            self.progress.drop(key)
        result = event["result"] if event["error"] is None else f"failed: {event['error']}"
        status = "  ".join(part for part in (self.stand(), self.progress.time_left) if part)
        return "  ".join(part for part in (event["title"], result, f"({status})") if part)

    def stand(self) -> str:
        """Return how many runs have ended."""
        return f"{self.ended}/{self.runs} runs" + (f", {self.failed} failed" if self.failed else "")

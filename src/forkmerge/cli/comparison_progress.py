"""How far the runs of a comparison, or the pieces of a diagnosis, are, from the events that either passes on."""

from __future__ import annotations

from forkmerge.algorithms.events.progress import ProgressView
from forkmerge.algorithms.events.run_events import Event
from forkmerge.experiments.events import JobEnded, JobProgress, JobsPlanned, JobStarted


class ComparisonView(ProgressView):
    """Where a comparison stands: how many of its runs have ended, and how many failed."""

    runs = ended = failed = 0
    _phase = 0  # tuning, then the runs that are reported, at the pace of both

    def take(self, event: Event) -> str | None:
        """Take in an event and return the line that it deserves, if any."""
        if isinstance(event, JobsPlanned):
            self.runs, self.ended, self._phase = event.jobs, event.ended, self._phase + 1
            for index, (method, work) in enumerate(zip(event.kinds, event.work, strict=True)):
                self.progress.add((self._phase, index), method, work)
            kept = f", {event.ended} of them done already" if event.ended else ""
            return f"{event.jobs} runs{kept}" if event.jobs else None
        if isinstance(event, JobStarted):
            self.progress.start((self._phase, event.index))
        elif isinstance(event, JobProgress):
            self.progress.advance((self._phase, event.index), event.steps)
        elif isinstance(event, JobEnded):
            return self._end(event, (self._phase, event.index))
        return None

    def _end(self, event: JobEnded, key: tuple[int, int]) -> str:
        self.ended += 1
        if event.error is None:
            self.progress.end(key)
        else:
            self.failed += 1
            self.progress.drop(key)
        result = event.result if event.error is None else f"failed: {event.error}"
        status = "  ".join(part for part in (self.stand(), self.progress.time_left) if part)
        return "  ".join(part for part in (event.title, result, f"({status})") if part)

    def stand(self) -> str:
        """Return how many runs have ended."""
        return f"{self.ended}/{self.runs} runs" + (f", {self.failed} failed" if self.failed else "")

"""Log a run to TensorBoard, interrupt it, and resume it: the curves are those of a run that nobody interrupted.

WandB("some-id") and MLflow() take the place of TensorBoard(...) as they are.
"""

import tempfile
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import forkmerge as fm
from forkmerge.algorithms.events import Event, Merged
from forkmerge.datasets.digits import recipe
from forkmerge.integrations.loggers import TensorBoard


def train(folder: Path, interrupt_at: int | None = None) -> None:
    job = recipe()

    def follow(event: Event) -> None:
        log(event)
        if isinstance(event, Merged) and event.step == interrupt_at:
            raise KeyboardInterrupt

    with TensorBoard(folder / "logs") as log:
        fm.ForkMerge(interval=20).fit(
            job.problem,
            model=job.model,
            optimizer=job.optimizer,
            steps=80,
            folder=folder / "run",
            resume=True,
            on_event=follow,
            progress=False,
        )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        try:
            train(Path(name), interrupt_at=60)
        except KeyboardInterrupt:
            print("interrupted; going on")
        train(Path(name))
        events = EventAccumulator(str(Path(name) / "logs")).Reload()
        for tag in events.Tags()["scalars"]:
            if tag.startswith(("coefficient/", "relevance/", "score")):
                print(tag, [(point.step, round(point.value, 3)) for point in events.Scalars(tag)])

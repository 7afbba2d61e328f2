"""One model of progress, with the time left."""

from __future__ import annotations

from forkmerge.algorithms.events.progress import Progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_nothing_is_left_of_no_work_and_nothing_known_before_anything_was_done():
    progress = Progress()
    assert (progress.seconds_left, progress.share, progress.time_left) == (None, None, "")
    progress.add("a", "steps", 10)
    assert (progress.seconds_left, progress.share, progress.time_left) == (None, None, "")


def test_kinds_go_at_their_own_pace_and_several_processes_share_the_rest():
    progress = Progress(workers=2)
    for key, kind in (("a", "slow"), ("b", "fast"), ("c", "fast"), ("d", "unseen")):
        progress.add(key, kind, 10)
    progress.spend("a", 5, 20.0)
    progress.spend("b", 10, 10.0)
    # a: 5 left at 4 s; c: 10 at 1 s; d: 10 at the mean, 30 s for 15.
    assert progress.seconds_left == (20 + 10 + 20) / 2
    assert progress.share == 15 / (15 + 25)
    assert progress.time_left == "25 s left"
    for key in ("c", "d"):
        progress.drop(key)
    assert progress.seconds_left == 20.0  # one part is left, which two processes do not share
    progress.end("a")
    assert (progress.seconds_left, progress.share, progress.time_left) == (0.0, 1.0, "")


def test_a_part_under_way_is_believed_to_go_on_until_it_is_overdue():
    clock = Clock()
    progress = Progress(clock=clock)
    for key in "ab":
        progress.add(key, "steps", 10)
        progress.start(key)
        clock.now += 10
        if key == "a":
            progress.end(key)
    clock.now = 17.0
    assert progress.seconds_left == 3.0
    clock.now = 30.0
    assert progress.seconds_left == 0.0

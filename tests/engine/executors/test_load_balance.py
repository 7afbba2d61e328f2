"""The division of a round among workers: all steps, in about the shortest possible time, with few cuts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forkmerge.engine.executors.load_balance import divide


def simulate(steps: list[int], costs: list[float], workers: int) -> float:
    """The time of a round: a free worker takes the first part whose branch nobody has in hand."""
    waiting, now, running = divide(steps, costs, workers), 0.0, dict[int, float]()
    done = dict.fromkeys(range(len(steps)), 0)
    while waiting or running:
        for part in list(waiting):
            if len(running) < workers and part.branch not in running:
                waiting.remove(part)
                running[part.branch] = now + part.steps * costs[part.branch]
                done[part.branch] += part.steps
        branch = min(running, key=running.__getitem__)
        now = running.pop(branch)
    assert done == dict(enumerate(steps))
    return now


class TestDivide:
    @given(st.lists(st.tuples(st.integers(1, 600), st.floats(0.1, 10)), min_size=1, max_size=12), st.integers(1, 6))
    def test_all_steps_are_done_in_about_the_shortest_possible_time(
        self, branches: list[tuple[int, float]], workers: int
    ) -> None:
        steps, costs = [count for count, _ in branches], [cost for _, cost in branches]
        work = [count * cost for count, cost in branches]
        ideal = max(*work, sum(work) / workers) if len(work) > 1 else work[0]
        slack = 0.13 * ideal + 2 * max(costs)  # pieces too short to be worth it, and whole steps
        assert simulate(steps, costs, workers) <= ideal + slack

    def test_nothing_is_cut_without_need(self) -> None:
        assert [part.steps for part in divide([100] * 4, [1.0] * 4, 2)] == [100] * 4
        assert [part.steps for part in divide([100] * 2, [1.0, 3.0], 2)] == [100] * 2

    def test_three_branches_on_two_workers_take_one_and_a_half(self) -> None:
        assert simulate([100] * 3, [1.0] * 3, 2) == 150

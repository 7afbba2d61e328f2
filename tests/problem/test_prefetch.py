"""Batches of the next steps, read by a thread and copied beside the step: in order and with the same bits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import forkmerge as fm
from _asserts import assert_same_run
from batch_data import CPU, Columnar, own_threads
from forkmerge.problem import prefetch
from forkmerge.problem.definition import Evaluation, Stream
from forkmerge.problem.prefetch import SideStream, read_ahead
from problems import evaluation, fit, noisy_net, shared_losses, shared_problem


class TestReadAhead:
    def test_results_come_in_order_and_at_most_a_few_are_waiting(self) -> None:
        started: list[int] = []
        feed = read_ahead(lambda item: started.append(item) or item * item, range(20), depth=2)  # type: ignore[func-returns-value]
        for item, result in enumerate(feed):
            assert result == item * item
            assert len(started) <= item + 3
        assert started == list(range(20))
        assert not own_threads()

    def test_an_error_is_raised_where_its_item_is_due(self) -> None:
        feed = read_ahead(lambda item: 1 // (3 - item), range(20))
        assert [next(feed) for _ in range(3)] == [0, 0, 1]
        with pytest.raises(ZeroDivisionError):
            next(feed)
        assert not own_threads()

    def test_closing_ends_the_thread(self) -> None:
        feed = read_ahead(lambda item: item, range(20))
        next(feed)
        assert own_threads()
        feed.close()
        assert not own_threads()

    @pytest.mark.parametrize("ending", [RuntimeError, KeyboardInterrupt])
    def test_no_thread_outlives_its_segment(self, ending: type[BaseException]) -> None:
        seen: list[int] = []

        def losses(model: Any, batch: Any, tasks: Any, context: fm.Context) -> Any:
            if context.step == 5:
                seen.append(len(own_threads()))
                raise ending
            return shared_losses(model, batch, tasks, context)

        problem = fm.Problem("tgt", [Stream(Columnar(), losses, ["tgt", "aux", "odd"], 8)], evaluation())
        with pytest.raises(ending):
            fit(fm.ForkMerge("mixed", interval=10), problem)
        assert seen == [1]
        assert not own_threads()

    def test_an_error_of_the_data_set_reaches_the_caller(self) -> None:
        with pytest.raises(OSError, match="the disk is gone"):
            fit(problem=shared_problem(Columnar(fails_at=5)))
        assert not own_threads()

    def test_reading_ahead_changes_no_bit(self) -> None:
        held_out = Columnar(24, 2)
        scored = Evaluation(held_out, evaluation().metrics, evaluation().predict, batch_size=7)
        data = Columnar()
        algorithm = fm.ForkMerge("mixed", interval=4, bn="recompute", bn_batches=3)
        ahead_run = fit(algorithm, shared_problem(data, validation=scored), noisy_net)
        plain = evaluation(batch_size=7)
        plain_run = fit(algorithm, shared_problem(validation=plain), noisy_net)
        assert_same_run(ahead_run, plain_run)
        for dataset in (data, held_out):
            assert any(name.startswith("forkmerge-feed") for name in dataset.threads)
        assert not own_threads()


class FakeStream:
    """Notes what a CUDA stream would be asked for."""

    log: list[str]

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.log.append(f"event on {self.name}")
        return "event"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


def test_batches_for_a_gpu_are_pinned_copied_beside_the_step_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(FakeStream, "log", log, raising=False)

    @contextmanager
    def entered(stream: FakeStream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield
        log.append(f"off {stream.name}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream("main"))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: log.append("pin") or tensor)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: log.append(f"{stream.name} uses a tensor"))
    device = torch.device("meta")  # stands for a device that is not the host
    side = SideStream(device)
    there = torch.zeros(2, device=device)
    sent = side.send(lambda: [torch.ones(3), {"there": there}, "text"])
    batch, mapping, text = side.receive(sent)
    assert (batch.device, mapping["there"] is there, text) == (device, True, "text")
    assert log == [
        "side waits for main",
        "on side",
        "pin",
        "event on side",
        "off side",
        "main waits for event",
        "main uses a tensor",
        "main uses a tensor",
    ]


def test_objects_that_move_themselves_are_moved_by_the_training_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def to(self, device: Any) -> str:
            return f"moved by {threading.current_thread().name}"

    batch = prefetch.change(
        [Graph(), torch.ones(1)], lambda x: SideStream._copy(None, x) if isinstance(x, Graph) else x
    )  # type: ignore[arg-type]
    assert isinstance(batch[0], Graph)
    assert prefetch.move(batch, CPU)[0] == "moved by MainThread"


@pytest.mark.parametrize("kind", [list, tuple])
def test_tensors_are_moved_inside_containers(kind: Any) -> None:
    batch = {"x": kind([torch.ones(2), "text"]), "y": {"z": torch.zeros(1)}}
    moved = prefetch.move(batch, torch.device("meta"))
    assert moved["x"][0].device.type == moved["y"]["z"].device.type == "meta"
    assert moved["x"][1] == "text"
    assert type(moved["x"]) is kind

"""Batches: whole ones by one indexed read, those of the next steps read prefetch, always the bits of the plain way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset, default_collate

import forkmerge as fm
from _asserts import assert_same_bits, facts
from forkmerge.problem import prefetch
from forkmerge.problem.batch_reader import reader_of
from forkmerge.problem.batches import batches, evaluation_batches
from forkmerge.problem.definition import Evaluation, Stream
from forkmerge.problem.prefetch import SideStream, read_ahead
from problems import evaluation, examples, fit, noisy_net, shared_losses, shared_problem

CPU = torch.device("cpu")
COLUMNS = examples(12, 1)
TENSORS = TensorDataset(*COLUMNS)


class Columnar(Dataset[Any]):
    """A user's own data set with whole batches; notes which threads read them."""

    def __init__(self, count: int = 16, seed: int = 1, fails_at: int = 1 << 30) -> None:
        self.columns = examples(count, seed)
        self.fails_at, self.threads = fails_at, list[str]()

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("read example by example")

    def read_batch(self, indices: Tensor) -> list[Tensor]:
        if len(self.threads) >= self.fails_at:
            raise OSError("the disk is gone")
        self.threads.append(threading.current_thread().name)
        return [column[indices] for column in self.columns]


class Opaque(Dataset[Any]):
    """Hides what a data set is made of."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


def stream(dataset: Any, **options: Any) -> Stream:
    return Stream(dataset, shared_losses, ["tgt"], 5, **options)


def flat(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    return [tensor for part in (batch.values() if isinstance(batch, dict) else batch) for tensor in flat(part)]


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("forkmerge-feed")]


READABLE: dict[str, Callable[[], Any]] = {
    "tensors": lambda: TENSORS,
    "a subset": lambda: Subset(TENSORS, [3, 1, 4, 1, 5, 9]),
    "a subset of a subset": lambda: Subset(Subset(TENSORS, [3, 1, 4, 1, 5, 9]), range(1, 5)),
    "a subset by tensor": lambda: Subset(TENSORS, torch.tensor([7, 2, 0])),  # type: ignore[arg-type]
    "a subset by array": lambda: Subset(TENSORS, np.array([7, 2, 0])),  # type: ignore[arg-type]
    "a subset from the end": lambda: Subset(TENSORS, [-1, -12, 3]),
    "a random split": lambda: torch.utils.data.random_split(TENSORS, [4, 8], torch.Generator().manual_seed(0))[1],
    "a concatenation": lambda: ConcatDataset([TENSORS, Subset(TENSORS, [2, 2]), TensorDataset(*examples(7, 5))]),
    "a stack": lambda: StackDataset(COLUMNS[0], Subset(TENSORS, range(12))),
    "named columns": lambda: StackDataset(x=COLUMNS[0], y=COLUMNS[1]),
    "named columns, joined": lambda: ConcatDataset([StackDataset(x=COLUMNS[0], y=COLUMNS[1])] * 2),
}


class TestWholeBatches:
    @pytest.mark.parametrize("name", READABLE)
    def test_a_whole_batch_is_what_collating_its_examples_gives(self, name: str) -> None:
        dataset = READABLE[name]()
        reader = reader_of(stream(dataset))
        assert reader is not None
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            indices = torch.randint(len(dataset), (9,), generator=generator)
            whole, collated = reader.read(indices), default_collate([dataset[i] for i in indices.tolist()])
            assert type(whole) is type(collated)
            for one, other in zip(flat(whole), flat(collated), strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one, other)

    @pytest.mark.parametrize("name", READABLE)
    def test_no_thread_reads_tensors_that_are_where_the_model_is(self, name: str) -> None:
        reader = reader_of(stream(READABLE[name]()))
        assert reader is not None
        assert not reader.is_worth_a_thread(CPU)
        assert reader.is_worth_a_thread(torch.device("cuda:0"))

    def test_code_of_the_users_is_never_passed_over(self) -> None:
        class Twice(TensorDataset):
            def __getitem__(self, index: Any) -> Any:
                return tuple(2 * column for column in super().__getitem__(index))

        class Other(Columnar):
            def __getitem__(self, index: int) -> Any:
                return self.columns[0][index]

        class Both(Other):
            def read_batch(self, indices: Tensor) -> Any:
                return self.columns[0][indices]

        assert reader_of(stream(Columnar())) is not None
        assert reader_of(stream(Both())) is not None
        for dataset in (Twice(*COLUMNS), Other(), Opaque(TENSORS), Subset(Other(), [1]), StackDataset(Twice(*COLUMNS))):
            assert reader_of(stream(dataset)) is None
        assert reader_of(stream(ConcatDataset([TENSORS, Opaque(TENSORS)]))) is None
        assert reader_of(stream(TENSORS, collate_fn=default_collate)) is None

    def test_a_subset_that_has_grown_is_read_as_it_is_now(self) -> None:
        chosen = [0, 1]
        reader = reader_of(stream(Subset(TENSORS, chosen)))
        assert reader is not None
        chosen[0] = 7
        assert torch.equal(reader.read(torch.tensor([0]))[0], COLUMNS[0][7:8])

    def test_joined_data_sets_of_different_form_get_one_clear_error(self) -> None:
        reader = reader_of(stream(ConcatDataset([TENSORS, TensorDataset(COLUMNS[0])])))
        assert reader is not None
        assert len(reader.read(torch.tensor([12, 13]))) == 1
        with pytest.raises(fm.ProblemError, match="different form: 1 columns, 2 columns"):
            reader.read(torch.tensor([0, 12]))

    @pytest.mark.parametrize("name", ["a subset", "a concatenation"])
    def test_a_run_has_the_bits_of_reading_example_by_example(self, name: str) -> None:
        dataset = READABLE[name]()
        held_out = Subset(TensorDataset(*examples(30, 2)), range(2, 26))
        runs = []
        for hide in (Opaque, lambda x: x):
            scored = Evaluation(hide(held_out), evaluation().metrics, evaluation().predict, batch_size=10)
            algorithm = fm.ForkMerge(interval=4, refit=True)
            runs.append(fit(algorithm, shared_problem(hide(dataset), validation=scored), noisy_net))
        assert_same_bits(*runs)
        assert facts(runs[0]) == facts(runs[1])


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
            fit(fm.ForkMerge(interval=10), problem)
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
        algorithm = fm.ForkMerge(interval=4, bn="recompute", bn_batches=3)
        ahead_run = fit(algorithm, shared_problem(data, validation=scored), noisy_net)
        plain = evaluation(batch_size=7)
        plain_run = fit(algorithm, shared_problem(validation=plain), noisy_net)
        assert_same_bits(ahead_run, plain_run)
        assert facts(ahead_run) == facts(plain_run)
        for dataset in (data, held_out):
            assert any(name.startswith("forkmerge-feed") for name in dataset.threads)
        assert not own_threads()

    def test_evaluation_batches_follow_the_order_given(self) -> None:
        order = [5, 3, 11, 0]
        for dataset in (Columnar(12, 1), TENSORS, Opaque(TENSORS)):
            scored = Evaluation(dataset, fm.accuracy, batch_size=3)
            parts = list(evaluation_batches(scored, order, 0, CPU))
            assert [len(x) for x, _ in parts] == [3, 1]
            assert torch.equal(torch.cat([x for x, _ in parts]), COLUMNS[0][order])


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


def test_batches_of_a_stream_are_those_of_its_positions() -> None:
    for dataset in (TENSORS, Opaque(TENSORS), Columnar(12, 1)):
        first = [flat(batch) for batch in batches("s", stream(dataset), range(6), 3, CPU)]
        again = [flat(batch) for batch in batches("s", stream(dataset), [4, 2], 3, CPU)]
        for one, position in zip(again, (4, 2), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, first[position], strict=True))

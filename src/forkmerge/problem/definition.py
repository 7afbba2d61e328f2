"""A problem: the target's name, the training streams, the validation and the sealed test evaluations.

Nothing here knows how training works. A task is addressed by its name everywhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from forkmerge.errors import ProblemError, check_count, check_name, is_number, unknown_name
from forkmerge.problem.display import Displayed, display_problem
from forkmerge.problem.model_outputs import predict_batch
from forkmerge.problem.randomness import derive
from forkmerge.problem.split_dataset import check_dataset, join, part, size_of

Losses = Callable[[nn.Module, Any, Sequence[str], "Context"], Mapping[str, "Tensor | None"]]
Predict = Callable[[nn.Module, Any], "tuple[Any, Any]"]


@runtime_checkable
class Metric(Protocol):
    """What the library needs of a torchmetrics metric."""

    higher_is_better: bool | None

    def update(self, *args: Any) -> None:
        """Add one batch of predictions and targets."""

    def compute(self) -> Any:
        """Return the value over all batches so far."""

    def reset(self) -> None:
        """Forget all batches."""


@dataclass(frozen=True)
class Context:
    """What a loss function may ask about the step it is called in.

    Args:
        step: The global step.
        seed: The seed of this call; `generator` and the global random states are derived from it.
        cuts: Where declared representations are noted; None where nobody needs them.
    """

    step: int
    seed: int
    cuts: list[tuple[Tensor, Tensor]] | None = None

    @cached_property
    def generator(self) -> torch.Generator:
        """A CPU generator of this call's own: a pure function of seed, stream, step and micro-batch."""
        return torch.Generator().manual_seed(derive(self.seed, "generator"))

    def shared(self, representation: Tensor) -> Tensor:
        """Declare the representation that the heads of all tasks of this batch start from, and return it.

        Gradient methods then pass through every head once and through the encoder once per task. Without it they
        take a full backward pass per task; the result is the same.

        Example: `z = context.shared(model.encoder(x))`, then every head on `z`.
        """
        if self.cuts is None or not representation.requires_grad:
            return representation
        leaf = representation.detach().requires_grad_()
        self.cuts.append((representation, leaf))
        return leaf


@dataclass(frozen=True)
class Stream:
    """Training data that is read together, and the losses computed on it.

    A shared-input problem has one stream serving all tasks; a multi-domain problem one stream per task.

    Args:
        dataset: A map-style data set. `TensorDataset`s, and data sets with a method `read_batch(indices)`, are read
            in whole batches (see `forkmerge.problem.batch_reader`).
        losses: `losses(model, batch, tasks, context) -> {task: scalar loss}`. Only tasks of non-zero weight
            are asked for. A task may be left out, or be None, where the batch has no label for it.
        tasks: Names of the tasks this stream can serve.
        batch_size: Examples per micro-batch.
        collate_fn: How examples become a batch; torch's default where None.
    """

    dataset: Dataset[Any]
    losses: Losses
    tasks: Sequence[str]
    batch_size: int
    collate_fn: Callable[[list[Any]], Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", (self.tasks,) if isinstance(self.tasks, str) else tuple(self.tasks))
        served = ", ".join(map(str, self.tasks))
        check_dataset(f"the stream of {served}", self.dataset)
        try:
            inspect.signature(self.losses).bind(None, None, None, None)
        except TypeError:
            raise ProblemError(
                f"losses of the stream of {', '.join(self.tasks)} must take (model, batch, tasks, context)."
            ) from None
        except ValueError:
            pass  # a callable without a readable signature: the first batch will tell
        if not self.tasks:
            raise ProblemError("a stream must serve at least one task: give `tasks`.")
        check_count(f"the batch size of the stream of {served}", self.batch_size)

    @cached_property
    def size(self) -> int:
        """The number of examples."""
        return size_of(self.dataset)


def predict_pair(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Return (model(inputs), targets) of pairs, and (model(**inputs).logits, labels) of dicts as transformers has."""
    return predict_batch(model, batch)


@dataclass(frozen=True)
class Evaluation:
    """Held-out data of one task and how a model is scored on it.

    Args:
        dataset: A map-style data set, read like a stream's.
        metrics: A metric or `{name: metric}`. A metric is a mean of costs of examples (`MeanCost`, such as
            `accuracy`), a torchmetrics object, fed batch by batch, or a plain callable
            `metric(predictions, targets) -> number` that gets all of them at once.
        predict: `predict(model, batch) -> (predictions, targets)`; data of (input, target) pairs, and of dicts with
            "labels" for a model of transformers, need none.
        batch_size: Examples per forward pass. Where all metrics are `MeanCost`s every pass has this many, or all if
            there are fewer, and a search goes on by one such pass or more: larger ones make it look at more examples.
        collate_fn: How examples become a batch; torch's default where None.
        higher_is_better: `{name: bool}` where a metric does not say so itself (its attribute of that name);
            plain callables count as higher-is-better.
        as_training: The same examples in the form the target's training stream reads, needed for a refit where
            the two forms differ.
    """

    dataset: Dataset[Any]
    metrics: Mapping[str, Any] | Any
    predict: Predict = predict_pair
    batch_size: int = 128
    collate_fn: Callable[[list[Any]], Any] | None = None
    higher_is_better: Mapping[str, bool] = field(default_factory=dict)
    as_training: Dataset[Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.metrics, Mapping):
            name = getattr(self.metrics, "__name__", type(self.metrics).__name__)
            object.__setattr__(self, "metrics", {name: self.metrics})
        if not self.metrics:
            raise ProblemError("an evaluation needs at least one metric.")
        check_dataset("an evaluation", self.dataset)
        if self.as_training is not None:
            check_dataset("as_training of an evaluation", self.as_training)
        check_count("the batch size of an evaluation", self.batch_size)
        for name, said in self.higher_is_better.items():
            if name not in self.metrics:
                raise ProblemError("higher_is_better: " + unknown_name("metric", name, self.metrics))
            if not isinstance(said, bool):
                raise ProblemError(f"higher_is_better of metric {name!r} must be True or False, got {said!r}.")
        for name, metric in self.metrics.items():
            if not isinstance(metric, Metric) and not callable(metric):
                raise ProblemError(f"metric {name!r} must be a torchmetrics object or a callable, got {metric!r}.")

    @cached_property
    def size(self) -> int:
        """The number of examples."""
        return size_of(self.dataset)

    @cached_property
    def directions(self) -> dict[str, int]:
        """+1 for metrics where higher is better, −1 for the others."""
        return {name: 1 if self._is_better_higher(name) else -1 for name in self.metrics}

    def _is_better_higher(self, name: str) -> bool:
        said = self.higher_is_better.get(name, getattr(self.metrics[name], "higher_is_better", True))
        if said is None:
            raise ProblemError(
                f"metric {name!r} does not say whether higher is better: "
                f"pass higher_is_better={{{name!r}: True}} (or False) to Evaluation."
            )
        return bool(said)


@dataclass(frozen=True, repr=False)
class Problem(Displayed):
    """A target task, the data that may help it, and how the target is scored.

    Args:
        target: Name of the target task.
        streams: The training streams, `{name: stream}` or a list.
        validation: The target's evaluation, or `{task: evaluation}` so that any task can be the target.
        test: Like `validation`; sealed: nothing reads it during `fit`.
        weights: Whether a task weight multiplies the task's loss, or is the probability (up to scale) that a step
            trains on that task alone. A method needs all tasks in a step: then weights multiply losses in any case, and
            under "sampling" every stream gives an equal part of its batch, so that a step reads one batch in all.
    """

    target: str
    streams: Mapping[str, Stream] | Sequence[Stream]
    validation: Mapping[str, Evaluation] | Evaluation
    test: Mapping[str, Evaluation] | Evaluation | None = None
    weights: Literal["loss", "sampling"] = "loss"
    display = display_problem

    def __post_init__(self) -> None:
        object.__setattr__(self, "streams", _by_name(self.streams))
        tasks = [task for stream in self.stream_map.values() for task in stream.tasks]
        for task in tasks:
            check_name("task", task)
        if self.target not in tasks:
            raise ProblemError("target: " + unknown_name("task", self.target, dict.fromkeys(tasks)))
        if self.weights not in ("loss", "sampling"):
            raise ProblemError(f"weights must be 'loss' or 'sampling', got {self.weights!r}.")
        for split in ("validation", "test"):
            object.__setattr__(self, split, _by_task(split, getattr(self, split), self.target))
        self._check_sizes()

    def _check_sizes(self) -> None:
        for name, stream in self.stream_map.items():
            if stream.size == 0:
                raise ProblemError(f"the data set of stream {name!r} is empty.")
        if self.target not in self.evaluations("validation"):
            raise ProblemError(
                f"the target {self.target!r} has no validation data: "
                f"pass validation={{{self.target!r}: Evaluation(…)}}."
            )
        if self.target_validation.size == 0:
            raise ProblemError(f"the validation data of the target {self.target!r} is empty.")

    @property
    def stream_map(self) -> dict[str, Stream]:
        """The streams by name."""
        assert isinstance(self.streams, dict)
        return self.streams

    def evaluations(self, split: Literal["validation", "test"]) -> dict[str, Evaluation]:
        """The evaluations of a split by task."""
        value: Mapping[str, Evaluation] = getattr(self, split)
        return dict(value)

    @property
    def tasks(self) -> tuple[str, ...]:
        """All task names: the target first, auxiliaries in the order of the streams."""
        names = dict.fromkeys([self.target])
        for stream in self.stream_map.values():
            names.update(dict.fromkeys(stream.tasks))
        return tuple(names)

    @property
    def auxiliaries(self) -> tuple[str, ...]:
        """All task names but the target's."""
        return self.tasks[1:]

    @property
    def target_validation(self) -> Evaluation:
        """How the target is scored while training."""
        return self.evaluations("validation")[self.target]

    def with_target(self, target: str) -> Problem:
        """Return the same problem with another task as its target."""
        return replace(self, target=target)

    def sealed(self) -> Problem:
        """Return the problem without its test split: what training gets to see."""
        return replace(self, test=None)

    def with_validation_labels(self) -> Problem:
        """Return the problem whose target streams train on training ∪ validation data (for a refit)."""
        evaluation = self.target_validation
        extra = evaluation.dataset if evaluation.as_training is None else evaluation.as_training
        streams = {
            name: replace(stream, dataset=join(stream.dataset, extra)) if self.target in stream.tasks else stream
            for name, stream in self.stream_map.items()
        }
        return replace(self, streams=streams)

    def for_development(self) -> Problem:
        """Return the problem with a third of every task's training data in the place of its test split.

        Settings may be chosen on it as often as one likes: the true test data is not in it.
        """
        test, streams = self.evaluations("test"), {}
        for name, stream in self.stream_map.items():
            kept, held = part(stream.dataset)
            streams[name] = replace(stream, dataset=kept)
            for task in stream.tasks:
                if task in test and test[task].as_training is not None:
                    raise ProblemError(
                        f"the test data of task {task!r} has another form than its training data, so that no part of "
                        "the one can take the place of the other: choose settings without development = true."
                    )
                if task in test:
                    test[task] = replace(test[task], dataset=held)
        return replace(self, streams=streams, test=test)


def check_weight(name: str, task: str, weight: object) -> None:
    """Refuse a task weight that is not a finite number of at least 0."""
    if not is_number(weight) or weight < 0:
        raise ProblemError(f"branch {name!r}: the weight of task {task!r} must be a finite number ≥ 0, got {weight!r}.")


def check_task_weights(problem: Problem, name: str, task_weights: Mapping[str, float]) -> None:
    """Refuse weights for unknown tasks, negative or non-finite weights, and mixtures without any weight."""
    for task, weight in task_weights.items():
        if task not in problem.tasks:
            raise ProblemError(f"branch {name!r}: " + unknown_name("task", task, problem.tasks))
        check_weight(name, task, weight)
    if not any(task_weights.values()):
        raise ProblemError(f"branch {name!r} gives every task weight 0: it would train nothing.")


def _by_name(streams: Mapping[str, Stream] | Sequence[Stream] | Stream) -> dict[str, Stream]:
    several = [streams] if isinstance(streams, Stream) else streams
    for item in several.values() if isinstance(several, Mapping) else several:
        if not isinstance(item, Stream):
            got = f"got {type(item).__name__}: wrap the data set, e.g. Stream(dataset, losses, tasks, batch_size=64)"
            raise ProblemError(f"streams must be {{name: Stream}} or a list of Streams, {got}.")
    if isinstance(several, Mapping):
        return dict(several)
    named = {"+".join(stream.tasks): stream for stream in several}
    if len(named) != len(several):
        raise ProblemError("two streams serve the same tasks: pass streams as {name: stream}.")
    return named


def _by_task(split: str, value: Mapping[str, Evaluation] | Evaluation | None, target: str) -> dict[str, Evaluation]:
    evaluations = dict(value) if isinstance(value, Mapping) else {} if value is None else {target: value}
    for item in evaluations.values():
        if not isinstance(item, Evaluation):
            raise ProblemError(
                f"{split} must be an Evaluation or {{task: Evaluation}}, got {type(item).__name__}: "
                f"wrap the data set, e.g. {split}=Evaluation(dataset, fm.accuracy)."
            )
    return evaluations

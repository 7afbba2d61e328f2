"""Everything that can be found wrong before training starts, each with one clear error."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset

from forkmerge.algorithms.branches.search_checks import check_costs, check_sample
from forkmerge.algorithms.mixtures import check_mixtures, reference_branch, scale_auxiliaries
from forkmerge.engine.merging.layer_groups import LayerGroups
from forkmerge.engine.merging.rules import check_rule
from forkmerge.engine.training.options import Mixture, Training
from forkmerge.engine.training.state import Layout
from forkmerge.errors import ProblemError, check_count, facts_of, unknown_name
from forkmerge.problem.batches import batches
from forkmerge.problem.definition import Context, Problem, Stream
from forkmerge.problem.error_facts import describe, note_moment, note_origin
from forkmerge.problem.labels import (
    CLASSES,
    MISSING,
    example_with,
    extreme_examples,
    label_advice,
    refused_label,
    text_advice,
)
from forkmerge.problem.metrics import Criterion, accuracy
from forkmerge.problem.not_finite import example_not_finite, measure_and_find
from forkmerge.problem.randomness import derive, random_state_kept, set_random_state
from forkmerge.problem.scoring import device_of, measure, modes_kept
from forkmerge.problem.searched_evaluation import of_every_example, reported_directions, search_directions

_MOST_STEPS = 10**15  # which no machine does
_MOST_THREADS = 256  # that a run may ask for on a small machine: as many as it was begun with on a large one


def check_run(problem: Problem, model: nn.Module, training: Training, settings: Any, seed: int) -> None:
    """Refuse a run that could not end well: branches, search, losses of the first batch, the target's metrics.

    Args:
        problem: The sealed problem.
        model: The module; it is left as it was.
        training: Options common to all branches.
        settings: The algorithm's options.
        seed: The run's seed.
    """
    scale = settings.auxiliary_scale
    probes = [scale_auxiliaries(probe, problem.target, scale) for probe in settings.constructor.probes(problem)]
    mixtures = settings.constructor.build(problem, dict.fromkeys((p.name for p in probes), 0.0))
    check_mixtures(problem, mixtures)
    mixtures = [scale_auxiliaries(m, problem.target, settings.auxiliary_scale) for m in mixtures]
    check_mixtures(problem, mixtures)
    check_search(settings, len(settings.rotation(problem).first()))
    if settings.layer_groups is not None:
        LayerGroups.of(settings.layer_groups, Layout(model))
    validation = problem.target_validation
    check_method(problem, training, mixtures)
    check_streams_in_turn(problem, training, mixtures)
    directions = reported_directions(validation)
    criterion = Criterion(directions)
    if settings.reference is not None:
        criterion.with_reference(settings.reference)
    elif criterion.needs_reference and reference_branch(mixtures, problem.target) is None:
        raise ProblemError(
            f"the target has {len(directions)} metrics and no branch trains on it alone: pass "
            "reference={metric: value} to compare with, or add a branch with the target only."
        )
    elif Criterion(search_directions(validation)).needs_reference and probes:
        raise ProblemError(
            f"the target has {len(directions)} metrics, and ranking runs are scored before round 1 gives values to "
            "compare with: pass reference={metric: value}."
        )
    saved = [(buffer, buffer.clone()) for buffer in model.buffers()]
    tails = [] if settings.tail is None else [Mixture("tail", {problem.target: 1.0})]
    try:
        with random_state_kept():
            for name, stream in problem.stream_map.items():
                check_stream(name, stream, model, [*mixtures, *probes, *tails], training, seed)
            check_costs(settings, validation, model, seed)
            check_metrics(problem, model, seed)
            check_sample(problem, model, seed)
            if settings.refit:
                check_union(problem, model, training, seed)
    finally:
        for buffer, value in saved:
            buffer.copy_(value)
        model.zero_grad(set_to_none=True)


def check_metrics(problem: Problem, model: nn.Module, seed: int) -> None:
    """Measure the target once: a metric that fails, or gives no number, should do so now."""
    check_classes(problem, model, seed)
    try:
        values, unpredicted = measure_and_find(model, of_every_example(problem.target_validation), seed)
    except ProblemError:
        raise  # which says it all
    except Exception as error:
        data = f"the validation data of {problem.target!r}"
        if (advice := text_advice(data, error, "; ".join(facts_of(error)))) is not None:
            raise ProblemError(advice) from error
        note_moment(error, f"validating {problem.target!r}, before training")
        raise
    if unpredicted is not None:
        raise ProblemError(
            f"example {unpredicted} of the validation data of {problem.target!r} holds a number that is not finite "
            "and is predicted as NaN, which no metric can judge: mend the example, or leave it out."
        )
    for name, value in values.items():
        if math.isnan(value):
            raise ProblemError(
                f"metric {name!r} of the target {problem.target!r} is NaN before any training, so nothing could be "
                "chosen by it: look for NaN in the validation data, for examples without labels, or, where the metric "
                "needs several classes as auc does, for examples of only one."
            )


def check_classes(problem: Problem, model: nn.Module, seed: int) -> None:
    """Refuse validation labels that accuracy could only count as errors, where they stand in tensors."""
    evaluation = of_every_example(problem.target_validation)
    extremes = extreme_examples(evaluation.dataset)
    if not extremes or not any(metric is accuracy for metric in evaluation.metrics.values()):
        return
    outside: list[tuple[int, int]] = []  # examples and their labels

    def look(predictions: Any, targets: Any) -> float:
        classes = predictions.shape[-1]
        if predictions.shape[:-1] == targets.shape and classes > 1 and len(targets) == len(extremes):
            is_outside = ((targets < 0) | (targets >= classes)) & (targets != MISSING)
            outside.extend((int(at[0]), int(targets[tuple(at)])) for at in is_outside.nonzero()[:1])
        return 0.0

    part = replace(
        evaluation, dataset=Subset(evaluation.dataset, extremes), metrics={"look": look}, higher_is_better={}
    )
    with suppress(Exception):  # the metrics themselves are measured next, on all examples, and say more of it
        measure(model, part, seed=seed)
    for row, label in outside:
        raise ProblemError(
            f"example {extremes[row]} of the validation data of {problem.target!r} has the label {label}, for which "
            f"the model has no class: {CLASSES}."
        )


def check_method(problem: Problem, training: Training, mixtures: list[Mixture]) -> None:
    """Refuse a method that needs the target in a branch that has none."""
    if training.method is None or not training.method.needs_target:
        return
    for mixture in mixtures:
        tasks = mixture.active(problem.tasks)
        if len(tasks) > 1 and problem.target not in tasks:
            raise ProblemError(
                f"{type(training.method).__name__} treats the target differently, but branch {mixture.name!r} does not "
                f"train on {problem.target!r}: give it a weight there, or use another method."
            )


def check_streams_in_turn(problem: Problem, training: Training, mixtures: list[Mixture]) -> None:
    """Refuse a method, which combines all tasks in every step, where a branch reads one auxiliary stream per step."""
    for mixture in mixtures:
        several = len(mixture.active(problem.tasks)) > 1
        if mixture.auxiliary_streams == "one" and training.method is not None and several:
            raise ProblemError(
                f"{type(training.method).__name__} combines all tasks in every step, but branch {mixture.name!r} reads "
                'one auxiliary stream per step: give it auxiliary_streams="all", or leave out the method.'
            )


def check_numbers(steps: object, seed: object, threads: object) -> None:
    """Refuse numbers of a run that are none, or that no machine can have."""
    if check_count("steps", steps) > _MOST_STEPS:
        raise ProblemError(f"steps must be at most {_MOST_STEPS}, got {steps}.")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ProblemError(f"seed must be an integer, got {seed!r}.")
    most = max(_MOST_THREADS, 4 * (os.cpu_count() or 1))
    if threads is not None and check_count("threads", threads) > most:
        raise ProblemError(
            f"threads must be at most {most}, got {threads}: this machine has {os.cpu_count()} processors."
        )


def check_search(settings: Any, branches: int) -> None:
    """Refuse a search that cannot serve the branches there are, or those that pruning leaves."""
    count = settings.entrants(branches)
    settings.search_for(count).check(count)
    check_rule(settings.rule, is_guarded=settings.search_for(count).guarded)
    for fewer in range(min(settings.prune_to or 0, branches - 1), 0, -1):
        try:
            settings.search_for(settings.entrants(fewer)).check(settings.entrants(fewer))
        except ProblemError as error:
            raise ProblemError(
                f"prune_to={settings.prune_to} may leave fewer branches than the search can merge: {error}"
            ) from None


def check_stream(
    name: str, stream: Stream, model: nn.Module, mixtures: list[Mixture], training: Training, seed: int
) -> None:
    """Compute the losses of a stream's first batch, for all tasks that some branch trains on."""
    tasks = [task for task in stream.tasks if any(mixture.active([task]) for mixture in mixtures)]
    if not tasks:
        return
    device, batch = device_of(model), None
    cuts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def losses_of(batch: Any) -> Any:
        set_random_state(derive(seed, name, "check"))
        with modes_kept(model), training.autocast(device):
            model.train()
            return stream.losses(model, batch, tasks, Context(0, seed, cuts))

    try:
        batch = next(batches(name, stream, [0], seed, device))
        losses = losses_of(batch)
    except Exception as error:
        text = text_advice(f"stream {name!r}", error, f"the batch is {describe(batch)}")
        if (advice := label_advice(name, error) or text) is not None:
            raise ProblemError(advice) from error
        if "more than 1 value per channel" not in str(error):
            origin = f"the losses of stream {name!r} (tasks {', '.join(tasks)}) on the first batch, before training"
            note_origin(error, origin, batch=batch)
            raise
        raise ProblemError(
            f"stream {name!r} has batches of {stream.batch_size} and the model a BatchNorm layer that sees one value "
            "per channel there: use a batch size of at least 2, or another normalisation."
        ) from None
    check_losses(name, stream, tasks, losses, seed)
    check_labels(name, stream, losses_of, seed, device)
    if training.compared_at != "parameters" and training.method is not None and not cuts:
        raise ProblemError(
            f"gradients={training.compared_at!r} needs a declared one, and the losses of stream {name!r} declare none: "
            "write z = context.shared(encoder(x)) there, or use gradients='parameters'."
        )


def check_labels(name: str, stream: Stream, losses: Callable[[Any], Any], seed: int, device: torch.device) -> None:
    """Compute the losses of the least and the greatest labels, where all stand in tensors and can be looked through.

    Args:
        name: The stream's name.
        stream: The stream.
        losses: From a batch to its losses.
        seed: The run's seed.
        device: Where batches go.
    """
    extremes = extreme_examples(stream.dataset)
    for start in range(0, len(extremes), stream.batch_size):
        chosen = extremes[start : start + stream.batch_size]
        filled = (chosen * stream.batch_size)[: stream.batch_size]  # batches of the usual size
        part = replace(stream, dataset=Subset(stream.dataset, filled))
        try:
            losses(next(batches(name, part, [0], seed, device)))
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # where labels are refused some time after the call
        except Exception as error:  # any other is one of steps to come, which say more of it
            if "device-side assert" in str(error):
                raise ProblemError(
                    f"the GPU refuses one of the examples {', '.join(map(str, chosen))} of stream {name!r}, which hold "
                    f"the least and the greatest labels: {CLASSES}."
                ) from error
            label = refused_label(error)
            example = None if label is None else _example_with(label, stream, chosen)
            if label is not None and example is not None:
                raise ProblemError(label_advice(name, error, f"the label of example {example}") or "") from error


def _example_with(label: int, stream: Stream, examples: Sequence[int]) -> int | None:
    alike = (index for index in examples if example_with(label, _columns(stream.dataset[index]), [index]) is not None)
    return next(alike, None)


def _columns(example: Any) -> list[torch.Tensor]:
    members = example.values() if isinstance(example, Mapping) else example
    return [member.reshape(1, -1) for member in members if isinstance(member, torch.Tensor)]


def check_union(problem: Problem, model: nn.Module, training: Training, seed: int) -> None:
    """Try one training and one validation example in one batch, as a refit will mix them."""
    mixture = Mixture("refit", {problem.target: 1.0})
    try:
        union = problem.with_validation_labels()
        for name, stream in union.stream_map.items():
            if problem.target in stream.tasks:
                size = problem.stream_map[name].size
                pair = Subset(stream.dataset, [size - 1, size])
                check_stream(name, replace(stream, dataset=pair, batch_size=2), model, [mixture], training, seed)
    except (ProblemError, RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ProblemError(
            f"refit=True trains on the validation examples too, but the stream of {problem.target!r} cannot read them "
            f"({error}). Give Evaluation(as_training=…), the same examples in the stream's own form, or refit=False."
        ) from error


def check_losses(name: str, stream: Stream, tasks: list[str], losses: Any, seed: int) -> None:
    """Refuse losses that are not scalars, are not finite, or do not depend on the model."""
    if not hasattr(losses, "items"):
        raise ProblemError(f"losses of stream {name!r} must return {{task: loss}}, got {type(losses).__name__}.")
    for task, loss in losses.items():
        if task not in tasks:
            raise ProblemError(
                f"losses of stream {name!r} were not asked for this: {unknown_name('task', task, tasks)}"
            )
        if loss is None:
            continue
        if not isinstance(loss, torch.Tensor) or loss.dim() > 0:
            if isinstance(loss, torch.Tensor):
                raise ProblemError(
                    f"the loss of task {task!r} must be a scalar, got {tuple(loss.shape)}: take its mean."
                )
            raise ProblemError(
                f"the loss of task {task!r} must be a scalar tensor, got {type(loss).__name__}: "
                "return what the loss function gives, without .item()."
            )
        if not loss.requires_grad:
            raise ProblemError(
                f"the loss of task {task!r} does not depend on the model's trainable parameters: it has no gradient. "
                "Look for .detach(), .item(), torch.no_grad() or frozen parameters on its way."
            )
        if not math.isfinite(loss.item()):
            index = example_not_finite(name, stream, [0], seed)
            example = "" if index is None else f"Example {index} of stream {name!r} holds a number that is not finite. "
            raise ProblemError(
                f"the loss of task {task!r} is {loss.item()} on the first batch, before any training. {example}"
                "Where labels are missing, leave the task out or mask them."
            )

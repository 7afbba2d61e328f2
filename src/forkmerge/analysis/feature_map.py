"""The interpolated training distribution beside held-out data, in two dimensions (t-SNE)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from forkmerge.analysis.results import FeatureMap, FeaturePanel
from forkmerge.analysis.shift import interpolate
from forkmerge.errors import ProblemError, unknown_name
from forkmerge.problem.batches import evaluation_batches
from forkmerge.problem.definition import Evaluation, Problem
from forkmerge.problem.example_order import sample_indices
from forkmerge.problem.randomness import derive, random_state_kept
from forkmerge.problem.scoring import device_of, evaluating
from forkmerge.problem.split_dataset import join

Features = Callable[[nn.Module, Any], "tuple[Tensor, Tensor]"]
"""`features(model, batch) -> (representations [n, d], classes [n])` for batches of training streams and evaluations."""

WEIGHTS = (0.0, 1 / 16, 1 / 4, 1.0)
_INSTEAD = "give `feature_map` a function `features`."


def last_layer_inputs(evaluation: Evaluation) -> Features:
    """Return features of a classifier: what enters the last `nn.Linear` that runs, and the classes of its targets.

    Args:
        evaluation: Whose `predict` runs the model.
    """

    def features(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        entered: list[Tensor] = []

        def note(layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            entered[:] = [*inputs, *named.values()][:1]

        with ExitStack() as hooks:
            for layer in model.modules():
                if isinstance(layer, nn.Linear):
                    hooks.enter_context(layer.register_forward_pre_hook(note, with_kwargs=True))
            _, targets = evaluation.predict(model, batch)
        if not entered:
            raise ProblemError(f"the target's `predict` runs no nn.Linear: {_INSTEAD}")
        if not _are_classes(targets) or len(targets) != len(entered[0]):
            raise ProblemError(f"the target's `predict` gives no whole-number class per example: {_INSTEAD}")
        return entered[0].flatten(1), targets

    return features


def _are_classes(targets: Any) -> bool:
    return isinstance(targets, Tensor) and targets.dim() == 1 and not targets.is_floating_point()


def feature_map(
    model: nn.Module,
    problem: Problem,
    auxiliary: str,
    features: Features | None = None,
    *,
    weights: Sequence[float] = WEIGHTS,
    classes: int = 10,
    points: int = 400,
    split: str = "validation",
    seed: int = 0,
) -> FeatureMap:
    """Return features of the target-only model for the training distribution of every λ and for held-out data.

    One embedding for all panels, so that they compare; a panel shows `points` training points, of which an
    expected share of λ / (1 + λ) is the auxiliary's, and the held-out points.

    Args:
        model: Trained on the target alone.
        problem: The problem.
        auxiliary: The auxiliary.
        features: From a batch to representations and classes; by default those of `last_layer_inputs`.
        weights: λ of the panels.
        classes: So many of the target's most frequent classes are shown.
        points: Training points of a panel, and at most so many held-out ones.
        split: Held-out data: "validation", or "test" after the fit, as in the paper.
        seed: Of draws and of the embedding.

    References:
        ForkMerge, Section 3.2 and Fig. 3a.
    """
    if auxiliary not in problem.auxiliaries:
        raise ProblemError(unknown_name("auxiliary task", auxiliary, problem.auxiliaries))
    if split not in ("validation", "test"):
        raise ProblemError(f"split must be 'validation' or 'test', got {split!r}.")
    features = features or last_layer_inputs(problem.target_validation)
    tsne = _embedding(seed)
    held = problem.evaluations("test" if split == "test" else "validation").get(problem.target)
    if held is None:
        raise ProblemError(f"the target {problem.target!r} has no {split} data.")
    sources = [_stream(problem, problem.target), _stream(problem, auxiliary), held]
    samples = [_read(model, source, features, 4 * points, seed) for source in sources]
    common = [label for label, _ in Counter(samples[0][1].tolist()).most_common(classes)]
    kept = [(x[mask], y[mask]) for x, y in samples for mask in [torch.isin(y, torch.tensor(common))]]
    for name, (x, _) in zip((problem.target, auxiliary, split), kept, strict=True):
        if not len(x):
            raise ProblemError(
                f"no example of {name} has one of the {len(common)} most frequent classes of the target."
            )
    kept[2] = (kept[2][0][:points], kept[2][1][:points])
    flat = torch.cat([x for x, _ in kept]).double().numpy()
    placed = torch.as_tensor(tsne(flat)).double()
    parts = placed.split([len(x) for x, _ in kept])
    panels = tuple(_panel(weight, parts, [y for _, y in kept], points, seed) for weight in weights)
    return FeatureMap(problem.target, auxiliary, split, panels)


def _panel(weight: float, parts: Sequence[Tensor], labels: Sequence[Tensor], points: int, seed: int) -> FeaturePanel:
    is_auxiliary, indices = interpolate(len(parts[0]), len(parts[1]), weight, points, seed)
    positions: list[tuple[float, float]] = []
    origins, classes = [], []
    for chosen, index in zip(is_auxiliary.tolist(), indices.tolist(), strict=True):
        x, y = parts[int(chosen)][index].tolist()
        positions.append((x, y))
        origins.append("auxiliary" if chosen else "target")
        classes.append(int(labels[int(chosen)][index]))
    for (x, y), label in zip(parts[2].tolist(), labels[2].tolist(), strict=True):
        positions.append((x, y))
        origins.append("held-out")
        classes.append(int(label))
    return FeaturePanel(float(weight), tuple(positions), tuple(origins), tuple(classes))


def _stream(problem: Problem, task: str) -> Evaluation:
    """A task's training data in the form of an evaluation, read in order and without labels' use."""
    streams = [s for s in problem.stream_map.values() if task in s.tasks]
    stream, form = streams[0], problem.target_validation
    dataset = reduce(join, (s.dataset for s in streams))
    return replace(form, dataset=dataset, batch_size=stream.batch_size, collate_fn=stream.collate_fn, as_training=None)


def _read(model: nn.Module, source: Evaluation, features: Features, most: int, seed: int) -> tuple[Tensor, Tensor]:
    order = sample_indices(source.size, most, seed, "features")
    feed = evaluation_batches(source, order, seed, device_of(model))
    representations, labels = [], []
    with random_state_kept(), evaluating(model), closing(feed):
        for batch in feed:
            x, y = features(model, batch)
            representations.append(x.flatten(1).cpu())
            labels.append(y.cpu())
    return torch.cat(representations), torch.cat(labels)


def _embedding(seed: int) -> Callable[[Any], Any]:
    """Return t-SNE; a missing scikit-learn is named before anything is computed."""
    try:
        from sklearn.manifold import TSNE
        from threadpoolctl import threadpool_limits  # comes with scikit-learn
    except ImportError:
        raise ProblemError("t-SNE needs scikit-learn: type pip install 'forkmerge[analysis]'.") from None

    def embed(values: Any) -> Any:
        perplexity = min(30.0, max((len(values) - 1) / 3, 1.0))
        state = derive(seed, "t-SNE") % 2**32
        with threadpool_limits(1):  # as in training: the processes of a diagnosis share the cores
            return TSNE(init="pca", perplexity=perplexity, random_state=state).fit_transform(values)

    return embed

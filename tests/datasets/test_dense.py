"""Dense tasks: every loss and metric against a slow direct computation, pixel by pixel."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import Tensor

import forkmerge as fm
from forkmerge.datasets import dense
from forkmerge.models import DenseModel, ResNet

N, H, W, CLASSES = 3, 5, 7, 4


@pytest.fixture
def scenes() -> dict[str, tuple[Tensor, Tensor]]:
    """Predictions and targets of three images, some pixels of which are unknown, all of the last's depths."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(-1, CLASSES, (N, H, W), generator=draw)
    depths = torch.rand(N, 1, H, W, generator=draw) * 9 * (torch.rand(N, 1, H, W, generator=draw) > 0.3)
    depths[-1] = 0
    normals = torch.nn.functional.normalize(torch.randn(N, 3, H, W, generator=draw), dim=1)
    normals *= torch.rand(N, 1, H, W, generator=draw) > 0.3
    near = normals + 0.3 * torch.randn(N, 3, H, W, generator=draw)
    return {
        "segmentation": (torch.randn(N, CLASSES, H, W, generator=draw), labels),
        "depth": (torch.randn(N, 1, H, W, generator=draw), depths),
        "normal": (near, normals),
    }


def pixels() -> list[tuple[int, int, int]]:
    return [(n, y, x) for n in range(N) for y in range(H) for x in range(W)]


def slow_angles(predictions: Tensor, normals: Tensor) -> list[float]:
    angles = []
    for n, y, x in pixels():
        a, b = predictions[n, :, y, x].tolist(), normals[n, :, y, x].tolist()
        if any(b):
            cosine = sum(i * j for i, j in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)
            angles.append(math.degrees(math.acos(max(-1.0, min(1.0, cosine)))))
    return angles


def slow_depth(predictions: Tensor, depths: Tensor) -> tuple[float, float]:
    pairs = [(predictions[n, 0, y, x].item(), depths[n, 0, y, x].item()) for n, y, x in pixels()]
    pairs = [(p, d) for p, d in pairs if d != 0]
    absolute = [abs(p - d) for p, d in pairs]
    relative = [abs(p - d) / d for p, d in pairs]
    return sum(absolute) / len(pairs), sum(relative) / len(pairs)


def slow_segmentation(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    pairs = [(int(logits[n, :, y, x].argmax()), int(labels[n, y, x])) for n, y, x in pixels()]
    pairs = [(p, t) for p, t in pairs if t != -1]
    ious = []
    for c in range(CLASSES):
        both = sum(p == c and t == c for p, t in pairs)
        either = sum(p == c or t == c for p, t in pairs)
        ious.append(both / either)
    return sum(ious) / CLASSES, sum(p == t for p, t in pairs) / len(pairs)


def values(metrics: dict, predictions: Tensor, targets: Tensor) -> dict[str, float]:
    """Through an evaluation in batches of two, as training measures them."""

    class Model(torch.nn.Module):
        def forward(self, x: Tensor, tasks: list[str]) -> dict[str, Tensor]:
            return {tasks[0]: x}

    data = torch.utils.data.TensorDataset(predictions, targets)
    evaluation = fm.Evaluation(data, metrics, predict=dense.PredictMap("a task", 1), batch_size=2)
    return fm.measure(Model(), evaluation)


class TestMetrics:
    def test_segmentation(self, scenes: dict) -> None:
        metrics = values(dense.segmentation_metrics(CLASSES), *scenes["segmentation"])
        iou, accuracy = slow_segmentation(*scenes["segmentation"])
        assert metrics == pytest.approx({"mIoU": iou, "pixel_accuracy": accuracy}, abs=1e-6)

    def test_depth(self, scenes: dict) -> None:
        metrics = values(dense.depth_metrics(), *scenes["depth"])
        absolute, relative = slow_depth(*scenes["depth"])
        assert metrics == pytest.approx({"absolute_error": absolute, "relative_error": relative}, rel=1e-12)

    def test_normals(self, scenes: dict) -> None:
        metrics = values(dense.normal_metrics(), *scenes["normal"])
        slow = sorted(slow_angles(*scenes["normal"]))
        middle = (slow[(len(slow) - 1) // 2] + slow[len(slow) // 2]) / 2
        assert metrics.pop("median_angle") == pytest.approx(middle, abs=6e-4)
        assert metrics.pop("mean_angle") == pytest.approx(sum(slow) / len(slow), rel=1e-9)
        for limit in (11.25, 22.5, 30):
            assert metrics.pop(f"within_{limit:g}") == pytest.approx(sum(a < limit for a in slow) / len(slow))
        assert not metrics

    def test_directions_are_the_papers(self) -> None:
        every = {**dense.segmentation_metrics(3), **dense.depth_metrics(), **dense.normal_metrics()}
        lower = {name for name, metric in every.items() if not metric.higher_is_better}
        assert lower == {"absolute_error", "relative_error", "mean_angle", "median_angle"}

    def test_depth_metrics_add_up_so_that_a_search_can_race(self) -> None:
        assert all(isinstance(metric, fm.MeanCost) for metric in dense.depth_metrics().values())

    def test_a_broken_prediction_never_looks_good(self, scenes: dict) -> None:
        broken = torch.full_like(scenes["normal"][0], math.nan)
        metrics = values(dense.normal_metrics(), broken, scenes["normal"][1])
        assert math.isnan(metrics["median_angle"])
        assert metrics["mean_angle"] == math.inf
        assert metrics["within_30"] == 0
        still = values(dense.normal_metrics(), torch.zeros_like(broken), scenes["normal"][1])
        assert still["mean_angle"] == pytest.approx(90)
        assert values(dense.depth_metrics(), torch.full_like(scenes["depth"][0], math.nan), scenes["depth"][1]) == {
            "absolute_error": math.inf,
            "relative_error": math.inf,
        }

    def test_small_angles_are_exact(self) -> None:
        true = torch.tensor([0.6, 0.8, 0.0]).view(1, 3, 1, 1)
        assert dense.angles(true, true).item() == pytest.approx(0, abs=1e-6)

    def test_the_median_forgets_on_reset_and_pickles(self, scenes: dict) -> None:
        metric = pickle.loads(pickle.dumps(dense.MedianAngle()))
        metric.update(*scenes["normal"])
        before = metric.compute()
        metric.reset()
        assert math.isnan(metric.compute())
        metric.update(*scenes["normal"])
        assert metric.compute() == before


class TestLosses:
    def test_segmentation(self, scenes: dict) -> None:
        logits, labels = scenes["segmentation"]
        slow = [
            -logits[n, :, y, x].log_softmax(0)[labels[n, y, x]].item() for n, y, x in pixels() if labels[n, y, x] != -1
        ]
        assert dense.segmentation_loss(logits, labels).item() == pytest.approx(sum(slow) / len(slow), rel=1e-5)

    def test_depth(self, scenes: dict) -> None:
        assert dense.depth_loss(*scenes["depth"]).item() == pytest.approx(slow_depth(*scenes["depth"])[0], rel=1e-5)

    def test_normals(self, scenes: dict) -> None:
        slow = [1 - math.cos(math.radians(angle)) for angle in slow_angles(*scenes["normal"])]
        assert dense.normal_loss(*scenes["normal"]).item() == pytest.approx(sum(slow) / len(slow), rel=1e-5)

    @pytest.mark.parametrize("task", ["segmentation", "depth", "normal"])
    def test_a_batch_without_a_known_pixel_costs_nothing(self, task: str, scenes: dict) -> None:
        prediction, target = scenes[task]
        unknown = torch.full_like(target, -1 if task == "segmentation" else 0)
        prediction = prediction.clone().requires_grad_()
        loss = dense.LOSSES[task](prediction, unknown)
        loss.backward()
        assert loss.item() == 0
        assert prediction.grad is not None
        assert not prediction.grad.any()


def test_the_shared_representation_is_declared_and_changes_nothing() -> None:
    torch.manual_seed(0)
    encoder = ResNet(18, output_stride=8, pool=False)
    model = DenseModel(encoder, {"depth": 1, "normal": 3}, rates=(1,), width=4).eval()
    images = torch.randn(1, 3, 16, 16)
    context = fm.Context(0, 0, [])
    maps = dense.outputs(model, images, ["depth", "normal"], context)
    assert context.cuts is not None
    assert len(context.cuts) == 1
    torch.testing.assert_close(maps, model(images), rtol=0, atol=0)

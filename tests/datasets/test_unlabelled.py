"""What images without labels can teach: every loss by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, kl_div, log_softmax

import forkmerge as fm
from forkmerge.datasets._classify import CropAndFlip
from forkmerge.datasets.unlabelled import BASELINES, USUAL_SCALES, UnlabelledLosses
from forkmerge.models import WithTeacher
from forkmerge.problem.definition import Context
from unlabelled_images import losses_of, model, prepared, splits


class TestLosses:
    def test_rotation_asks_for_all_four_angles(self, images: Tensor) -> None:
        net = model().eval()
        net.evaluate = False
        x = prepared(images)
        each = [cross_entropy(net(torch.rot90(x, k, (2, 3)), "rotation"), torch.full((5,), k)) for k in range(4)]
        torch.testing.assert_close(losses_of("rotation", net, images), torch.stack(each).mean())

    def test_an_unchanged_image_is_its_own_exemplar(self, images: Tensor) -> None:
        """Without noise and hole a student equal to its teacher has cosine 1, with a mirror image or without."""
        net = model().eval()
        symmetric = torch.cat([images[..., :4], images[..., :4].flip(-1)], -1)
        loss = losses_of("exemplar", net, symmetric, noise=0.0, hole=0.0)
        assert loss.item() == pytest.approx(-1.0, abs=1e-6)
        changed = losses_of("exemplar", net, symmetric)
        assert changed.item() > loss.item()

    def test_exemplar_compares_with_the_teacher(self, images: Tensor) -> None:
        net = model().eval()
        symmetric = torch.cat([images[..., :4], images[..., :4].flip(-1)], -1)
        nn.init.normal_(net.teacher.get_submodule("encoder.body.0").weight)
        x = prepared(symmetric)
        expected = -cosine_similarity(net.student.encoder(x), net.teacher.encoder(x)).mean()
        torch.testing.assert_close(losses_of("exemplar", net, symmetric, noise=0.0, hole=0.0), expected)

    def test_views_that_are_the_same_agree(self, images: Tensor) -> None:
        for task in ("pi", "mean_teacher"):
            assert losses_of(task, model().eval(), images).item() == 0.0

    def test_the_second_view_of_the_pi_model_is_a_constant(self, images: Tensor) -> None:
        """The weight of 20 belongs to a gradient through one view; through both it is about twice as large."""
        net = model(teacher=False).eval()
        losses = UnlabelledLosses(CropAndFlip(padding=2))
        loss = losses(net, [images], ["pi"], Context(0, 3))["pi"]
        views = losses.views(images, Context(0, 3).generator)
        first, second = (net(view, "class").softmax(1) for view in views)
        expected = (first - second.detach()).square().mean()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(
            *(torch.autograd.grad(loss, net.heads["class"].weight)[0] for loss in (loss, expected))
        )

    def test_mean_teacher_is_the_squared_difference_of_probabilities(self, images: Tensor) -> None:
        net = model().eval()
        nn.init.normal_(net.teacher.get_submodule("heads.class").weight)
        ours, theirs = (part(prepared(images), "class").softmax(1) for part in (net.student, net.teacher))
        torch.testing.assert_close(losses_of("mean_teacher", net, images), (ours - theirs).square().mean())

    def test_consistency_is_ramped_up(self, images: Tensor) -> None:
        net = model().eval()
        nn.init.normal_(net.teacher.get_submodule("heads.class").weight)
        full = losses_of("mean_teacher", net, images)
        for step, share in ((0, math.exp(-5)), (5, math.exp(-1.25)), (10, 1.0), (99, 1.0)):
            torch.testing.assert_close(losses_of("mean_teacher", net, images, step, ramp=10), share * full)
        torch.testing.assert_close(losses_of("rotation", net, images, 0, ramp=10), losses_of("rotation", net, images))

    def test_vat_moves_images_where_it_hurts(self, images: Tensor) -> None:
        """Further than the same way taken at random, by the stated distance, and nothing where that is 0."""
        net = model(teacher=False).eval()
        x = prepared(images)
        loss = losses_of("vat", net, images, radius=1.0)
        before = log_softmax(net(x, "class"), 1)
        for seed in range(20):
            r = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
            r = r / r.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
            after = log_softmax(net(x + r, "class"), 1)
            assert loss > kl_div(after, before, log_target=True, reduction="batchmean")
        assert losses_of("vat", net, images, radius=0.0).abs() < 1e-6

    def test_vat_leaves_statistics_alone_but_for_the_images_themselves(self, images: Tensor) -> None:
        nets = [model(teacher=False).train(), model(teacher=False).train()]
        losses_of("vat", nets[0], images)
        nets[1](prepared(images), "class")
        for a, b in zip(nets[0].buffers(), nets[1].buffers(), strict=True):
            torch.testing.assert_close(a, b)

    def test_pseudo_labels_are_of_images_the_model_is_sure_of(self, images: Tensor) -> None:
        net = model(teacher=False).eval()
        with torch.no_grad():
            net.heads["class"].weight.mul_(30)
        logits = net(prepared(images), "class")
        sure, classes = logits.softmax(1).max(1)
        threshold = sure.sort().values[2:4].mean().item()  # between two: the last bits may differ between passes
        kept = sure > threshold
        assert 0 < kept.sum() < 5
        expected = cross_entropy(logits[kept], classes[kept], reduction="sum") / 5
        torch.testing.assert_close(losses_of("pseudo_label", net, images, threshold=threshold), expected)

    def test_what_is_missing_is_named(self, images: Tensor) -> None:
        with pytest.raises(fm.ProblemError, match="WithTeacher"):
            losses_of("mean_teacher", model(teacher=False), images)
        with pytest.raises(fm.ProblemError, match="rotation"):
            splits().problem(["rotatoin"])

    def test_equal_task_weights_are_the_usual_ones(self, images: Tensor) -> None:
        net = model().eval()
        net.evaluate = False
        assert USUAL_SCALES == {"rotation": 0.5, "exemplar": 0.5, **BASELINES}
        for task in ("rotation", "mean_teacher"):
            nn.init.normal_(net.teacher.get_submodule("heads.class").weight)
            scaled = losses_of(task, net, images, scales=USUAL_SCALES)
            torch.testing.assert_close(scaled, USUAL_SCALES[task] * losses_of(task, net, images))


class Logits(nn.Module):
    """Two classes with logits (0, w·x), w = (3, 4): every loss can be worked out by hand."""

    def __init__(self, weight: tuple[float, float] = (3.0, 4.0)) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))

    def forward(self, x: Tensor, task: str) -> Tensor:
        assert task == "class"
        logits = x.flatten(1) @ self.weight
        return torch.stack([torch.zeros_like(logits), logits], 1)


@dataclass
class Views:
    """Prepared views given beforehand, one after the other."""

    views: list[list[tuple[float, float]]]

    def training(self, images: Tensor, generator: Any) -> Tensor:
        return torch.tensor(self.views.pop(0), dtype=torch.float64)


def loss_by_hand(task: str, net: nn.Module, *views: list[tuple[float, float]], step: int = 0, **options: Any) -> float:
    images = torch.zeros(len(views[0]), 2)
    losses = UnlabelledLosses(Views(list(views)), **options)
    return losses(net, [images], [task], Context(step, 0))[task].item()


LN3 = (math.log(3) / 3, 0.0)
"""A view of logit ln 3: probabilities ¼ and ¾."""
ZERO = (0.0, 0.0)
"""A view of logit 0: probabilities ½ and ½."""


class TestByHand:
    """The formulas of the papers on cases that need no computer."""

    def test_pi_model(self) -> None:
        """Laine and Aila, Algorithm 1: ‖z − z̃‖²/(C |B|) = (1/16 + 1/16)/2 for one image, half of it with a second."""
        assert loss_by_hand("pi", Logits(), [LN3], [ZERO]) == pytest.approx(1 / 16)
        assert loss_by_hand("pi", Logits(), [LN3, ZERO], [ZERO, ZERO]) == pytest.approx(1 / 32)

    def test_ramp_up(self) -> None:
        """Laine and Aila, Section 3: exp(−5 (1 − T)²), e⁻⁵ at the start, e^(−5/4) half way and 1 at the end."""
        at = {step: loss_by_hand("pi", Logits(), [LN3], [ZERO], step=step, ramp=10) for step in (0, 5, 10, 11)}
        assert [16 * value for value in at.values()] == pytest.approx([0.006737947, 0.286504797, 1.0, 1.0])

    def test_mean_teacher(self) -> None:
        """Tarvainen and Valpola, Eq. 1: the teacher, of weights 0, says ½ and ½ wherever the student says ¼ and ¾."""
        pair = WithTeacher(Logits())
        pair.teacher.get_buffer("weight").zero_()
        assert loss_by_hand("mean_teacher", pair, [LN3], [LN3]) == pytest.approx(1 / 16)
        assert loss_by_hand("mean_teacher", pair, [ZERO], [LN3]) == pytest.approx(0.0)

    def test_vat(self) -> None:
        """Miyato et al., Algorithm 1: the direction is ±w/‖w‖, so the logit moves from 0 by ε‖w‖ = ln 3, up or down.

        KL((½, ½) ‖ (¼, ¾)) = ½ ln 2 + ½ ln ⅔ = ½ ln 4/3, whichever of the two classes gains.
        """
        for images in ([ZERO], [ZERO, ZERO]):
            value = loss_by_hand("vat", Logits(), images, radius=math.log(3) / 5)
            assert value == pytest.approx(0.5 * math.log(4 / 3), rel=1e-6)

    def test_vat_away_from_the_middle(self) -> None:
        """From (¼, ¾) the logit moves to ln 9 or 0, by the sign of the noise: KL to (1/10, 9/10) or (½, ½)."""
        value = loss_by_hand("vat", Logits(), [LN3], radius=math.log(3) / 5)
        up = 0.25 * math.log(0.25 / 0.1) + 0.75 * math.log(0.75 / 0.9)
        down = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
        assert min(abs(value - up), abs(value - down)) < 1e-7

    def test_pseudo_label(self) -> None:
        """Lee, Eq. 15 and 16: −ln 0.99 for an image of logit ln 99; one of probability ¾ is not sure enough."""
        sure = (math.log(99) / 3, 0.0)
        assert loss_by_hand("pseudo_label", Logits(), [sure]) == pytest.approx(0.01005033585)
        assert loss_by_hand("pseudo_label", Logits(), [sure, LN3]) == pytest.approx(0.01005033585 / 2)
        assert loss_by_hand("pseudo_label", Logits(), [LN3], threshold=0.7) == pytest.approx(-math.log(0.75))
        assert loss_by_hand("pseudo_label", Logits(), [(-sure[0], 0.0)]) == pytest.approx(0.01005033585), "of any class"

    def test_the_gradient_of_a_pseudo_label_goes_through_the_prediction_alone(self) -> None:
        """d(−ln σ(w·x))/dw = −(1 − σ) x: −0.01 times ln 99 / 3 in the first component."""
        net = Logits()
        sure = (math.log(99) / 3, 0.0)
        losses = UnlabelledLosses(Views([[sure]]))
        losses(net, [torch.zeros(1, 2)], ["pseudo_label"], Context(0, 0))["pseudo_label"].backward()
        assert net.weight.grad.tolist() == pytest.approx([-0.01 * sure[0], 0.0])

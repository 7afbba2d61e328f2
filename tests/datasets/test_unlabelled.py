"""What images without labels can teach: every loss by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, kl_div, log_softmax

import forkmerge as fm
from forkmerge.datasets._classify import CropAndFlip
from forkmerge.datasets.unlabelled import BASELINES, USUAL_SCALES, UnlabelledLosses
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

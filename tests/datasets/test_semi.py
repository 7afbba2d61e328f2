"""Images without labels: the teacher as part of a branch, and the losses of semi-supervised learning by hand."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, kl_div, log_softmax

import forkmerge as fm
from forkmerge.datasets import augment, semi
from forkmerge.datasets._classify import CropAndFlip
from forkmerge.datasets.semi import Images, SemiSplits
from forkmerge.datasets.unlabelled import BASELINES, TASKS, USUAL_SCALES, UnlabelledLosses
from forkmerge.models import Classifier, WithTeacher
from forkmerge.problem.definition import Context

CLASSES = 3


class Tiny(nn.Module):
    """Pixels to four features, with normalisation."""

    channels = 4

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.body(x).mean((2, 3))
        return features


def model(*, teacher: bool = True, decay: float = 0.9) -> nn.Module:
    torch.manual_seed(0)
    student = Classifier(Tiny(), {"class": CLASSES, "rotation": 4})
    return WithTeacher(student, decay) if teacher else student


def splits() -> SemiSplits:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (60, 3, 8, 8), generator=generator, dtype=torch.uint8)
    classes = torch.arange(60) % CLASSES
    images[:, 0] = (classes * 80).view(-1, 1, 1).to(torch.uint8)
    data = Images(images, classes, images[:12], classes[:12])
    return semi.split(data, 12, 15, 0, CLASSES, CropAndFlip(padding=1))


def options(**changed: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": fm.OptimizerOf("Adam", lr=0.01), "steps": 6, "seed": 1, **changed}


class TestTeacher:
    def test_it_is_the_moving_average_of_everything_that_floats(self) -> None:
        pair = model(decay=0.75)
        expected = {name: value.clone() for name, value in pair.student.state_dict().items()}
        optimizer = torch.optim.SGD(pair.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            pair(torch.randn(4, 3, 8, 8), "class").square().sum().backward()
            optimizer.step()
            pair.after_optimizer_step()
            for name, value in pair.student.state_dict().items():
                if value.is_floating_point():
                    expected[name] = 0.75 * expected[name] + 0.25 * value
                else:
                    assert value == step + 1
                    expected[name] = value.clone()
        for name, value in pair.teacher.state_dict().items():
            torch.testing.assert_close(value, expected[name])

    def test_no_optimizer_sees_it(self) -> None:
        pair = model()
        assert not list(pair.teacher.parameters())
        assert len(list(pair.parameters())) == len(list(pair.student.parameters()))

    def test_its_own_passes_leave_no_trace(self) -> None:
        pair = model().train()
        before = {name: value.clone() for name, value in pair.teacher.state_dict().items()}
        pair.teacher(torch.randn(4, 3, 8, 8), "class")
        for name, value in pair.teacher.state_dict().items():
            assert torch.equal(value, before[name]) or name.endswith("num_batches_tracked")

    def test_it_answers_in_evaluation_mode(self) -> None:
        pair = model()
        nn.init.zeros_(pair.teacher.get_submodule("heads.class").weight)
        nn.init.zeros_(pair.teacher.get_submodule("heads.class").bias)
        x = torch.randn(2, 3, 8, 8)
        assert pair.train()(x, "class").abs().sum() > 0
        assert pair.eval()(x, "class").abs().sum() == 0
        pair.evaluate = False
        assert pair(x, "class").abs().sum() > 0

    def test_tied_weights_stay_tied(self) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
                self.second.weight = self.first.weight

        pair = WithTeacher(Tied())
        assert pair.teacher.first.weight is pair.teacher.second.weight

    def test_a_decay_of_one_is_refused(self) -> None:
        with pytest.raises(fm.ProblemError, match="decay must be"):
            WithTeacher(nn.Linear(1, 1), 1.0)

    def test_it_merges_by_the_coefficients(self) -> None:
        """Two branches trained apart, merged half and half: the teacher is the mean of theirs."""
        problem = splits().problem(["rotation"])
        mixtures = [fm.Mixture("alone", {"class": 1.0}), fm.Mixture("joint", {"class": 1.0, "rotation": 1.0})]
        merged = fm.ForkMerge(mixtures, interval=3, search=fm.Fixed((0.5, 0.5))).fit(problem, **options(steps=3))
        ends = [fm.Joint(dict(m.task_weights)).fit(problem, **options(steps=3)).model.teacher for m in mixtures]
        for name, value in merged.model.teacher.state_dict().items():
            if value.is_floating_point():
                theirs = [end.state_dict()[name] for end in ends]
                torch.testing.assert_close(value, (theirs[0] + theirs[1]) / 2)
        assert any(not torch.equal(a, b) for a, b in zip(*(e.state_dict().values() for e in ends), strict=True))

    def test_it_resumes_with_the_branch(self, tmp_path: Path) -> None:
        """Stopped in the middle of a round, a run ends with the same bits."""
        problem, algorithm = splits().problem(), fm.ForkMerge("per_auxiliary", interval=3)
        whole = algorithm.fit(problem, **options())

        class Stopped(Exception):
            pass

        def stop(event: Any) -> None:
            if event["event"] == "checkpoint" and event["step"] == 4:
                raise Stopped

        with pytest.raises(Stopped):
            algorithm.fit(problem, **options(folder=tmp_path / "run", checkpoint_every=2, observe=stop))
        again = algorithm.fit(problem, **options(folder=tmp_path / "run", checkpoint_every=2, resume=True))
        for name, value in whole.model.state_dict().items():
            assert torch.equal(value, again.model.state_dict()[name]), name


def losses_of(task: str, net: nn.Module, images: Tensor, step: int = 0, **changed: Any) -> Tensor:
    losses = UnlabelledLosses(CropAndFlip(padding=0, flip=False), **changed)
    return losses(net, [images], [task], Context(step, 7))[task]


@pytest.fixture
def images() -> Tensor:
    return torch.randint(0, 256, (5, 3, 8, 8), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)


def prepared(images: Tensor) -> Tensor:
    return (images.float() / 255 - 0.5) / 0.25


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
        found = losses(net, [images], ["pi"], Context(0, 3))["pi"]
        views = losses.views(images, Context(0, 3).generator)
        first, second = (net(view, "class").softmax(1) for view in views)
        expected = (first - second.detach()).square().mean()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            *(torch.autograd.grad(loss, net.heads["class"].weight)[0] for loss in (found, expected))
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
        found = losses_of("vat", net, images, radius=1.0)
        before = log_softmax(net(x, "class"), 1)
        for seed in range(20):
            r = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
            r = r / r.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
            after = log_softmax(net(x + r, "class"), 1)
            assert found > kl_div(after, before, log_target=True, reduction="batchmean")
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


class TestProblems:
    @pytest.mark.parametrize("task", TASKS)
    def test_every_task_trains_under_fixed_weights(self, task: str) -> None:
        weights = {"class": 1.0, task: BASELINES.get(task, 0.5)}
        run = fm.Joint(weights).fit(splits().problem([task]), **options(steps=3))
        assert math.isfinite(run.score)

    @pytest.mark.parametrize("method", ["pcgrad", "arml", "gcs", "uw"])
    def test_self_supervision_works_under_any_method(self, method: str) -> None:
        run = fm.Joint(method=method).fit(splits().problem(), **options(steps=3))
        assert math.isfinite(run.score)

    def test_a_model_without_a_teacher_serves_the_other_tasks(self) -> None:
        run = fm.ForkMerge(interval=2).fit(
            splits().problem(["rotation"]), **options(model=partial(model, teacher=False), steps=4)
        )
        assert run.rounds


def test_a_hole_is_a_square_of_zeros_cut_off_at_the_edges() -> None:
    whole = torch.ones(50, 2, 9, 7)
    cut = augment.cut_out(whole, torch.Generator().manual_seed(0), 4)
    assert torch.equal(cut, augment.cut_out(whole, torch.Generator().manual_seed(0), 4))
    sizes = set()
    for image in cut:
        assert torch.equal(image[0], image[1])
        rows, columns = (image[0] == 0).any(1).sum().item(), (image[0] == 0).any(0).sum().item()
        assert (image[0] == 0).sum() == rows * columns
        sizes.add((rows, columns))
    assert max(sizes) == (4, 4)
    assert len(sizes) > 1


class TestRecipe:
    def recipe(self, **changed: Any) -> fm.Recipe:
        arguments = {"network": "small", "steps": 40, "batch_size": 4, "seed": 1, **changed}
        return semi.semi_supervised_recipe(splits(), **arguments)

    def test_the_defaults_are_the_papers(self) -> None:
        recipe = semi.semi_supervised_recipe(splits())
        assert (recipe.steps, recipe.algorithm.interval) == (200_000, 10_000)
        assert recipe.problem.tasks == ("class", "rotation", "exemplar")
        model = recipe.model()
        assert isinstance(model, WithTeacher)
        assert model.decay == 0.95
        optimizer = recipe.optimizer(model)
        scheduler = recipe.options["scheduler"].over(recipe.steps)(optimizer)
        assert (optimizer.defaults["lr"], dict(scheduler.milestones), scheduler.gamma) == (0.005, {160_000: 1}, 0.2)
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(1.46e6, rel=0.01)

    def test_schedule_and_merges_follow_the_steps(self) -> None:
        recipe = self.recipe()
        assert (recipe.algorithm.interval, recipe.options["scheduler"].options["milestones"]) == (2, ["80%"])
        assert {stream.batch_size for stream in recipe.problem.stream_map.values()} == {4}

    def test_equal_task_weights_are_the_usual_ones(self, images: Tensor) -> None:
        net = model().eval()
        net.evaluate = False
        assert USUAL_SCALES == {"rotation": 0.5, "exemplar": 0.5, **BASELINES}
        for task in ("rotation", "mean_teacher"):
            nn.init.normal_(net.teacher.get_submodule("heads.class").weight)
            scaled = losses_of(task, net, images, scales=USUAL_SCALES)
            torch.testing.assert_close(scaled, USUAL_SCALES[task] * losses_of(task, net, images))

    @pytest.mark.parametrize("auxiliaries", [["pi"], ["mean_teacher"], ["vat"], ["pseudo_label"], semi.S4L])
    def test_it_trains_with_every_kind_of_auxiliary(self, auxiliaries: Any) -> None:
        recipe = self.recipe(auxiliaries=auxiliaries, steps=2)
        run = recipe.fit()
        assert len(run.rounds) == 2
        assert set(run.model.student.heads) == {"class", *({"rotation"} & set(auxiliaries))}

    def test_the_small_network_may_be_narrower(self) -> None:
        sizes = [sum(p.numel() for p in self.recipe(width=width).model().parameters()) for width in (8, 32)]
        assert 10 * sizes[0] < sizes[1]

    def test_an_unknown_network_is_refused(self) -> None:
        with pytest.raises(fm.ProblemError, match="wrn-28-2"):
            self.recipe(network="wrn-28-10")

"""What images without labels can teach: self-supervised tasks and the consistency losses of semi-supervised learning.

All are auxiliary tasks of a stream of images without labels, so any method of the library can weigh them.

- `rotation` and `exemplar`: the two tasks of S4L, which the paper uses as auxiliaries;
- `pi`, `mean_teacher`, `vat` and `pseudo_label`: the baselines; see `BASELINES` for their usual weights.

`exemplar` and `mean_teacher` need a model with a teacher: `forkmerge.models.WithTeacher`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from forkmerge.datasets import augment
from forkmerge.datasets._classify import Preparation
from forkmerge.engine.training.batchnorm import statistics_frozen
from forkmerge.errors import ProblemError, unknown_name
from forkmerge.models import WithTeacher
from forkmerge.problem.definition import Context

TARGET = "class"
ANGLES = 4
_SMALL = 1e-6  # ξ of VAT: where the divergence is still quadratic
BASELINES: Mapping[str, float] = {"pi": 20.0, "mean_teacher": 8.0, "vat": 0.3, "pseudo_label": 1.0}
"""The weights of Oliver et al., NeurIPS 2018, Appendix B; consistency is ramped up to them."""
USUAL_SCALES: Mapping[str, float] = {"rotation": 0.5, "exemplar": 0.5, **BASELINES}
"""The usual weight of every task beside the labels' loss; those of S4L's tasks are ARML's."""


@dataclass(frozen=True)
class UnlabelledLosses:
    """The losses of tasks on images without labels.

    Args:
        preparation: From bytes to the network's input; augmented anew for every view.
        ramp: Steps until a consistency loss has its full weight, which grows as exp(−5 (1 − t/ramp)²); 0 for none.
        threshold: How sure a pseudo-label must be.
        radius: ε of VAT, in units of the prepared image.
        noise: Standard deviation of the noise on exemplars.
        hole: Side of the square cut out of an exemplar, over the image's.
        scales: Factors of tasks' losses, 1 where not given: with `USUAL_SCALES`, equal task weights are the usual ones.
    """

    preparation: Preparation
    ramp: int = 0
    threshold: float = 0.95
    radius: float = 6.0
    noise: float = 0.15
    hole: float = 0.5
    scales: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, model: nn.Module, batch: Any, tasks: Sequence[str], context: Context) -> dict[str, Tensor]:
        """Return the losses of the tasks asked for."""
        images = batch[0]
        losses = {}
        for task in tasks:
            if task not in _TASKS:
                raise ProblemError(unknown_name("task without labels", task, _TASKS))
            ramp = self._ramp(context.step) if task in BASELINES else 1.0
            losses[task] = self.scales.get(task, 1.0) * ramp * _TASKS[task](self, model, images, context.generator)
        return losses

    def views(self, images: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """Return two augmentations of the same images."""
        return self.preparation.training(images, generator), self.preparation.training(images, generator)

    def exemplar(self, images: Tensor, generator: Generator) -> Tensor:
        """Return images that are mirrored, noised and have a hole."""
        changed = augment.random_flip(self.preparation.training(images, generator), generator)
        noise = torch.randn(changed.shape, generator=generator).to(changed)
        return augment.cut_out(changed + self.noise * noise, generator, round(self.hole * changed.shape[-1]))

    def _ramp(self, step: int) -> float:
        return 1.0 if step >= self.ramp else math.exp(-5.0 * (1.0 - step / self.ramp) ** 2)


def rotation(losses: UnlabelledLosses, model: nn.Module, images: Tensor, generator: Generator) -> Tensor:
    """Which of four angles an image was turned by; every image at all four.

    References:
        Gidaris et al., Unsupervised Representation Learning by Predicting Image Rotations, ICLR 2018.
    """
    prepared = losses.preparation.training(images, generator)
    turned = torch.cat([torch.rot90(prepared, angle, (2, 3)) for angle in range(ANGLES)])
    angles = torch.arange(ANGLES, device=turned.device).repeat_interleave(len(images))
    return functional.cross_entropy(model(turned, "rotation"), angles)


def exemplar(losses: UnlabelledLosses, model: nn.Module, images: Tensor, generator: Generator) -> Tensor:
    """Exemplar-MT: minus the cosine between a changed image's features and the teacher's of the image itself.

    References:
        Dosovitskiy et al., Discriminative Unsupervised Feature Learning with Exemplar CNNs, TPAMI 2016; with a mean
        teacher: Shi et al., Auxiliary Task Reweighting for Minimum-data Learning, NeurIPS 2020.
    """
    pair = _with_teacher(model, "exemplar")
    with torch.no_grad():
        goal = pair.teacher.get_submodule("encoder")(losses.preparation.evaluation(images))
    features = pair.student.get_submodule("encoder")(losses.exemplar(images, generator))
    return -functional.cosine_similarity(features, goal).mean()


def pi(losses: UnlabelledLosses, model: nn.Module, images: Tensor, generator: Generator) -> Tensor:
    """Π-model: the squared difference of the probabilities of two views.

    Note:
        The second view is a constant for the gradient, as in the code of Oliver et al., whose weight of 20 belongs to
        that; Laine and Aila differentiate both, which is twice the gradient on average.

    References:
        Laine and Aila, Temporal Ensembling for Semi-Supervised Learning, ICLR 2017, Algorithm 1.
    """
    first, second = losses.views(images, generator)
    with torch.no_grad():
        goal = model(second, TARGET)
    return _difference(model(first, TARGET), goal)


def mean_teacher(losses: UnlabelledLosses, model: nn.Module, images: Tensor, generator: Generator) -> Tensor:
    """Mean Teacher: the squared difference of the student's and the teacher's probabilities on two views.

    Note:
        It is the mean over classes, to which the weight of 8 belongs; Eq. 1 has the squared distance, their sum.

    References:
        Tarvainen and Valpola, Mean teachers are better role models, NeurIPS 2017, Eq. 1.
    """
    pair, (first, second) = _with_teacher(model, "mean_teacher"), losses.views(images, generator)
    with torch.no_grad():
        goal = pair.teacher(second, TARGET)
    return _difference(pair.student(first, TARGET), goal)


def vat(losses: UnlabelledLosses, model: nn.Module, images: Tensor, generator: Generator) -> Tensor:
    """VAT: the divergence of the probabilities when an image moves a little in the direction that hurts most.

    The direction takes one power iteration, from noise of length 1e-6 per image.

    References:
        Miyato et al., Virtual Adversarial Training, TPAMI 2018, Algorithm 1.
    """
    x = losses.preparation.training(images, generator)
    with torch.no_grad():
        before = functional.log_softmax(model(x, TARGET), 1)
    with statistics_frozen(model):  # images that nobody will ever see
        direction = _unit(torch.randn(x.shape, generator=generator).to(x)).requires_grad_()
        (slope,) = torch.autograd.grad(_divergence(before, model(x + _SMALL * direction, TARGET)), direction)
        return _divergence(before, model(x + losses.radius * _unit(slope), TARGET))


def pseudo_label(losses: UnlabelledLosses, model: nn.Module, images: Tensor, generator: Generator) -> Tensor:
    """Pseudo-Label: the cross-entropy with the model's own answer, of the images it is sure of.

    References:
        Lee, Pseudo-Label, ICML Workshop 2013; the threshold is that of Oliver et al., NeurIPS 2018.
    """
    logits: Tensor = model(losses.preparation.training(images, generator), TARGET)
    sure, classes = torch.softmax(logits.detach(), 1).max(1)
    each = functional.cross_entropy(logits, classes, reduction="none")
    return (each * (sure > losses.threshold)).mean()


_TASKS: Mapping[str, Callable[[UnlabelledLosses, nn.Module, Tensor, Generator], Tensor]] = {
    "rotation": rotation,
    "exemplar": exemplar,
    "pi": pi,
    "mean_teacher": mean_teacher,
    "vat": vat,
    "pseudo_label": pseudo_label,
}
TASKS = tuple(_TASKS)


def _with_teacher(model: nn.Module, task: str) -> WithTeacher:
    if not isinstance(model, WithTeacher):
        raise ProblemError(f"the task {task!r} needs a teacher: wrap the model in forkmerge.models.WithTeacher.")
    return model


def _difference(one: Tensor, other: Tensor) -> Tensor:
    return functional.mse_loss(torch.softmax(one, 1), torch.softmax(other, 1))


def _divergence(before: Tensor, logits: Tensor) -> Tensor:
    """The mean Kullback–Leibler divergence of new probabilities from those before, given as logarithms."""
    return functional.kl_div(functional.log_softmax(logits, 1), before, log_target=True, reduction="batchmean")


def _unit(direction: Tensor) -> Tensor:
    """Scale every image's direction to length 1."""
    flat = direction.flatten(1)
    scaled: Tensor = (flat / flat.norm(dim=1, keepdim=True).clamp_min(torch.finfo(flat.dtype).tiny)).view_as(direction)
    return scaled

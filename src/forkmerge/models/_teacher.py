"""A running average of a model's weights, as part of the model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from forkmerge.errors import ProblemError


class WithTeacher(nn.Module):
    """A model and its teacher: a copy whose weights follow the model's as an exponential moving average.

    The teacher's weights are buffers, so they fork, merge (by the coefficients), are saved and resume with a branch
    like all buffers, and no optimizer touches them. Normalisation layers of the teacher use a batch's own statistics
    while training; their running statistics follow the model's, too.

    `fit` calls `after_optimizer_step` of every module that has it; in your own loop, call it after `optimizer.step()`.

    Args:
        student: The model that is trained.
        decay: How much of the old average stays in a step.
        evaluate: Whether the teacher answers in evaluation mode, as in Mean Teacher.

    Attributes:
        student: The model.
        teacher: Its average; call it under `torch.no_grad()`.

    References:
        Tarvainen and Valpola, Mean teachers are better role models, NeurIPS 2017, Eq. 2.
    """

    def __init__(self, student: nn.Module, decay: float = 0.95, *, evaluate: bool = True) -> None:
        super().__init__()
        if not 0 <= decay < 1:
            raise ProblemError(f"decay must be at least 0 and below 1, got {decay!r}.")
        self.student, self.decay, self.evaluate = student, decay, evaluate
        self.teacher = _without_parameters(copy.deepcopy(student))

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return the student's answer, or the teacher's in evaluation mode."""
        model = self.teacher if self.evaluate and not self.training else self.student
        return model(*inputs, **options)

    @torch.no_grad()
    def after_optimizer_step(self) -> None:
        """Move the teacher towards the student."""
        averages = dict(self.teacher.named_buffers())
        moving: list[tuple[Tensor, Tensor]] = []
        for name, value in (*self.student.named_parameters(), *self.student.named_buffers()):
            if value.is_floating_point():
                moving.append((averages[name], value))
            else:
                averages[name].copy_(value)
        torch._foreach_lerp_([average for average, _ in moving], [value for _, value in moving], 1 - self.decay)


def _without_parameters(model: nn.Module) -> nn.Module:
    """Turn every parameter into a buffer; tied ones stay tied."""
    buffers: dict[int, Tensor] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            del module._parameters[name]
            module.register_buffer(name, buffers.setdefault(id(parameter), parameter.detach().clone()))
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 0.0  # its own forward passes move nothing
    return model

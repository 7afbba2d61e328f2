"""The memory format of convolutions: decided by rule, and given back at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from forkmerge.errors import ProblemError
from forkmerge.problem.scoring import device_of

# Measured on CPUs: from 16 input channels on, steps in channels_last take 0.8 to 0.9 of the time; below, up to 1.2.
_FEWEST_CHANNELS = 16


def suits_channels_last(model: nn.Module, precision: str) -> bool:
    """Whether convolution weights are kept in channels-last format: a rule of structure, device and precision.

    Some convolution must read at least 16 channels. A CPU gains in any precision, a CUDA device where its tensor cores
    are used (half precision); other devices are left alone. A model that is in this format already stays so.
    """
    if any(_is_channels_last(weight) for weight in _weights(model)):
        return True
    device = device_of(model).type
    if device != "cpu" and not (device == "cuda" and precision != "float32"):
        return False
    if spoils_memory(model):
        return False
    return any(module.in_channels >= _FEWEST_CHANNELS for module in _convolutions(model))


def spoils_memory(model: nn.Module) -> bool:
    """Whether torch's CPU kernels would write outside their tensors in channels-last format.

    Seen in torch 2.13 with AVX2: the backward pass of strided 1×1 convolutions of fewer than 8 input channels, the
    width of a vector, ends with "corrupted size vs. prev_size" or a crash. 16 is the width of AVX-512's vectors.
    """
    return device_of(model).type == "cpu" and any(
        set(module.kernel_size) == {1} and max(module.stride) > 1 and module.in_channels // module.groups < 16
        for module in _convolutions(model)
    )


def to_channels_last(model: nn.Module) -> list[nn.Parameter]:
    """Bring convolution weights to channels-last format and return those that were not.

    Inputs need no conversion: torch's convolutions follow their weights, and give channels-last outputs.
    """
    changed = [weight for weight in _weights(model) if not weight.is_contiguous(memory_format=torch.channels_last)]
    for weight in changed:
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    return changed


@contextmanager
def memory_format(
    model: nn.Module, setting: bool | None, precision: str, check: Callable[[], object]
) -> Iterator[bool]:
    """Decide on the memory format of a run and check the run in it; the model gets its own format back on exit.

    Without a setting the rule decides, and a model that cannot be run in channels-last format (it uses `view` where
    only `reshape` or `flatten` will do) is left in its own.

    Args:
        model: The module.
        setting: The user's choice, or what a resumed run began with; None for the rule.
        precision: Of the run.
        check: Fails where the run would.
    """
    changed: list[nn.Parameter] = []
    try:
        is_on = suits_channels_last(model, precision) if setting is None else setting
        if setting and spoils_memory(model):
            raise ProblemError(
                "channels_last=True would make torch write outside its tensors here: the model has a strided 1×1 "
                "convolution of fewer than 16 input channels. Use channels_last=False, or more channels there."
            )
        if is_on:
            changed = to_channels_last(model)
        try:
            check()
        except RuntimeError as error:
            if not is_on or "view size is not compatible" not in str(error):
                raise
            if setting is not None:
                raise ProblemError(
                    f"the model or the losses cannot be run with channels_last=True ({error}). Use .flatten or "
                    ".reshape instead of .view there, or channels_last=False."
                ) from error
            is_on = False
            _give_back(changed)
            check()
        yield is_on
    finally:
        _give_back(changed)


def _give_back(changed: list[nn.Parameter]) -> None:
    for weight in changed:
        weight.data = weight.data.contiguous()


def _convolutions(model: nn.Module) -> Iterator[nn.Conv2d | nn.ConvTranspose2d]:
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            yield module


def _weights(model: nn.Module) -> list[nn.Parameter]:
    weights = {
        id(parameter): parameter
        for module in _convolutions(model)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 4
    }
    return list(weights.values())


def _is_channels_last(weight: nn.Parameter) -> bool:
    return not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last)

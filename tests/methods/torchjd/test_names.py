"""TorchJD objects from text."""

from __future__ import annotations

import pytest
import torch

import forkmerge as fm
from forkmerge.methods import method_from
from method_steps import GRADIENTS


def test_upgrad_needs_no_quadratic_programming_package() -> None:
    weighting = method_from("torchjd:UPGrad").source.make(3).gramian_weighting
    gramian = torch.from_numpy(GRADIENTS @ GRADIENTS.T)
    weights = weighting(gramian).numpy()
    direction = weights @ GRADIENTS
    assert (GRADIENTS @ direction > -1e-3).all()  # no task gets worse, up to the regularisation of 1e-4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torchjd:UPGard", "Did you mean 'UPGrad'"),
        ("torchjd:Krum", "n_byzantine"),
        ("torchjd:Mean(", "cannot read"),
        ("torchjd:STCH(mu=open)", "unknown TorchJD class 'open'"),
        ("torchjd:STCH(mu=-1)", "strictly positive"),
        ("torchjd:NashMTL", "Or leave out 'torchjd:'"),
    ],
)
def test_what_cannot_be_made_is_refused_with_what_to_write(text: str, message: str) -> None:
    with pytest.raises(fm.ProblemError, match=message):
        method_from(text)

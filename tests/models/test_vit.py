"""Vision transformers: the published size."""

from __future__ import annotations

from forkmerge.models import ViT
from networks import on_meta, size

CLASSES = 1000


def test_vit_base_has_the_published_number_of_parameters() -> None:
    assert size(on_meta(ViT)) + CLASSES * 769 == 86_567_656

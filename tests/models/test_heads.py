"""An encoder and what stands on it: a head per task, or one for all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import forkmerge as fm
from forkmerge.models import Backbone, Classifier, WideResNet


class TestHeads:
    def test_one_head_per_domain_or_one_for_all(self) -> None:
        own = Classifier(WideResNet(10, 1), {"photo": 7, "sketch": 7})
        shared = Classifier(WideResNet(10, 1), {"photo": 7, "sketch": 7}, shared_head=True)
        x = torch.randn(2, 3, 16, 16)
        assert len(own.heads) == 2
        assert not torch.equal(own(x, "photo"), own(x, "sketch"))
        assert len(shared.heads) == 1
        assert shared.head("photo") is shared.head("sketch")
        with pytest.raises(fm.ProblemError, match="foto"):
            own(x, "foto")
        with pytest.raises(fm.ProblemError, match="same classes"):
            Classifier(WideResNet(10, 1), {"photo": 7, "digits": 10}, shared_head=True)

    def test_any_encoder_serves(self) -> None:
        encoder = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
        with pytest.raises(fm.ProblemError, match="pass channels"):
            Classifier(encoder, {"a": 2})
        assert Classifier(encoder, {"a": 2}, channels=5)(torch.zeros(1, 3, 2, 2), "a").shape == (1, 2)

    def test_backbones_of_transformers_are_encoders(self) -> None:
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 48}
        vit = transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=8, **sizes))
        model = Classifier(Backbone(vit), {"a": 4})
        assert model(torch.randn(2, 3, 16, 16), "a").shape == (2, 4)
        with pytest.raises(fm.ProblemError, match="hidden_size"):
            Backbone(nn.Linear(1, 1))

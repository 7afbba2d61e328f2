"""Published weights: names of every hub, the same features, and files that run no code."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

import forkmerge as fm
from forkmerge.models import Backbone, ResNet, ViT, WideResNet, load_published, read_weights
from networks import shaken


def torchvision_vit_name(name: str) -> str:
    """The names that torchvision's vit_b_16 publishes, from ours."""
    for ours, theirs in (
        ("cls_token", "class_token"),
        ("patch_embed.proj", "conv_proj"),
        ("pos_embed", "encoder.pos_embedding"),
        ("blocks.", "encoder.layers.encoder_layer_"),
        (".norm1", ".ln_1"),
        (".norm2", ".ln_2"),
        (".attn.qkv.", ".self_attention.in_proj_"),
        (".attn.proj", ".self_attention.out_proj"),
        (".mlp.fc1", ".mlp.linear_1"),
        (".mlp.fc2", ".mlp.linear_2"),
    ):
        name = name.replace(ours, theirs)
    return "encoder.ln." + name.removeprefix("norm.") if name.startswith("norm.") else name


def transformers_vit_name(name: str) -> str:
    """The names in the files that transformers reads, from those its models have since version 5."""
    for new, old in (
        ("vit.layers.", "vit.encoder.layer."),
        (".attention.q_proj", ".attention.attention.query"),
        (".attention.k_proj", ".attention.attention.key"),
        (".attention.v_proj", ".attention.attention.value"),
        (".attention.o_proj", ".attention.output.dense"),
        (".mlp.fc1", ".intermediate.dense"),
        (".mlp.fc2", ".output.dense"),
    ):
        name = name.replace(new, old)
    return name


class TestPublishedWeights:
    @pytest.mark.parametrize("depth", [18, 50])
    def test_a_resnet_of_transformers_gives_the_same_features(self, depth: int) -> None:
        transformers = pytest.importorskip("transformers")
        blocks = {18: ("basic", [2, 2, 2, 2], 1), 50: ("bottleneck", [3, 4, 6, 3], 4)}[depth]
        config = transformers.ResNetConfig(
            depths=blocks[1], layer_type=blocks[0], hidden_sizes=[64 * blocks[2] * 2**i for i in range(4)]
        )
        theirs = transformers.ResNetForImageClassification(config).eval()
        shaken(theirs)
        ours = ResNet(depth).eval()
        load_published(ours, theirs.state_dict())
        x = torch.randn(2, 3, 64, 64)
        with torch.no_grad():
            torch.testing.assert_close(ours(x), Backbone(theirs.resnet)(x), rtol=1e-4, atol=1e-4)

    def test_a_vit_of_transformers_gives_the_same_features(self) -> None:
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
        config = transformers.ViTConfig(image_size=32, patch_size=8, **sizes)
        theirs = transformers.ViTForImageClassification(config).eval()
        ours = ViT(32, 8, 24, 2, 3, eps=config.layer_norm_eps).eval()
        load_published(ours, theirs.state_dict())
        x = torch.randn(2, 3, 32, 32)
        published = ViT(32, 8, 24, 2, 3, eps=config.layer_norm_eps).eval()
        load_published(published, {transformers_vit_name(name): v for name, v in theirs.state_dict().items()})
        torch.testing.assert_close(ours(x), published(x))
        with torch.no_grad():
            torch.testing.assert_close(ours(x), theirs.vit(x).last_hidden_state[:, 0], rtol=1e-4, atol=1e-5)

    def test_names_of_torchvision_are_understood(self) -> None:
        source, ours = ViT(32, 8, 24, 2, 3), ViT(32, 8, 24, 2, 3)
        published = {torchvision_vit_name(name): value for name, value in source.state_dict().items()}
        assert "encoder.layers.encoder_layer_1.self_attention.in_proj_bias" in published
        load_published(ours, {**published, "heads.head.weight": torch.zeros(1000, 24)})
        x = torch.randn(1, 3, 32, 32)
        torch.testing.assert_close(ours(x), source(x))

    @pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
    def test_files_are_read(self, tmp_path: Path, suffix: str) -> None:
        source, path = WideResNet(10, 1), tmp_path / f"weights{suffix}"
        weights = {**source.state_dict(), "fc.weight": torch.zeros(10, 64)}
        if suffix == ".safetensors":
            safetensors.torch.save_file(weights, path)
        else:
            torch.save({"state_dict": weights}, path)
        ours = WideResNet(10, 1)
        load_published(ours, path)
        assert all(
            torch.equal(a, b) for a, b in zip(ours.state_dict().values(), source.state_dict().values(), strict=True)
        )

    def test_what_does_not_fit_is_named(self, tmp_path: Path) -> None:
        weights = WideResNet(10, 1).state_dict()
        for changed, match in (
            ({k: v for k, v in weights.items() if k != "bn1.weight"}, "missing bn1.weight"),
            ({**weights, "extra": torch.zeros(1)}, "unknown extra"),
            ({**weights, "conv1.weight": torch.zeros(1)}, r"'conv1.weight' has shape \[1\]"),
        ):
            before = WideResNet(10, 1)
            kept = {name: value.clone() for name, value in before.state_dict().items()}
            with pytest.raises(fm.ProblemError, match=match):
                load_published(before, changed)
            assert all(torch.equal(kept[name], value) for name, value in before.state_dict().items())
        with pytest.raises(fm.ProblemError, match="there is no file"):
            read_weights(tmp_path / "none.safetensors")

    def test_a_file_that_would_run_code_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.pth"
        torch.save({"weights": Path("x")}, path)
        with pytest.raises(fm.ProblemError, match="can be read safely"):
            read_weights(path)

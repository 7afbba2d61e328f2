"""The paper's architectures: published sizes, published names, and the same numbers as the models they came from."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, ClassVar

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import forkmerge as fm
from forkmerge.models import (
    ASPP,
    ESMM,
    MTAN,
    Backbone,
    Classifier,
    DeepLabHead,
    DenseModel,
    Fields,
    MMoE,
    ResNet,
    ViT,
    WideResNet,
    load_published,
    read_weights,
)

CLASSES = 1000


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def on_meta(make: Any) -> nn.Module:
    """Shapes without memory: a ViT-Base takes 350 MB."""
    with torch.device("meta"):
        return make()


class TestSizes:
    @pytest.mark.parametrize(
        ("depth", "published"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (101, 44_549_160)]
    )
    def test_resnets_have_the_published_number_of_parameters(self, depth: int, published: int) -> None:
        encoder = on_meta(lambda: ResNet(depth))
        assert size(encoder) + CLASSES * (encoder.channels + 1) == published

    def test_vit_base_has_the_published_number_of_parameters(self) -> None:
        assert size(on_meta(ViT)) + CLASSES * 769 == 86_567_656

    def test_wrn_28_2_has_the_published_number_of_parameters(self) -> None:
        encoder = WideResNet()
        assert encoder.channels == 128
        assert size(encoder) + 10 * 129 == 1_467_610

    @pytest.mark.parametrize("depth", [18, 50])
    @pytest.mark.parametrize("stride", [8, 16, 32])
    def test_dilation_keeps_the_map_large_and_the_parameters_the_same(self, depth: int, stride: int) -> None:
        dilated = ResNet(depth, output_stride=stride, pool=False).eval()
        with torch.no_grad():
            assert dilated(torch.zeros(1, 3, 64, 64)).shape == (1, dilated.channels, 64 // stride, 64 // stride)
        assert {k: v.shape for k, v in dilated.state_dict().items()} == {
            k: v.shape for k, v in ResNet(depth).state_dict().items()
        }

    @pytest.mark.parametrize("depth", [18, 50])
    @pytest.mark.parametrize("stride", [8, 16])
    def test_a_dilated_network_sees_at_every_pixel_what_the_strided_one_sees(self, depth: int, stride: int) -> None:
        """Dilation in place of strides: of the larger map, the pixels of the smaller one are the same."""
        torch.manual_seed(0)
        small, large = ResNet(depth, pool=False).eval(), ResNet(depth, output_stride=stride, pool=False).eval()
        shaken(small)
        large.load_state_dict(small.state_dict())
        x, every = torch.randn(1, 3, 64, 64), 32 // stride
        with torch.no_grad():
            torch.testing.assert_close(small(x), large(x)[:, :, ::every, ::every], rtol=1e-4, atol=1e-4)

    def test_small_images_keep_their_size_in_the_first_layer(self) -> None:
        network = ResNet(18, small_images=True, pool=False).eval()
        with torch.no_grad():
            assert network.stem(torch.zeros(1, 3, 32, 32)).shape[2:] == (32, 32)

    def test_bad_options_are_named(self) -> None:
        for make, match in (
            (lambda: ResNet(20), "depth must be one of"),
            (lambda: ResNet(18, output_stride=4), "output_stride must be"),
            (lambda: WideResNet(27), r"6n \+ 4"),
            (lambda: ViT(100), "multiple of patch"),
        ):
            with pytest.raises(fm.ProblemError, match=match):
                make()


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


def shaken(network: nn.Module) -> None:
    """Give normalisations numbers of their own, so that a mix-up shows."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.0)
            nn.init.uniform_(module.bias, -0.1, 0.1)
            nn.init.uniform_(module.running_mean, -0.1, 0.1)


class TestDense:
    OUTPUTS: ClassVar = {"segmentation": 13, "depth": 1, "normal": 3}

    @pytest.mark.parametrize("kind", [DenseModel, MTAN])
    def test_every_task_gets_a_map_of_the_inputs_size(self, kind: Any) -> None:
        model = kind(ResNet(18, output_stride=8, pool=False), self.OUTPUTS, rates=(2, 4), width=16)
        maps = model(torch.randn(2, 3, 40, 48))
        assert {task: tuple(value.shape) for task, value in maps.items()} == {
            task: (2, channels, 40, 48) for task, channels in self.OUTPUTS.items()
        }
        assert list(model(torch.randn(2, 3, 40, 48), ["depth"])) == ["depth"]

    @pytest.mark.parametrize("kind", [DenseModel, MTAN])
    def test_every_parameter_is_reached(self, kind: Any) -> None:
        model = kind(ResNet(18, output_stride=8, pool=False), self.OUTPUTS, rates=(2, 4), width=16)
        torch.stack([value.square().mean() for value in model(torch.randn(2, 3, 32, 32)).values()]).sum().backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == []

    def test_mtan_shares_the_network_and_not_the_masks(self) -> None:
        model = MTAN(ResNet(18, output_stride=8, pool=False), self.OUTPUTS, rates=(2,), width=8)
        model(torch.randn(2, 3, 32, 32), ["depth"])["depth"].square().mean().backward()
        reached = {
            name.split(".")[0] + "." + name.split(".")[1] for name, p in model.named_parameters() if p.grad is not None
        }
        assert {"masks.depth", "steps.0", "steps.1", "steps.2", "heads.depth"} <= reached
        assert not {name for name in reached if "normal" in name or "segmentation" in name}

    def test_the_mask_of_mtan_selects_what_is_shared(self) -> None:
        """With masks of 1 a task sees the shared network's last map; with masks of 0 nothing."""
        model = MTAN(ResNet(18, output_stride=8, pool=False), {"depth": 1}, rates=(2,), width=8).eval()
        x = torch.randn(1, 3, 32, 32)
        for value, expected in ((100.0, model.encoder(x)), (-100.0, torch.zeros(()))):
            for mask in model.masks["depth"]:
                nn.init.zeros_(mask[4].weight)
                nn.init.constant_(mask[4].bias, value)
            pairs, features = [], model.encoder.stem(x)
            for stage in (model.encoder.layer1, model.encoder.layer2, model.encoder.layer3, model.encoder.layer4):
                inner = stage[:-1](features)
                features = stage[-1](inner)
                pairs.append((inner, features))
            torch.testing.assert_close(model._attend("depth", pairs), expected.expand_as(features))

    def test_mtan_has_the_published_parameters(self) -> None:
        """One bottleneck per stage after the first, whatever the number of tasks; masks of two 1×1 layers per task."""
        model: Any = on_meta(lambda: MTAN(ResNet(50, output_stride=8, pool=False), self.OUTPUTS))
        # A bottleneck of width w from n to 4w channels: n·w, 9w² and 4w² weights, 4nw on its skip connection, and
        # (1 + 1 + 4 + 4) · 2w of normalisations.
        blocks = [n * w + 13 * w * w + 4 * n * w + 20 * w for n, w in ((256, 128), (512, 256), (1024, 512))]
        assert blocks == [379_392, 1_512_448, 6_039_552]
        assert size(model.steps) == sum(blocks) == 7_931_392
        # A mask of stage c: from 2c channels (the first: c) to c/4 to c, with biases and normalisations.
        masks = [
            inputs * c // 4 + 3 * c // 4 + c * c // 4 + 3 * c
            for inputs, c in ((256, 256), (1024, 512), (2048, 1024), (4096, 2048))
        ]
        assert masks == [33_728, 198_528, 790_272, 3_153_408]
        assert size(model.masks) == 3 * sum(masks)

    def test_a_deeplab_head_has_the_published_parameters(self) -> None:
        head = on_meta(lambda: DeepLabHead(2048, 21))
        pyramid = 256 * 2048 * (1 + 3 * 9 + 1) + 5 * 512 + 5 * 256 * 256 + 512
        assert size(head) == pyramid + (9 * 256 * 256 + 512) + (21 * 256 + 21)
        # torchvision's deeplabv3_resnet50 has 42 004 074, of which 2 365 205 are an auxiliary head's.
        assert size(head) + size(on_meta(lambda: ResNet(50))) == 42_004_074 - 2_365_205

    def test_a_pyramid_drops_and_normalises_as_published(self) -> None:
        pyramid = ASPP(8, 4, (2,))
        assert [module.p for module in pyramid.modules() if isinstance(module, nn.Dropout)] == [0.5]
        assert [type(module).__name__ for module in pyramid.whole] == [
            *("AdaptiveAvgPool2d", "Conv2d", "BatchNorm2d", "ReLU"),
        ]

    def test_a_pyramid_takes_a_single_image_where_its_mean_is_not_normalised(self) -> None:
        pyramid = ASPP(8, 4, (2,), normalised_mean=False).train()
        assert pyramid(torch.randn(1, 8, 6, 6)).shape == (1, 4, 6, 6)


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


class TestRecommenders:
    SIZES: ClassVar = [5, 3, 7]

    def batch(self) -> tuple[Tensor, Tensor]:
        codes = torch.stack([torch.randint(0, n, (6,)) for n in self.SIZES], 1)
        return codes, torch.randn(6, 2)

    def test_fields_of_one_table_do_not_overlap(self) -> None:
        fields = Fields(self.SIZES, width=4)
        codes = torch.tensor(list(itertools.product(*(range(n) for n in self.SIZES))))
        parts = fields(codes).view(-1, 3, 4)
        assert len({tuple(row.tolist()) for row in parts.flatten(0, 1)}) == sum(self.SIZES)

    @pytest.mark.parametrize("kind", [ESMM, MMoE])
    def test_every_task_gets_a_logit_and_every_parameter_a_gradient(self, kind: Any) -> None:
        model = kind(self.SIZES, 2, ["click", "buy"], width=4, hidden=(8,))
        found = model(*self.batch())
        assert {task: tuple(value.shape) for task, value in found.items()} == {"click": (6,), "buy": (6,)}
        sum(value.square().mean() for value in found.values()).backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == []
        assert list(model(*self.batch(), tasks=["buy"])) == ["buy"]

    def test_in_the_entire_space_a_purchase_is_a_click_and_a_purchase(self) -> None:
        torch.manual_seed(0)
        model = ESMM(self.SIZES, 2, ["click", "buy"], width=4, hidden=(8,), entire_space=True).double().eval()
        codes, numbers = self.batch()
        features = model.encoder(codes, numbers.double())
        click, given = (torch.sigmoid(model.heads[task](features).squeeze(1)) for task in ("click", "buy"))
        for tasks in (None, ["buy"]):
            found = model(codes, numbers.double(), tasks=tasks)
            torch.testing.assert_close(torch.sigmoid(found["buy"]), click * given)
        with torch.no_grad():
            model.heads["click"][-1].bias.fill_(80.0)
            model.heads["buy"][-1].bias.fill_(-80.0)
        assert model(codes, numbers.double())["buy"].isfinite().all()

    def test_mmoe_mixes_experts_by_its_gates(self) -> None:
        model = MMoE(self.SIZES, 2, ["click", "buy"], width=4, experts=3, bottom=(8,), hidden=(8,)).eval()
        codes, numbers = self.batch()
        with torch.no_grad():
            for gate in model.gates.values():
                gate.weight.zero_()
                gate.bias.copy_(torch.tensor([-1e9, 0.0, -1e9]))
        features = model.encoder(codes, numbers)
        expected = model.heads["buy"](model.experts[1](features)).squeeze(1)
        torch.testing.assert_close(model(codes, numbers)["buy"], expected)

    def test_numbers_alone_and_codes_alone(self) -> None:
        assert Fields([], 3, width=4)(torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, 3)).shape == (2, 4)
        assert Fields([2, 2], width=4)(torch.zeros(2, 2, dtype=torch.long)).shape == (2, 8)
        with pytest.raises(fm.ProblemError, match="at least one field"):
            Fields([])

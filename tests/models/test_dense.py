"""Dense prediction: pyramids, heads and MTAN with the published parameters."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from forkmerge.models import ASPP, MTAN, DeepLabHead, DenseModel, ResNet
from networks import on_meta, size


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

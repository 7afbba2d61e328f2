"""ResNets: published sizes, dilation that sees what strides see, and options that are refused."""

from __future__ import annotations

import pytest
import torch

import forkmerge as fm
from forkmerge.models import ResNet, ViT, WideResNet
from networks import on_meta, shaken, size

CLASSES = 1000


@pytest.mark.parametrize(
    ("depth", "published"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (101, 44_549_160)]
)
def test_resnets_have_the_published_number_of_parameters(depth: int, published: int) -> None:
    encoder = on_meta(lambda: ResNet(depth))
    assert size(encoder) + CLASSES * (encoder.channels + 1) == published


def test_wrn_28_2_has_the_published_number_of_parameters() -> None:
    encoder = WideResNet()
    assert encoder.channels == 128
    assert size(encoder) + 10 * 129 == 1_467_610


@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize("stride", [8, 16, 32])
def test_dilation_keeps_the_map_large_and_the_parameters_the_same(depth: int, stride: int) -> None:
    dilated = ResNet(depth, output_stride=stride, pool=False).eval()
    with torch.no_grad():
        assert dilated(torch.zeros(1, 3, 64, 64)).shape == (1, dilated.channels, 64 // stride, 64 // stride)
    assert {k: v.shape for k, v in dilated.state_dict().items()} == {
        k: v.shape for k, v in ResNet(depth).state_dict().items()
    }


@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize("stride", [8, 16])
def test_a_dilated_network_sees_at_every_pixel_what_the_strided_one_sees(depth: int, stride: int) -> None:
    """Dilation in place of strides: of the larger map, the pixels of the smaller one are the same."""
    torch.manual_seed(0)
    small, large = ResNet(depth, pool=False).eval(), ResNet(depth, output_stride=stride, pool=False).eval()
    shaken(small)
    large.load_state_dict(small.state_dict())
    x, every = torch.randn(1, 3, 64, 64), 32 // stride
    with torch.no_grad():
        torch.testing.assert_close(small(x), large(x)[:, :, ::every, ::every], rtol=1e-4, atol=1e-4)


def test_small_images_keep_their_size_in_the_first_layer() -> None:
    network = ResNet(18, small_images=True, pool=False).eval()
    with torch.no_grad():
        assert network.stem(torch.zeros(1, 3, 32, 32)).shape[2:] == (32, 32)


def test_bad_options_are_named() -> None:
    for make, match in (
        (lambda: ResNet(20), "depth must be one of"),
        (lambda: ResNet(18, output_stride=4), "output_stride must be"),
        (lambda: WideResNet(27), r"6n \+ 4"),
        (lambda: ViT(100), "multiple of patch"),
    ):
        with pytest.raises(fm.ProblemError, match=match):
            make()

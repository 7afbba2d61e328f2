"""EfficientNet-Lite0: the package's own network gives the same features with the same weights."""

from __future__ import annotations

import pytest
import torch

import forkmerge as fm
from forkmerge.models import EfficientNetLite, imagenet_weights, load_published, read_weights


@pytest.fixture(scope="module")
def encoder() -> EfficientNetLite:
    network = EfficientNetLite().eval()
    load_published(network, imagenet_weights())
    return network


@pytest.mark.parametrize("side", [64, 96])
def test_features_are_those_of_the_network_the_weights_were_published_for(encoder: EfficientNetLite, side: int) -> None:
    published = pytest.importorskip("efficientnet_lite_pytorch")
    theirs = published.EfficientNet.from_name("efficientnet-lite0").eval()
    theirs.load_state_dict(read_weights(imagenet_weights()))
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs.extract_features(images).mean((2, 3))
        torch.testing.assert_close(encoder(images), expected, rtol=1e-4, atol=1e-5)


def test_upper_layers_on_features_of_the_lower_ones_are_the_whole_network(encoder: EfficientNetLite) -> None:
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    upper = EfficientNetLite(first_layer=12).eval()
    load_published(upper, imagenet_weights())
    with torch.no_grad():
        torch.testing.assert_close(upper(encoder.below(12)(images)), encoder(images), rtol=0, atol=0)
    held, whole = (sum(value.numel() for value in network.parameters()) for network in (upper, encoder))
    assert (held, whole) == (2_670_240, 3_371_008)


def test_layers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(fm.ProblemError, match="first_layer must be at least 0 and below 18, got 18"):
        EfficientNetLite(first_layer=18)


def test_weights_of_another_network_are_refused(encoder: EfficientNetLite) -> None:
    weights = {**encoder.state_dict(), "layers.18.weight": torch.zeros(1)}
    with pytest.raises(fm.ProblemError, match=r"not of a EfficientNetLite like this one: unknown layers\.18\.weight"):
        load_published(EfficientNetLite(), weights)
    del weights["layers.18.weight"], weights["layers.3.project.0.weight"]
    with pytest.raises(fm.ProblemError, match=r"missing layers\.3\.project\.0\.weight"):
        load_published(EfficientNetLite(), weights)


def test_strides_beyond_the_output_stride_become_dilations(encoder: EfficientNetLite) -> None:
    dense = EfficientNetLite(last_layer=11, output_stride=8, pool=False).eval()
    load_published(dense, imagenet_weights())
    images = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        coarse, fine = encoder.below(12)(images), dense(images)
    assert (coarse.shape, fine.shape) == ((1, 112, 4, 4), (1, 112, 8, 8))
    assert dense.channels == 112
    # What a strided network computes is every second pixel of the dilated one, but for the padding at the edges,
    # which lies elsewhere: "same" is one pixel more at the far side where there is a stride.
    wide = torch.randn(1, 3, 256, 256, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        strided = encoder.below(9)(wide)[0, :, 4:-4, 4:-4]
        dilated = EfficientNetLite(last_layer=8, output_stride=8, pool=False).eval()
        load_published(dilated, imagenet_weights())
        phases = [dilated(wide)[0, :, i::2, j::2][:, 4:-4, 4:-4] for i in (0, 1) for j in (0, 1)]
    assert min((strided - phase).abs().max() for phase in phases) < 1e-4


def test_a_last_layer_before_the_first_is_refused() -> None:
    with pytest.raises(fm.ProblemError, match="last_layer must be from 6 to 17, got 5"):
        EfficientNetLite(6, last_layer=5)

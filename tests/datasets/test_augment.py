"""Augmentations: the same generator gives the same batch, and each is what a plain loop would do."""

from __future__ import annotations

import pytest
import torch
from torch import Generator, Tensor
from torch.nn import functional

import forkmerge as fm
from forkmerge.datasets import augment


def draw(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


@pytest.fixture
def images() -> Tensor:
    return torch.rand(6, 3, 8, 10, generator=draw(1))


@pytest.fixture
def scenes() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = draw(2)
    return (
        torch.rand(8, 3, 12, 18, generator=g),
        torch.randint(-1, 13, (8, 12, 18), generator=g),
        torch.rand(8, 1, 12, 18, generator=g) + 1,
        torch.randn(8, 3, 12, 18, generator=g),
    )


EVERY = {
    "crop": lambda x, g: augment.random_crop(x, g, 3),
    "reflect": lambda x, g: augment.random_crop(x, g, 3, "reflect"),
    "flip": augment.random_flip,
    "resized": lambda x, g: augment.random_resized_crop(x, g, 5),
}


@pytest.mark.parametrize("name", EVERY)
def test_the_same_generator_gives_the_same_batch_and_the_input_is_left_alone(name: str, images: Tensor) -> None:
    before = images.clone()
    first, second, third = (EVERY[name](images, draw(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    assert torch.equal(images, before)


def test_the_draws_of_a_step_come_from_its_context(images: Tensor) -> None:
    first, again, other = (augment.random_crop(images, fm.Context(s, 7 + s).generator) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(("fill", "mode"), [("zeros", "constant"), ("reflect", "reflect")])
def test_a_crop_is_a_window_of_the_padded_image(fill: str, mode: str, images: Tensor) -> None:
    crops = augment.random_crop(images, draw(), 3, fill)
    seen = set()
    for image, cropped in zip(images, crops, strict=True):
        padded = functional.pad(image[None], (3, 3, 3, 3), mode=mode)[0]
        windows = {(i, j): padded[:, i : i + 8, j : j + 10] for i in range(7) for j in range(7)}
        matching = [offset for offset, window in windows.items() if torch.equal(window, cropped)]
        assert len(matching) == 1
        seen.update(matching)
    assert len(seen) > 3


def test_crops_reach_every_offset_and_keep_bytes() -> None:
    images = torch.arange(1, 10, dtype=torch.uint8).view(1, 1, 3, 3).repeat(500, 1, 1, 1)
    crops = augment.random_crop(images, draw(), 1)
    assert crops.dtype == torch.uint8
    assert len({tuple(image.flatten().tolist()) for image in crops}) == 9


def test_a_reflection_wider_than_the_image_is_refused(images: Tensor) -> None:
    with pytest.raises(fm.ProblemError, match="8×10"):
        augment.random_crop(images, draw(), 8, "reflect")
    with pytest.raises(fm.ProblemError, match="'zeros' or 'reflect'"):
        augment.random_crop(images, draw(), 1, "edge")  # type: ignore[arg-type]


def test_flips_mirror_about_half_of_the_images() -> None:
    images = torch.arange(4.0).repeat(1000, 1, 1, 1)
    flipped = augment.random_flip(images, draw())
    mirrored = (flipped == images.flip(-1)).flatten(1).all(1)
    assert torch.equal(flipped[~mirrored], images[~mirrored])
    assert 400 < int(mirrored.sum()) < 600


def test_a_resized_crop_of_the_whole_image_is_the_image() -> None:
    images = torch.rand(2, 3, 6, 6, generator=draw())
    whole = augment.random_resized_crop(images, draw(), 6, area=(1.0, 1.0), ratio=(1.0, 1.0))
    torch.testing.assert_close(whole, images, rtol=0, atol=1e-6)


def test_a_resized_crop_is_a_rectangle_of_the_image() -> None:
    # A plane a·x + b·y stays a plane under any crop; its values show the rectangle that was cut out.
    ramp = torch.arange(32.0)
    images = torch.stack([ramp.expand(32, 32), ramp[:, None].expand(32, 32)])[None].repeat(50, 1, 1, 1)
    crops = augment.random_resized_crop(images, draw(), 16, area=(0.1, 0.5))
    wide, high = (crops[:, axis].amax((1, 2)) - crops[:, axis].amin((1, 2)) for axis in (0, 1))
    share = (wide * 16 / 15) * (high * 16 / 15) / 32**2  # from centres of pixels to their edges
    assert 0.07 < share.min() < 0.2
    assert 0.35 < share.max() < 0.6
    assert crops.min() >= 0
    assert crops.max() <= 31


def test_rectangles_that_never_fit_give_the_whole_image() -> None:
    images = torch.rand(2, 1, 4, 40, generator=draw())
    crops = augment.random_resized_crop(images, draw(), 4, area=(1.0, 1.0))
    expected = functional.interpolate(images, (4, 4), mode="bilinear", align_corners=False)
    torch.testing.assert_close(crops, expected, rtol=0, atol=1e-5)


def test_centre_crops() -> None:
    images = torch.arange(36.0).view(1, 1, 6, 6)
    assert torch.equal(augment.centre_crop(images, 2), images[..., 2:4, 2:4])
    with pytest.raises(fm.ProblemError, match="no centre crop of 7×7"):
        augment.centre_crop(images, 7)


def test_bytes_become_normalised_floats() -> None:
    images = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8, generator=draw())
    floats = augment.as_floats(images, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7)))
    torch.testing.assert_close(floats, (images / 255 - mean) / std)
    assert images.dtype == torch.uint8


class TestScenes:
    def test_are_reproducible_and_keep_their_shapes(self, scenes: tuple[Tensor, ...]) -> None:
        first, again = (augment.scale_crop_flip(scenes, draw()) for _ in range(2))
        for part, same, old in zip(first, again, scenes, strict=True):
            assert torch.equal(part, same)
            assert part.shape == old.shape
            assert part.dtype == old.dtype

    def test_without_scales_are_the_scene_or_its_mirror_image(self, scenes: tuple[Tensor, ...]) -> None:
        changed = augment.scale_crop_flip(scenes, draw(), scales=(1.0,))
        mirrored = [part.flip(-1) for part in scenes]
        mirrored[3] = mirrored[3] * torch.tensor([-1.0, 1, 1]).view(1, 3, 1, 1)
        kinds = set()
        for index in range(8):
            kind = not torch.equal(changed[1][index], scenes[1][index])
            kinds.add(kind)
            for part, new in zip(mirrored if kind else scenes, changed, strict=True):
                torch.testing.assert_close(new[index], part[index], rtol=0, atol=1e-6)
        assert kinds == {False, True}

    def test_what_is_larger_is_nearer_and_labels_stay_labels(self, scenes: tuple[Tensor, ...]) -> None:
        images, labels, _, normals = scenes
        depths = torch.full((8, 1, 12, 18), 6.0)
        zoomed = augment.scale_crop_flip((images, labels, depths, normals), draw(), scales=(1.2, 1.5))
        seen = {round(value, 4) for value in zoomed[2].flatten().tolist()}
        assert seen == {5.0, 4.0}
        assert set(zoomed[1].unique().tolist()) <= set(labels.unique().tolist())

    def test_a_zoomed_scene_is_an_interpolated_crop(self, scenes: tuple[Tensor, ...]) -> None:
        zoomed = augment.scale_crop_flip(scenes, draw(), scales=(1.5,))
        for index in range(8):
            crops = [
                functional.interpolate(
                    scenes[0][index : index + 1, :, i : i + 8, j : j + 12],
                    (12, 18),
                    mode="bilinear",
                    align_corners=True,
                )
                for i in range(5)
                for j in range(7)
            ]
            both = [*crops, *(crop.flip(-1) for crop in crops)]
            assert sum(torch.allclose(crop[0], zoomed[0][index], atol=1e-6) for crop in both) == 1


def test_a_hole_is_a_square_of_zeros_cut_off_at_the_edges() -> None:
    whole = torch.ones(50, 2, 9, 7)
    cut = augment.cut_out(whole, torch.Generator().manual_seed(0), 4)
    assert torch.equal(cut, augment.cut_out(whole, torch.Generator().manual_seed(0), 4))
    sizes = set()
    for image in cut:
        assert torch.equal(image[0], image[1])
        rows, columns = (image[0] == 0).any(1).sum().item(), (image[0] == 0).any(0).sum().item()
        assert (image[0] == 0).sum() == rows * columns
        sizes.add((rows, columns))
    assert max(sizes) == (4, 4)
    assert len(sizes) > 1

"""Preprocessing is torchvision's, to the bit; Pillow's to within one or two grey levels."""

import dataclasses
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from thinsection.encode import encoder_spec
from thinsection.encode.preprocessing import (
    as_uint8_batch,
    centre_crop,
    preprocess,
    resize,
    resize_in_float,
    resized_size,
)
from thinsection.encode.sizes import CPU_TILES
from thinsection.errors import InvalidInputError
from thinsection.testing import run_and_measure
from thinsection.types import MIB
from thinsection.weights.placement import importable_torchvision

PILLOW = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
CASES = [
    (256, 256, 224),
    (512, 512, 448),
    (300, 211, 97),
    (97, 300, 60),
    (100, 100, 224),
]


def tiles(height: int, width: int, count: int = 2) -> torch.Tensor:
    noise = np.random.default_rng(height).integers(
        0, 256, (count, height, width, 3), dtype=np.uint8
    )
    return torch.from_numpy(noise)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("height", "width", "target"), CASES)
def test_resize_equals_torchvision_and_is_within_two_levels_of_pillow(
    height: int, width: int, target: int, interpolation: str
) -> None:
    importable_torchvision()
    from torchvision.transforms.v2 import InterpolationMode, functional

    batch = tiles(height, width)
    size = resized_size(height, width, target)
    pixels = batch.permute(0, 3, 1, 2)
    ours = resize(pixels, size, interpolation)
    mode = InterpolationMode(interpolation)
    theirs = functional.resize(pixels, [target], interpolation=mode, antialias=True)
    assert torch.equal(ours, theirs)
    pillow = [
        np.asarray(Image.fromarray(t).resize(size[::-1], PILLOW[interpolation]))
        for t in batch.numpy()
    ]
    difference = ours.permute(0, 2, 3, 1).numpy().astype(int) - np.stack(pillow).astype(
        int
    )
    assert np.abs(difference).max() <= (1 if interpolation == "bilinear" else 2)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_the_float_path_of_other_devices_is_torchvisions_too(
    interpolation: str,
) -> None:
    importable_torchvision()
    from torchvision.transforms import InterpolationMode, functional

    pixels = tiles(300, 211).permute(0, 3, 1, 2)
    ours = resize_in_float(pixels, resized_size(300, 211, 97), interpolation)
    mode = InterpolationMode(interpolation)
    assert torch.equal(ours, functional.resize(pixels, [97], mode, antialias=True))
    on_cpu = resize(pixels, resized_size(300, 211, 97), interpolation)
    on_noise = (ours.int() - on_cpu.int()).abs()
    assert on_noise.max() <= (1 if interpolation == "bilinear" else 6)
    assert on_noise.float().mean() < 0.2


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_both_paths_are_a_level_apart_on_a_smooth_tile(interpolation: str) -> None:
    wave = torch.arange(256).mul(0.05).sin().mul(100).add(128).to(torch.uint8)
    pixels = (
        torch.minimum(wave[:, None], wave[None]).expand(1, 3, 256, 256).contiguous()
    )
    in_float = resize_in_float(pixels, (224, 224), interpolation)
    assert (
        in_float.int() - resize(pixels, (224, 224), interpolation).int()
    ).abs().max() <= 1


@pytest.mark.parametrize("name", ["uni", "gigapath", "conch_v15", "efficientnet_lite0"])
def test_the_whole_transform_is_torchvisions_composition(name: str) -> None:
    importable_torchvision()
    from torchvision.transforms import v2

    spec = encoder_spec(name)
    batch = tiles(300, 260)
    theirs = v2.Compose(
        [
            v2.Resize(
                spec.resize_px, v2.InterpolationMode(spec.interpolation), antialias=True
            ),
            v2.CenterCrop(spec.input_px),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(spec.mean, spec.std),
        ]
    )(batch.permute(0, 3, 1, 2))
    torch.testing.assert_close(preprocess(batch, spec), theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["uni", "gigapath", "efficientnet_lite0"])
def test_normalising_whole_rows_has_the_bits_of_normalising_channels(name: str) -> None:
    spec, batch = encoder_spec(name), tiles(300, 260, count=2 * CPU_TILES + 1)
    size = resized_size(300, 260, spec.resize_px)
    pixels = centre_crop(
        resize(batch.permute(0, 3, 1, 2), size, spec.interpolation), spec.input_px
    )
    mean, std = torch.tensor((spec.mean, spec.std)).view(2, 1, 3, 1, 1)
    out = preprocess(batch, spec)
    assert torch.equal(out, (pixels.float() / 255 - mean) / std)
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_a_buffer_of_an_earlier_call_is_written_over() -> None:
    spec, batch = encoder_spec("uni"), tiles(256, 256, count=5)
    buffer = preprocess(batch, spec)
    wanted = preprocess(255 - batch[:3].numpy(), spec)
    found = preprocess(255 - batch[:3].numpy(), spec, out=buffer)
    assert torch.equal(found, wanted) and found.data_ptr() == buffer.data_ptr()
    with pytest.raises(
        InvalidInputError,
        match=r"out must come from an earlier call .* got shape \(3, 3",
    ):
        preprocess(batch, spec, out=buffer[:3])
    with pytest.raises(InvalidInputError, match="out must come from an earlier call"):
        preprocess(batch, spec, out=buffer.contiguous())


@pytest.mark.check
@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM of /proc")
def test_a_loop_over_batches_does_not_grow() -> None:
    peaks = [
        run_and_measure(
            "tests.encode.measured_encoding",
            "prepare",
            setup="first_batch",
            count=count,
        ).growth_bytes
        for count in (10, 40)
    ]
    assert max(peaks) <= 48 * MIB  # a batch of 32 tiles in float32 alone is 18 MiB


def test_the_centre_is_cropped_and_not_a_corner() -> None:
    batch = torch.zeros(1, 9, 7, 3, dtype=torch.uint8)
    batch[0, 4, 3] = 255  # the middle pixel
    spec = dataclasses.replace(
        encoder_spec("uni"), resize_px=None, input_px=3, mean=(0, 0, 0), std=(1, 1, 1)
    )
    out = preprocess(batch, spec)
    assert out.shape == (1, 3, 3, 3)
    assert out[0, :, 1, 1].tolist() == [1, 1, 1] and out.sum() == 3


def test_other_dtypes_shapes_and_too_small_tiles_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"got float32 \(1, 4, 4, 3\)"):
        as_uint8_batch(np.zeros((1, 4, 4, 3), np.float32))
    with pytest.raises(InvalidInputError, match=r"got uint8 \(4, 4, 3\)"):
        as_uint8_batch(torch.zeros(4, 4, 3, dtype=torch.uint8))
    spec = dataclasses.replace(encoder_spec("uni"), resize_px=None)
    with pytest.raises(InvalidInputError, match="at least 224 pixels a side"):
        preprocess(tiles(300, 200), spec)


def test_a_read_only_array_is_taken_without_a_warning_and_not_written() -> None:
    array = tiles(256, 256).numpy()
    array.setflags(write=False)
    before = array.copy()
    preprocess(as_uint8_batch(array), encoder_spec("uni"))
    assert np.array_equal(array, before)

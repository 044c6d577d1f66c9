"""uint8 tiles -> what a network takes: resize, centre crop, normalise; in batches, on the device.

The arithmetic is torchvision's `transforms.v2`: on a CPU uint8 stays uint8 through the resize (its
integer kernel), elsewhere float32 is resized and rounded. These two
and Pillow's resize differ by at most one grey level of 255 on smooth tiles; on white noise bicubic
differs by up to six (0.14 in the mean), where integers were clamped between the two passes.

Shapes: B tiles, [B, H, W, 3] uint8 in, [B, 3, input_px, input_px] float32 out.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from thinsection.encode.registry import EncoderSpec
from thinsection.errors import InvalidInputError


def as_uint8_batch(tiles_u8: Tensor | npt.NDArray[Any]) -> Tensor:
    """A uint8 tensor [B, H, W, 3] of the tiles, without a copy where that is possible.

    Raises:
        InvalidInputError: another dtype or shape.
    """
    if isinstance(tiles_u8, np.ndarray):
        # a tensor cannot be read-only: torch would warn and let it be written
        writable = tiles_u8 if tiles_u8.flags.writeable else tiles_u8.copy()
        tiles_u8 = torch.from_numpy(np.ascontiguousarray(writable))
    if tiles_u8.dtype != torch.uint8 or tiles_u8.ndim != 4 or tiles_u8.shape[-1] != 3:
        got = f"{str(tiles_u8.dtype).removeprefix('torch.')} {tuple(tiles_u8.shape)}"
        raise InvalidInputError(f"tiles_u8 must be uint8 of shape (B, H, W, 3), got {got}")
    return tiles_u8


def resized_size(height: int, width: int, resize_px: int) -> tuple[int, int]:
    """(height, width) when the shorter side becomes `resize_px` (torchvision's rounding)."""
    short, long = sorted((height, width))
    scaled = int(resize_px * long / short)
    return (resize_px, scaled) if height <= width else (scaled, resize_px)


def resize(pixels: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    """uint8 [B, 3, H, W] resized to `size` with antialias, still uint8."""
    if tuple(pixels.shape[-2:]) == size:
        return pixels
    if pixels.device.type != "cpu":
        return resize_in_float(pixels, size, interpolation)
    return F.interpolate(pixels, size=size, mode=interpolation, align_corners=False, antialias=True)


def resize_in_float(pixels: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    """The resize where uint8 kernels are missing: float32, then rounded back to uint8."""
    wide = pixels.float()
    out = F.interpolate(wide, size=size, mode=interpolation, align_corners=False, antialias=True)
    return out.clamp_(0, 255).round_().to(torch.uint8)


def centre_crop(pixels: Tensor, input_px: int) -> Tensor:
    """The middle `input_px` square of [B, 3, H, W].

    Raises:
        InvalidInputError: the tile is smaller than that.
    """
    height, width = pixels.shape[-2:]
    if min(height, width) < input_px:
        rule = f"be at least {input_px} px a side for this encoder"
        raise InvalidInputError(f"tiles_u8 must {rule}, got {width} x {height}; use larger tiles")
    top, left = round((height - input_px) / 2.0), round((width - input_px) / 2.0)
    return pixels[..., top : top + input_px, left : left + input_px]


def preprocess(tiles_u8: Tensor, spec: EncoderSpec) -> Tensor:
    """float32 [B, 3, input_px, input_px] on the tiles' device, in channels-last memory order.

    Memory:
        Peak beyond the input: the resized uint8 batch and two float32 batches of
        B * 3 * input_px² * 4 bytes.
    """
    pixels = tiles_u8.permute(0, 3, 1, 2)
    if spec.resize_px is not None:
        height, width = pixels.shape[-2:]
        size = resized_size(height, width, spec.resize_px)
        pixels = resize(pixels, size, spec.interpolation)
    pixels = centre_crop(pixels, spec.input_px)
    scaled = pixels.to(torch.float32, memory_format=torch.channels_last).div_(255.0)
    mean, std = torch.tensor((spec.mean, spec.std), device=scaled.device).view(2, 1, 3, 1, 1)
    return scaled.sub_(mean).div_(std)

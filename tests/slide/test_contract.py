"""Every reader against the contract, and all of them against OpenSlide."""

from thinsection.testing.slide_contract import KINDS, STRIPED, SlideContract
from thinsection.testing.synthetic import PyramidKind

JUDGED = {  # by OpenSlide as well
    "zstd": PyramidKind(compression="zstd"),
    "zstd-differences": PyramidKind(compression="zstd", differences=True),
    "lzw-differences": PyramidKind(compression="lzw", differences=True),
    "deflate-differences": PyramidKind(compression="deflate", differences=True),
    "deflate-adobe": PyramidKind(compression=32946, tile=(240, 128)),
    "jpeg2000-ycbcr": PyramidKind(compression="jpeg2000", aperio=True, ycbcr_2000=True),
}
OURS_ALONE = {
    "webp": PyramidKind(compression="webp"),
    "webp-old": PyramidKind(compression=34927, tile=(240, 128)),
    "jpeg-xl": PyramidKind(compression="jpegxl"),
    "jpeg-xl-dng": PyramidKind(compression=52546, tile=(240, 128)),
    "zstd-old": PyramidKind(compression=34926, differences=True),
    "strips-zstd": PyramidKind(downsamples=(1,), tile=None, compression="zstd"),
    "strips-lzw": PyramidKind(
        downsamples=(1,), tile=None, compression="lzw", differences=True
    ),
    "strips-jpeg-xl": PyramidKind(downsamples=(1,), tile=None, compression="jpegxl"),
}


class TestTiff(SlideContract):
    reader = "tiff"
    kinds = KINDS | STRIPED | JUDGED | OURS_ALONE


class TestOpenSlide(SlideContract):
    reader = "openslide"
    kinds = KINDS | JUDGED
    whole_px = False


class TestImage(SlideContract):
    """TIFFs of one level; PNG and JPEG have tests of their own."""

    reader = "image"
    usual = STRIPED["strips-jpeg"]
    kinds = STRIPED | {"no-levels": KINDS["no-levels"]}

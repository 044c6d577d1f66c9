"""A JPEG 2000 slide costs most in decoding: quality control decodes no segment twice."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import pytest
from tests.qc.slides import REAL

from thinsection.qc import run_qc
from thinsection.slide import open_slide
from thinsection.slide.formats.tiff_decoder import SegmentDecoder
from thinsection.types import RgbArray

JPEG_2000 = REAL.with_name("tcga-cr-7395-01a-01-ts1.svs")


@pytest.mark.skipif(
    not JPEG_2000.exists(), reason=f"no {JPEG_2000.name} under THINSECTION_TEST_SLIDES"
)
def test_picture_and_focus_decode_each_segment_at_most_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: Counter[tuple[int, int]] = Counter()
    decode = SegmentDecoder.decode

    def counted(
        self: SegmentDecoder, indices: Sequence[int], outs: Iterable[RgbArray]
    ) -> Iterator[None]:
        counts.update((self.size[0], index) for index in indices)
        return decode(self, indices, outs)

    monkeypatch.setattr(SegmentDecoder, "decode", counted)
    with open_slide(JPEG_2000, reader="tiff") as slide:
        result = run_qc(slide, "auto", slide_mpp=0.5)
        widths = {level.size[0] for level in slide.levels}
    # the picture reads the coarse level, focus the fine one
    assert {width for width, _ in counts} == widths
    assert "focus_median_ratio" in result.scores
    assert max(counts.values()) == 1

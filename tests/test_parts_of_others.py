"""Parts of other packages: an error inside one names it, and a wrong answer says what to write.

Each part is called as a run, a training or a probe calls it. The encoder is in tests/encode.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from thinsection.errors import (
    InvalidInputError,
    SlideOpenError,
    SlideReadError,
    error_words,
    naming_part,
)
from thinsection.pool import SlideEncoder, TileLayout
from thinsection.predict.heads import HEADS, Head, HeadConfig, HeadOutput
from thinsection.predict.heads.head import build_head
from thinsection.probe import ProbeConfig, TileSet
from thinsection.probe.registry import PROBES, load_probe
from thinsection.qc import Outcome, Pipeline, QcCheck, run_qc
from thinsection.qc.pipeline import CHECKS, check_from_mapping
from thinsection.registry import Entry
from thinsection.slide import Slide
from thinsection.slide.readers import READERS, load_slide
from thinsection.testing.synthetic import ArraySlide
from thinsection.tiles.filters import passing

PIXELS = np.full((300, 400, 3), 200, np.uint8)
TILES = np.zeros((3, 8, 8, 3), np.uint8)


def note(kind: str, name: str) -> str:
    """The line that an error of a part defined in this file ends with."""
    return f"raised in {kind} {name!r} of package 'tests'"


def fails(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("their mistake")


def returns(value: object) -> Callable[..., Any]:
    def part(*_: Any, **__: Any) -> Any:
        return value

    return part


def notes_of(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch):
    """Registers a part under a name, as an entry point would."""

    def add(registry: Any, name: str, part: object) -> None:
        entry = Entry(name=name, help="theirs", target=part)
        monkeypatch.setitem(registry._declared, name, entry)

    return add


def test_only_parts_of_others_are_named_once_and_errors_keep_their_class() -> None:
    with pytest.raises(KeyError) as ours, naming_part("reader", "tiff", build_head):
        raise KeyError("a")
    assert notes_of(ours.value) == []
    with (
        pytest.raises(KeyError) as theirs,
        naming_part("reader", "x", fails),
        naming_part("reader", "x", partial(fails, 1)),
    ):
        raise KeyError("a")
    assert notes_of(theirs.value) == [note("reader", "x")]
    with pytest.raises(KeyboardInterrupt) as stop, naming_part("reader", "x", fails):
        raise KeyboardInterrupt
    assert notes_of(stop.value) == []


def test_the_words_of_an_unforeseen_error_name_the_part() -> None:
    error = ZeroDivisionError("division by zero")
    assert error_words(error) == "unexpected error: division by zero"
    with pytest.raises(ZeroDivisionError), naming_part("head", "top", fails):
        raise error
    named = note("head", "top")
    assert error_words(error) == f"unexpected error: division by zero ({named})"


class TheirSlide(ArraySlide):
    reader = "theirs"

    def __init__(self, path: str, slide_mpp: Any = None) -> None:
        super().__init__([PIXELS], name=path)

    _fill = fails


def test_a_reader_is_named_when_it_opens_and_when_it_reads(register) -> None:
    register(READERS, "theirs", fails)
    with pytest.raises(SlideOpenError, match="ZeroDivisionError") as opening:
        load_slide("theirs", "a.x")
    assert notes_of(opening.value) == [note("reader", "theirs")]
    register(READERS, "theirs", TheirSlide)
    slide = load_slide("theirs", "a.x")
    with pytest.raises(SlideReadError, match="their mistake") as reading:
        slide.read_region((0, 0), 0, (8, 8))
    assert notes_of(reading.value) == [note("reader", "theirs")]
    register(READERS, "theirs", returns(None))
    with pytest.raises(InvalidInputError, match="must return a Slide, got NoneType"):
        load_slide("theirs", "a.x")


@dataclass(frozen=True, kw_only=True)
class TheirCheck(QcCheck):
    """Does what the test says."""

    kind = "theirs"
    name: str = "their name"
    answer: Callable[..., Any] = fails

    def __call__(self, view: Any) -> Outcome:
        outcome: Outcome = self.answer(view)
        return outcome


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (returns(None), "TheirCheck must return an Outcome, got NoneType; return view"),
        (
            returns(Outcome(mask_use=np.zeros((2, 2), bool))),
            r"mask_use of TheirCheck must be bool of shape \(\d+, \d+\).* bool \(2, 2\)",
        ),
        (
            lambda view: Outcome(affected_area=view.gray),
            "affected_area of TheirCheck must be bool .* got float64 .*threshold first",
        ),
        (
            lambda view: Outcome(sure_area=view.mask_use.tolist()),
            "sure_area of TheirCheck must be bool .* got list",
        ),
        (
            lambda view: view.left(view.mask_use[1:], "share"),
            r"mask of TheirCheck must be bool of shape \(\d+, \d+\), as view.mask_use, got bool "
            r"\(\d+, \d+\); compare",
        ),
        (
            lambda view: view.without(view.gray, "share"),
            "mask of TheirCheck must be bool .* got float64",
        ),
        (
            lambda view: view.left_regions([True], "share"),
            "mask of TheirCheck must be bool .* got list ;",
        ),
        (
            returns(Outcome(scores={"a": 1.0, "b": float("nan")})),
            "scores of TheirCheck must be finite numbers or texts, got nan for 'b'; write 'NA'",
        ),
        (
            lambda view: Outcome(scores={"each": view.mask_use.sum(axis=0)}),
            "scores of TheirCheck must be finite .* for 'each'",
        ),
    ],
)
def test_a_wrong_outcome_of_a_check_names_array_and_remedy(
    answer: Callable[..., Any], message: str
) -> None:
    pipeline = Pipeline(name="theirs", checks=(TheirCheck(answer=answer),))
    with pytest.raises(InvalidInputError, match=message) as caught:
        run_qc(ArraySlide([PIXELS]), pipeline)
    assert notes_of(caught.value) == [note("qc check", "theirs")]


def test_scalars_of_numpy_and_torch_are_scores() -> None:
    scores: dict[str, Any] = {
        "pixels": np.int64(3),
        "mean": np.float32(0.5),
        "tensor": torch.tensor(2),
        "word": "NA",
    }
    pipeline = Pipeline(
        name="theirs", checks=(TheirCheck(answer=returns(Outcome(scores=scores))),)
    )
    found = run_qc(ArraySlide([PIXELS]), pipeline).scores
    assert json.loads(json.dumps({name: found[name] for name in scores})) == {
        "pixels": 3,
        "mean": 0.5,
        "tensor": 2,
        "word": "NA",
    }


class Kindless(TheirCheck):
    """Does not say its kind."""

    kind = ""


class Plain(TheirCheck):
    """Is no dataclass."""

    kind = "own check"
    width: str = "1 px"


class OwnKindless(QcCheck):
    """Has no kind at all."""


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            Kindless,
            "kind of Kindless must be 'own check', the name of its entry point, ",
        ),
        (
            OwnKindless,
            "kind of OwnKindless must be 'own check', .* got None; write kind: Cl",
        ),
        (TheirCheck, "kind of TheirCheck must be 'own check', .* got 'theirs'"),
        (
            Plain,
            r"Plain must be a frozen dataclass, got a plain class; write @dataclass\(",
        ),
    ],
)
def test_a_wrong_class_of_a_check_is_named_with_a_remedy(
    part: type[QcCheck], message: str, register: Any
) -> None:
    register(CHECKS, "own check", part)
    with pytest.raises(InvalidInputError, match=message):
        check_from_mapping({"kind": "own check", "name": "a"})


def test_a_reader_passes_one_number_or_two_as_its_resolution() -> None:
    levels = ArraySlide([PIXELS]).levels

    class Numbers(Slide):
        _fill = fails

    def opened(slide_mpp: Any) -> Slide:
        return Numbers("a b.x", levels, slide_mpp=slide_mpp)

    for passed in (0.5, np.float32(0.5), (0.5, 0.5), np.array([0.5, 0.5]), [0.5, 0.5]):
        assert opened(passed).slide_mpp == (0.5, 0.5)
    assert opened(None).slide_mpp is None
    assert opened((0.25, 0.5)).slide_mpp == (0.25, 0.5)
    for wrong in ("0.5", (0.5,), (0.5, None)):
        with pytest.raises(
            InvalidInputError,
            match=r"slide_mpp must be one number, two numbers .* 'a b.x'",
        ):
            opened(wrong)


def test_a_check_that_fails_is_named_by_its_kind() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_qc(ArraySlide([PIXELS]), Pipeline(name="p", checks=(TheirCheck(),)))
    assert notes_of(caught.value) == [note("qc check", "theirs")]


class TheirHead(Head):
    """Answers with a value of the test."""

    answer: Any = None

    def forward(self, embeddings: Any, coords: Any = None) -> HeadOutput:
        output: HeadOutput = self.answer()
        return output


class BrokenHead(TheirHead):
    """Cannot be made."""

    __init__ = fails


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (fails, ZeroDivisionError, "their mistake"),
        (
            returns(torch.zeros(2)),
            InvalidInputError,
            r"TheirHead.forward must return a HeadOutput, got Tensor; return HeadOutput\(",
        ),
        (
            returns(HeadOutput(torch.zeros(1, 2))),
            InvalidInputError,
            r"logits of TheirHead.forward must have shape \(2,\), .* got \(1, 2\)",
        ),
    ],
)
def test_a_head_is_named_and_its_logits_are_checked(
    register, answer: Any, error: type[Exception], message: str
) -> None:
    register(HEADS, "theirs", TheirHead)
    head = build_head(HeadConfig(head="theirs"), 4, 2)
    head.answer = answer
    with pytest.raises(error, match=message) as caught:
        head(torch.zeros(3, 4))
    assert notes_of(caught.value) == [note("head", "theirs")]


def test_a_head_must_be_a_class_and_may_fail_when_it_is_made(register) -> None:
    register(HEADS, "theirs", fails)
    with pytest.raises(InvalidInputError, match="'theirs' must be a subclass of thin"):
        build_head(HeadConfig(head="theirs"), 4, 2)
    register(HEADS, "broken", BrokenHead)
    with pytest.raises(ZeroDivisionError) as caught:
        build_head(HeadConfig(head="broken"), 4, 2)
    assert notes_of(caught.value) == [note("head", "broken")]


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ([True] * 3, r"must return bool of shape \(3,\).* got list None None"),
        (np.ones(3), r"must return bool .* got ndarray float64 \(3,\)"),
        (np.ones((3, 1), bool), r"must return bool .* got ndarray bool \(3, 1\)"),
    ],
)
def test_a_tile_filter_is_named_and_its_answer_is_checked(
    keep: object, message: str
) -> None:
    assert passing(returns(np.ones(3, bool)), TILES).all()
    with pytest.raises(InvalidInputError, match=message) as caught:
        passing(returns(keep), TILES)
    assert notes_of(caught.value) == [note("tile filter", "part")]
    with pytest.raises(ZeroDivisionError) as failed:
        passing(partial(fails, 1), TILES)
    assert notes_of(failed.value) == [note("tile filter", "")]


class TheirSlideEncoder(SlideEncoder):
    """Fails."""

    name = "theirs"
    encode = fails


def test_a_slide_encoder_is_named() -> None:
    embeddings = np.zeros((2, 4), np.float32)
    coords = np.zeros((2, 2), np.int64)
    with pytest.raises(ZeroDivisionError) as caught:
        TheirSlideEncoder().encode_tiles(embeddings, coords, TileLayout.square(8))
    assert notes_of(caught.value) == [note("slide encoder", "theirs")]


def test_a_probe_is_named(register, tmp_path: Path) -> None:
    def probe(data: TileSet, config: ProbeConfig) -> Any:
        raise ZeroDivisionError

    register(PROBES, "theirs", probe)
    with pytest.raises(ZeroDivisionError) as caught:
        load_probe("theirs").run(None, None)
    assert notes_of(caught.value) == [note("probe", "theirs")]

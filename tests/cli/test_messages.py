"""Messages name the cause: each command of a list of confusing ones, and what it must say."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.predict.planted import write_embeddings

import thinsection as ts
from thinsection import errors
from thinsection.cli.main import main
from thinsection.config import in_words_of
from thinsection.errors import (
    BudgetError,
    ConfigError,
    InvalidInputError,
    OutputError,
    StoreError,
    ThinsectionError,
    UnknownEncoderError,
    WeightsError,
    error_words,
    named_error_words,
    with_options,
)
from thinsection.run import task
from thinsection.stages.config import RunConfig
from thinsection.testing.synthetic import write_he_slide

CLASS_NAMES = [
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, ThinsectionError)
]


class Said:
    """Runs commands in this process; returns the exit code, and all lines that a user sees."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def __call__(self, *arguments: str | Path) -> tuple[int, str]:
        self.monkeypatch.setattr(
            sys, "argv", ["thinsection", *(str(one) for one in arguments)]
        )
        self.capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = self.capsys.readouterr()
        text = captured.out + captured.err
        for name in (*CLASS_NAMES, "OSError"):
            assert name not in text
        return code, text


@pytest.fixture
def said(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Said:
    monkeypatch.chdir(tmp_path)
    return Said(monkeypatch, capsys)


@pytest.fixture
def slides(tmp_path: Path) -> Path:
    (tmp_path / "slides").mkdir()
    write_he_slide(tmp_path / "slides" / "s1.svs", (900, 700), seed=1)
    return tmp_path / "slides"


def labelled(folder: Path, labels: list[str]) -> Path:
    """Embeddings of a slide for each label, and their table beside the folder."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    rows = []
    for number, label in enumerate(labels):
        write_embeddings(folder / f"s{number}.h5", rng.normal(size=(6, 4)))
        rows.append(f"s{number},{label}")
    table = folder.parent / f"{folder.name}.csv"
    table.write_text("\n".join(["slide_id,y", *rows]) + "\n")
    return table


@pytest.mark.parametrize("command", ["heatmap", "predict"])
def test_a_model_that_does_not_exist_is_said_with_the_nearest_one(
    said: Said, tmp_path: Path, command: str
) -> None:
    for name in ("grade", "subtype"):
        home = tmp_path / "results" / "experiments" / name
        (home / "folds").mkdir(parents=True)
        (home / "model.safetensors").write_bytes(b"x")
        (home / "folds" / "fold0-0.safetensors").write_bytes(b"x")
    (tmp_path / "new").mkdir()
    wrong = "results/experiments/gradee/model.safetensors"
    code, text = said(command, wrong, "new", "--out", "p")
    assert code == 2
    assert f"model must be an existing file, got '{wrong}'" in text
    assert "did you mean 'results/experiments/grade/model.safetensors'?" in text
    with pytest.raises(WeightsError, match="model must be an existing file"):
        ts.heatmap("other.safetensors", tmp_path / "new", out=tmp_path / "p")


def test_tissue_and_qc_exclude_each_other(said: Said, slides: Path) -> None:
    code, text = said("run", slides, "--out", "o", "--qc", "auto", "--tissue", "drawn")
    assert code == 2
    assert "--tissue and --qc exclude each other" in text
    assert "drop one of them" in text
    with pytest.raises(ConfigError, match=r"^tissue and qc exclude each other.*'auto'"):
        ts.run(slides, out="o", qc="auto", tissue="drawn")


def test_an_unknown_encoder_is_called_unknown(said: Said, slides: Path) -> None:
    code, text = said("run", slides, "--out", "o", "--encoder", "uni2h")
    assert code == 2
    assert "unknown encoder 'uni2h'; did you mean 'uni2_h'?" in text
    assert "`thinsection models` lists all" in text
    with pytest.raises(UnknownEncoderError, match="unknown encoder 'nothing_like_it'"):
        ts.run(slides, out="o", encoders=["nothing_like_it"])


@pytest.mark.parametrize(
    ("slide_encoder", "tile_encoder"), [("titan", "conch_v15"), ("prism", "virchow")]
)
def test_a_slide_encoder_of_other_tiles_is_refused_before_any_weights(
    said: Said,
    slides: Path,
    monkeypatch: pytest.MonkeyPatch,
    slide_encoder: str,
    tile_encoder: str,
) -> None:
    def no_weights(*arguments: object, **settings: object) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(task, "load_models", no_weights)
    code, text = said("run", slides, "--out", "o", "--slide-encoder", slide_encoder)
    assert code == 2
    assert f"tile encoder must be {tile_encoder}" in text
    assert f"for slide encoder '{slide_encoder}', got 'efficientnet_lite0'" in text
    assert f"--encoder {tile_encoder}" in text


def test_an_output_that_cannot_be_written_has_its_own_code(
    said: Said, slides: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    for out in ("/proc/x", tmp_path / "file" / "below"):
        code, text = said("run", slides, "--out", out)
        assert code == 4
        assert "out must be a writable folder" in text and "[Errno" not in text
        assert "pass another --out, or make this one writable" in text
    with pytest.raises(OutputError, match=r'pass another out="\.\.\.", or make'):
        ts.run(slides, out="/proc/x")


def test_a_remedy_names_the_keyword_in_python_and_the_option_in_the_shell(
    said: Said, slides: Path, tmp_path: Path
) -> None:
    with pytest.raises(BudgetError, match=r"; raise memory=\.\.\.$"):
        ts.run(slides, out=tmp_path / "o", memory="1MiB")
    with pytest.raises(BudgetError, match=r"memory=\.\.\. or lower batch_size=\.\.\.$"):
        ts.run(slides, out=tmp_path / "o", memory="1MiB", batch_size=8)
    labelled(tmp_path / "f", ["a", "b"])
    with pytest.raises(ConfigError, match=r'; pass labels="FILE"$'):
        ts.train(tmp_path / "f", out=tmp_path / "e")
    code, text = said("train", tmp_path / "f", "--out", tmp_path / "e")
    assert code == 2 and "; pass --labels FILE\n" in text


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ('got none; pass labels="..." or target="A b"', "pass --labels or --target 'A b'"),
        ('got none; pass tile_mpp=0.5 or tile_mpp="native"', "--tile-mpp 0.5 or --tile-mpp native"),
        ("got 5; pass folds=3, so that", "pass --folds 3, so that"),
        ("got none; pass weights=FILE (x)", "pass --weights FILE (x)"),
        ("got none; pass pretrained=False", "pass --no-pretrained"),
        ('got none; pass encoders="a b" or segmenters=...', "--encoder 'a b' or --segmenter"),
        ('got 2; pass read="2=event" and read="1 a=censored"',
         "pass --read 2=event and --read '1 a=censored'"),
        ("got 1; raise memory=... or lower batch_size=...", "--memory or lower --batch-size"),
        ('got a; pass out="...", or overwrite=True to', "pass --out, or --overwrite to"),
        ('got the file \'x="1"\'; rename it', 'got the file \'x="1"\'; rename it'),
        ('got <a x="1">', 'got <a x="1">'),
    ],
)  # fmt: skip
def test_options_stand_in_place_of_keywords_in_the_remedy_alone(
    words: str, option: str
) -> None:
    assert option in with_options(words)


def test_a_memory_that_holds_no_batch_has_a_remedy_that_works(
    said: Said, slides: Path
) -> None:
    _, text = said("run", slides, "--out", "o", "--memory", "1MiB")
    assert "for batches of 1 tile of" in text and "; raise --memory\n" in text
    _, text = said("run", slides, "--out", "o", "--memory", "1MiB", "--batch-size", "8")
    assert "raise --memory or lower --batch-size" in text
    (least,) = re.findall(r"memory must be >= ([\d.]+ MiB)", text)
    assert float(least.split()[0]) > 1


@pytest.mark.parametrize(
    ("labels", "folds", "words"),
    [
        (["a"] * 2 + ["b"] * 8, 5, "5 folds must have >= 5 cases of each class"),
        (["a"] * 2 + ["b"] * 8, 2, "training cases of fold 1 must have >= 2 cases"),
        (["a"] * 3 + ["b"] * 8, 2, "pass --folds 3, so that fewer of them are tested"),
        (["a"] * 4 + ["b"] * 8, 5, "pass --folds 4, or add cases"),
    ],
)
def test_a_class_with_too_few_cases_is_told_which_division_needs_how_many(
    said: Said, tmp_path: Path, labels: list[str], folds: int, words: str
) -> None:
    table = labelled(tmp_path / "f", labels)
    code, text = said(
        "train", "f", "--labels", table, "--target", "y", "--out", "e", "--folds", str(folds)
    )  # fmt: skip
    assert code == 2
    assert words in text and "of class 'a'" in text
    if labels.count("a") < 3:
        assert "add cases: 3 are the least, with --folds 3" in text


def test_the_number_of_folds_that_a_message_proposes_works(
    said: Said, tmp_path: Path
) -> None:
    table = labelled(tmp_path / "f", ["a"] * 3 + ["b"] * 8)
    arguments = ("train", "f", "--labels", table, "--target", "y", "--out", "e")
    fast = ("--head", "linear", "--epochs", "1")
    _, text = said(*arguments, "--folds", "2")
    (folds,) = re.findall(r"pass --folds (\d+)", text)
    assert said(*arguments, *fast, "--folds", folds)[0] == 0


def test_a_setting_is_a_flag_on_the_command_line_and_a_keyword_in_python(
    said: Said, slides: Path, tmp_path: Path
) -> None:
    _, text = said("run", slides, "--out", "o", "--tile-px", "0")
    assert "error: --tile-px must be >= 1, got 0" in text
    _, text = said(
        "run", slides, "--out", "o", "--patients", "late", "--until", "tiles"
    )
    assert "--patients must be 'none'" in text and "--until" in text
    assert "aggregate." not in text and "output." not in text
    with pytest.raises(ConfigError, match=r"^tile_px must be >= 1, got 0"):
        ts.run(slides, out="o", tile_px=0)
    # a file's settings are named as in the file
    (tmp_path / "run.toml").write_text("[tiles]\ntile_px = 0\n")
    _, text = said("run", slides, "--out", "o", "--config", "run.toml")
    assert "tile_px must be >= 1" in text


def test_only_whole_names_of_settings_become_flags() -> None:
    text = "tiles.tile_px, in slides.tile_px_x or a/tiles.tile_px.h5 and tissue"
    flags = in_words_of(text, RunConfig, flags=True)
    assert flags == "--tile-px, in slides.tile_px_x or a/tiles.tile_px.h5 and tissue"
    assert in_words_of("encode.encoders is set", RunConfig, flags=True).startswith(
        "--encoder"
    )


def test_an_executor_is_named_by_the_same_word_in_python(
    slides: Path, tmp_path: Path
) -> None:
    out = tmp_path / "results"
    summary = ts.run(slides, out=out, executor="inline", until="tissue")
    assert summary.exit_code == 0
    with pytest.raises(ConfigError, match=r"executor must be .*'poool'"):
        ts.run(slides, out=out, executor="poool", until="tissue")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            StoreError("file must be readable, got 'x'"),
            "file must be readable, got 'x'",
        ),
        (InvalidInputError("a\nb"), "a b"),
        (
            OSError(27, "File too large", "/x"),
            "the system says 'File too large' in '/x'",
        ),
        (MemoryError("no room"), "out of memory: no room"),
        (KeyError("coords"), "unexpected error: there is no 'coords'"),
        (AssertionError(), "unexpected error: assertion error"),
        (ValueError("odd"), "unexpected error: odd"),
    ],
)
def test_errors_are_told_in_plain_words(error: Exception, words: str) -> None:
    assert error_words(error) == words


def test_errors_of_other_processes_are_told_in_the_same_words() -> None:
    assert named_error_words("StoreError", "must be") == "must be"
    assert named_error_words("ValueError", "odd") == "unexpected error: odd"


def test_a_bad_slide_is_told_without_the_name_of_a_class(
    said: Said, slides: Path, tmp_path: Path
) -> None:
    (slides / "bad.svs").write_bytes(b"no slide")
    code, text = said("run", slides, "--out", "o", "--until", "tissue")
    assert code == 3
    assert "bad: failed (open): no reader opens" in text
    failed = (tmp_path / "o" / "failed.csv").read_text()
    assert "SlideOpenError" not in failed
    # the log has it
    assert "SlideOpenError" in (tmp_path / "o/slides/bad/failure.json").read_text()

"""Secrets of URLs through every command that takes a slide by URL: no file, no line has them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.guarded_server import SIGNATURES, WORD, GuardedServer, leaks
from tests.support.range_server import serving
from typer.testing import CliRunner

from thinsection.cli.app import build_app
from thinsection.files.urls import VARIABLE
from thinsection.testing.synthetic import write_he_slide

pytest.importorskip("fsspec", reason="fsspec is not installed")

NAMES = [f"c{number}" for number in range(8)]


class Commands:
    """Runs commands of one results folder, and keeps what they print."""

    def __init__(self, folder: Path, host: str) -> None:
        self.folder = folder
        self.host = host
        self.printed = ""

    def url(self, name: str, signature: str = SIGNATURES[0]) -> str:
        """A URL with a password, or with a signature for every second slide."""
        if NAMES.index(name) % 2:
            return f"http://bob:{WORD}@{self.host}/{name}.svs"
        return f"http://{self.host}/{name}.svs?X-Amz-Signature={signature}"

    def table(self, signature: str = SIGNATURES[0]) -> Path:
        """A cohort with labels."""
        path = self.folder.parent / "cohort.csv"
        lines = ["slide_path,slide_id,grade,source"]
        for number, name in enumerate(NAMES):
            url = self.url(name, signature)
            grade = "high" if number % 4 < 2 else "low"
            lines.append(f"{url},{name},{grade},{url}")
        path.write_text("\n".join(lines) + "\n")
        return path

    def __call__(self, *arguments: str | Path, code: int = 0) -> str:
        """Runs a command; returns what it printed."""
        words = [str(argument) for argument in arguments]
        result = CliRunner().invoke(build_app(words), words)
        self.printed += result.output + result.stderr + repr(result.exception)
        assert result.exit_code == code, (words, result.output, result.stderr)
        return result.output

    def check(self) -> None:
        """Nothing that was written or printed holds a secret."""
        assert leaks(self.folder) == []
        for secret in (WORD, *SIGNATURES):
            assert secret not in self.printed


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Commands]:
    place = tmp_path / "whole-urls"
    place.touch(mode=0o600)
    monkeypatch.setenv(VARIABLE, str(place))
    files = {}
    for number, name in enumerate(NAMES):
        path = tmp_path / f"{name}.svs"
        write_he_slide(path, (900, 700), seed=number)
        files[path.name] = path.read_bytes()
        path.unlink()
    monkeypatch.setattr(GuardedServer, "files", files)
    monkeypatch.setattr(GuardedServer, "signature", SIGNATURES[0], raising=False)
    monkeypatch.setattr(GuardedServer, "data", b"no slide", raising=False)
    (tmp_path / "out").mkdir()
    with serving(GuardedServer) as port:
        yield Commands(tmp_path / "out", f"127.0.0.1:{port}")


def test_info_prints_the_public_form_of_a_url(commands: Commands) -> None:
    two = [commands.url("c0"), commands.url("c1")]
    for form in ((), ("--json",)):
        printed = commands("info", *two, *form)
        assert f"{commands.host}/c0.svs" in printed
        assert f"{commands.host}/c1.svs" in printed
    wrong = commands.url("c1").replace("bob", "eve")
    assert f"{commands.host}/c1.svs" in commands("info", wrong, "--json", code=3)
    commands.check()


@pytest.mark.check
@pytest.mark.timeout(900)
def test_no_command_stores_or_prints_a_secret_of_a_url(commands: Commands) -> None:
    out = commands.folder
    results = out / "results"
    allowed = ("--allow-local-urls",)
    table = commands.table()
    two = [commands.url("c0"), commands.url("c1")]
    commands("plan", table, *allowed)
    commands("slurm", "script", table, "--out", results, *allowed)
    commands("run", table, "--out", results, *allowed, "--tile-px", "128", "--json")
    commands("run", *two, "--out", out / "few", "--until", "tiles")
    commands.check()
    # a signature of tomorrow resumes; a wrong one fails, and is recorded
    GuardedServer.signature = SIGNATURES[1]
    again = commands("run", commands.table(SIGNATURES[1]), "--out", results, *allowed,
                     "--tile-px", "128", "--json")  # fmt: skip
    assert '"skipped"' in again
    failed = f"http://{commands.host}/late.svs?X-Amz-Signature={SIGNATURES[0]}"
    commands("run", failed, "--out", results, "--tile-px", "128", code=3)
    commands.check()
    urls = [commands.url(name, SIGNATURES[1]) for name in NAMES]
    commands("relink", results, *urls)
    commands("ls", results, "--json")
    commands("verify", results)
    commands("merge", results, "--out", out / "merged", code=3)
    experiment = results / "experiments" / "grade"
    commands("train", results, "--labels", table, "--target", "grade", "--folds", "2",
             "--epochs", "2", "--out", experiment)  # fmt: skip
    model = experiment / "model.safetensors"
    commands("model", "show", model)
    commands("predict", model, *urls[:2], "--out", out / "predicted")
    commands("heatmap", model, out / "predicted")
    commands("heatmap", "tissue_fraction", results)
    for tool in ("qupath", "trident", "clam"):
        commands("export", tool, results, "--out", out / tool)
    commands.check()

"""The Nextflow modules: nf-core's form, their scripts in bash, and the real tool where it is.

Nextflow is not on PyPI: the package of that name is its launcher, which downloads the program. So
the test with the real tool is skipped on machines without it. Elsewhere bash executes the scripts
of the modules, each in a folder of its own with links to its inputs, as Nextflow does. The values
that Nextflow puts into a script are put there by this file.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from thinsection.files.atomic import read_table
from thinsection.results.verify import verify
from thinsection.run.run import run
from thinsection.testing.synthetic import write_he_slide

ROOT = Path(__file__).parents[2] / "workflows" / "nextflow"
MODULES = ROOT / "modules" / "local" / "thinsection"
NAMES = ("run", "merge")
HOW_TO = ROOT.parents[1] / "docs" / "how-to" / "nextflow.nf"
NEXTFLOW = shutil.which("nextflow")


def text_of(name: str) -> str:
    return (MODULES / name / "main.nf").read_text()


def script_of(text: str, part: str) -> str:
    """Text of `script:` or `stub:`, without its common indentation, as Nextflow takes it."""
    block = text.split(f"    {part}:\n")[1]
    lines = block.split('"""')[1].strip("\n").splitlines()
    return "\n".join(line.removeprefix("    ") for line in lines)


def rendered(script: str, values: Mapping[str, str]) -> str:
    """Script with values in the place of Groovy's expressions; each must be known."""
    text = re.sub(r"(?<!\\)\$\{([^}]*)\}", lambda match: values[match[1]], script)
    return text.replace("\\$", "$").replace("\\\\", "\\")


def execute(script: str, folder: Path) -> None:
    """Runs a script with the options of Nextflow's own shell."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def values_of(slide_id: str, slide: str = "", args: str = "") -> dict[str, str]:
    """Values of the expressions in both modules."""
    return {
        "prefix": slide_id,
        "args": args,
        "first": slide,
        "meta.id": slide_id,
        "meta.patient_id ?: ''": f"patient of {slide_id}",
        "meta.label ?: ''": "",
        "task.cpus": "1",
        "task.process": "THINSECTION",
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_module_has_the_form_of_nf_core(name: str) -> None:
    text = text_of(name)
    assert text.startswith(f"process THINSECTION_{name.upper()} {{\n")
    for part in ("label", "conda", "container"):
        assert re.search(rf"^    {part} ", text, re.MULTILINE), part
    for part in ("input", "output", "when", "script", "stub"):
        assert f"\n    {part}:\n" in text, part
    assert "task.ext.args ?: ''" in text
    assert "task.ext.prefix ?:" in text
    assert re.search(r'path "versions.yml" +, emit: versions', text)
    assert (MODULES / name / "environment.yml").is_file()


@pytest.mark.parametrize("name", NAMES)
def test_the_description_of_a_module_names_its_outputs(name: str) -> None:
    yaml = pytest.importorskip("yaml", reason="pyyaml reads meta.yml")
    meta = yaml.safe_load((MODULES / name / "meta.yml").read_text())
    emitted = re.findall(r"emit: (\w+)", text_of(name))
    assert list(meta["output"]) == emitted
    assert meta["name"] == f"thinsection_{name}"
    included = (ROOT / "main.nf").read_text()
    assert f"./modules/local/thinsection/{name}/main'" in included


@pytest.mark.parametrize(
    "path", [*sorted(ROOT.rglob("*.nf")), HOW_TO], ids=lambda path: path.parent.name
)
def test_a_parser_of_nextflow_reads_a_file(path: Path) -> None:
    """RefTrace is a linter with a parser of its own."""
    reftrace = pytest.importorskip(
        "reftrace", reason="reftrace is not installed; pip install reftrace"
    )
    module = reftrace.Module.from_file(str(path))
    names = re.findall(r"^process (\w+)", path.read_text(), re.MULTILINE)
    assert [process.name for process in module.processes] == names
    assert len(names) == (path.parent != ROOT)


def run_and_merge(folder: Path, args: str) -> Path:
    """Runs two slides, each by the script of a module in its own folder, and merges them."""
    (folder / "in").mkdir()
    merge = folder / "merge"
    (merge / "parts").mkdir(parents=True)
    for number, name in enumerate(("a", "b")):
        slide = folder / "in" / f"{name}.svs"
        write_he_slide(slide, (900, 700), seed=number)
        work = folder / f"work_{name}"
        (work / "slide").mkdir(parents=True)
        (work / "slide" / slide.name).symlink_to(slide)
        values = values_of(name, f"slide/{slide.name}", args)
        execute(rendered(script_of(text_of("run"), "script"), values), work)
        summary = json.loads((work / f"{name}.run.json").read_text())
        assert summary["counts"]["done"] == 1
        assert "thinsection: 0." in (work / "versions.yml").read_text()
        (merge / "parts" / name).symlink_to(work / "parts" / name)
    script = script_of(text_of("merge"), "script")
    execute(rendered(script, values_of("results")), merge)
    return merge


def test_the_scripts_join_slides_that_were_run_apart(tmp_path: Path) -> None:
    merge = run_and_merge(tmp_path, "--until tiles")
    document = json.loads((merge / "results.merge.json").read_text())
    assert (document["kind"], document["counts"]["taken"]) == ("merge", 2)
    assert verify(merge / "results")[1] == []
    rows = read_table(merge / "results" / "summary.csv")
    assert [row["patient_id"] for row in rows] == ["patient of a", "patient of b"]
    # the links of the work folders are resolved
    assert [row["slide_path"] for row in rows] == [
        str(tmp_path / "in" / f"{name}.svs") for name in ("a", "b")
    ]
    slides = [tmp_path / "in" / f"{name}.svs" for name in ("a", "b")]
    run(slides, out=tmp_path / "whole", until="tiles")
    for path in (tmp_path / "whole").glob("256px_0.5mpp/tiles/*.h5"):
        file = path.relative_to(tmp_path / "whole")
        assert (merge / "results" / file).read_bytes() == path.read_bytes()


def test_the_script_of_the_docs_uses_what_the_modules_have() -> None:
    text = HOW_TO.read_text()
    for name in NAMES:
        process = f"THINSECTION_{name.upper()}"
        assert f"{{ {process} " in text
        assert f"'./modules/local/thinsection/{name}/main'" in text
        for emitted in re.findall(rf"{process}\.out\.(\w+)", text):
            assert f"emit: {emitted}\n" in text_of(name)


def test_the_commands_of_the_script_of_the_docs_make_a_table_of_tiles(
    tmp_path: Path,
) -> None:
    anndata = pytest.importorskip("anndata", reason="anndata is not installed")
    merge = run_and_merge(tmp_path, "--tile-px 128 --no-pretrained --memory 256MiB")
    script = script_of(HOW_TO.read_text(), "script")
    execute(rendered(script, {"results": "results"}), merge)
    table = anndata.read_h5ad(merge / "tiles.h5ad")
    rows = read_table(merge / "results" / "summary.csv")
    num_tiles = {row["slide_id"]: int(row["num_tiles"]) for row in rows}
    assert table.obs["slide_id"].value_counts().to_dict() == num_tiles
    assert min(num_tiles.values()) > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_stub_makes_every_output(name: str, tmp_path: Path) -> None:
    execute(rendered(script_of(text_of(name), "stub"), values_of("s")), tmp_path)
    outputs = text_of(name).split("    output:\n")[1].split("    when:\n")[0]
    paths = re.findall(r'path[ (]"([^"]+)"', outputs)
    assert len(paths) == 3
    for path in paths:
        assert (tmp_path / path.replace("${prefix}", "s")).exists(), path


@pytest.mark.check
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    NEXTFLOW is None,
    reason="nextflow is not on PATH; its launcher needs Java and downloads the program",
)
def test_the_workflow_under_nextflow(tmp_path: Path) -> None:
    write_he_slide(tmp_path / "a.svs", (900, 700))
    (tmp_path / "cohort.csv").write_text(f"slide_path\n{tmp_path / 'a.svs'}\n")
    command = [str(NEXTFLOW), "run", str(ROOT / "main.nf"), "--input", "cohort.csv"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ended = subprocess.run(
        [*command, "--options", "--until tiles"],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (row,) = read_table(tmp_path / "results" / "results" / "summary.csv")
    assert (row["slide_id"], row["status"]) == ("a", "done")

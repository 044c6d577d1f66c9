"""`thinsection rescue` runs another tool's command in its own process, as the shell would."""

import json
import sys
from pathlib import Path

import pytest
from tests.rescue.hub_folder import write_titan
from tests.support.shell import Ended, thinsection

from thinsection.errors import InvalidInputError
from thinsection.rescue.command import run_command
from thinsection.weights.placement import optional_package

SCRIPT = """
import json, sys
from pathlib import Path
import beside
seen = [__name__, sys.argv, beside.__file__]
Path(sys.argv[1]).write_text(json.dumps(seen))
sys.exit({code})
"""


# what a peer's command does, with the seeded stand-in
TITAN = """
import sys
from transformers import AutoModel
from tests.rescue.test_titan import slide

model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
model.vision_encoder.built = 0
model.encode_slide_from_patch_features(*slide())
print("built", model.vision_encoder.built)
"""


def write_script(folder: Path, code: str) -> Path:
    (folder / "beside.py").write_text("")
    script = folder / "tool.py"
    script.write_text(SCRIPT.replace("{code}", code))
    return script


@pytest.fixture(autouse=True)
def _without_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "beside", raising=False)


@pytest.mark.parametrize("start", [[], ["--"], ["python"], ["--", "python3"]])
def test_a_script_sees_its_own_name_folder_and_options(
    start: list[str], tmp_path: Path
) -> None:
    script = write_script(tmp_path, "0")
    arguments = (sys.argv, list(sys.path))
    words = [*start, str(script), str(tmp_path / "out"), "--task", "-x"]
    assert run_command(words) == 0
    name, argv, beside = json.loads((tmp_path / "out").read_text())
    assert name == "__main__"
    assert argv == [str(script), str(tmp_path / "out"), "--task", "-x"]
    assert Path(beside).parent == tmp_path
    assert arguments == (sys.argv, sys.path)


@pytest.mark.parametrize(("code", "wanted"), [("", 0), ("3", 3), ("'no'", 1)])
def test_the_exit_code_is_the_scripts_own(
    code: str, wanted: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write_script(tmp_path, code)
    assert run_command([str(script), str(tmp_path / "out")]) == wanted
    assert capsys.readouterr().err.strip() == code.strip("'") * (wanted == 1)


def test_a_module_and_a_console_script_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_script(tmp_path, "4")
    monkeypatch.chdir(tmp_path)
    assert run_command(["python", "-m", "tool", "out"]) == 4
    assert json.loads((tmp_path / "out").read_text())[0] == "__main__"
    # another package's command, found by its entry point
    assert run_command(["f2py", "-v"]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("words", [["ls"], ["no_such_command"], ["-m"], []])
def test_what_is_no_command_of_python_is_refused(words: list[str]) -> None:
    with pytest.raises(InvalidInputError, match="command must"):
        run_command(words)


def rescue(*words: object) -> Ended:
    return thinsection("rescue", "titan", *words)


def test_an_unused_rescue_is_an_error_and_a_failing_command_keeps_its_own(
    tmp_path: Path,
) -> None:
    done = rescue("--", write_script(tmp_path, "0"), tmp_path / "out")
    assert done.returncode == 2
    assert "must be called within the block, got no call" in done.stderr
    assert "from_pretrained loads in this process, got none" in done.stderr
    failing = rescue("--", write_script(tmp_path, "7"), tmp_path / "out")
    assert failing.returncode == 7 and "error" not in failing.stderr


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_a_command_that_loads_titan_gets_our_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optional_package("transformers")
    cache = tmp_path / "remote_code"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    monkeypatch.syspath_prepend(cache)
    script = tmp_path / "tool.py"
    script.write_text(TITAN)
    folder = write_titan(tmp_path / "MahmoodLab" / "TITAN")
    done = rescue("--", "python", script, folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "built 0"
    assert "the attention of titan was ours" in done.stderr


def test_an_unknown_rescue_is_named() -> None:
    done = thinsection("rescue", "tita", "--", "tool.py")
    assert done.returncode == 2
    assert "rescue must be one of: titan, gigapath, stamp" in done.stderr

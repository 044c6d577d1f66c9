"""`thinsection rescue` runs another tool's command in its own process, as the shell would."""

import json
import signal
import subprocess
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


LOADS = """
import sys
from transformers import AutoModel

for _ in range(2):
    AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
print("loaded")
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
    # another package's command, found by its entry point; the shell may have it of another Python
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_command(["f2py", "-v"]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("words", [["ls"], ["no_such_command"], ["-m"], []])
def test_what_is_no_command_of_python_is_refused(words: list[str]) -> None:
    with pytest.raises(InvalidInputError, match="command must"):
        run_command(words)


@pytest.mark.parametrize(
    "words",
    [["/other/venv/bin/python", "x.py"], ["/other/venv/bin/python3.12", "-m", "tool"]],
)
def test_the_interpreter_of_another_environment_is_refused_by_name(
    words: list[str],
) -> None:
    with pytest.raises(
        InvalidInputError, match=r"/other/venv/bin/python.* -m thinsection"
    ):
        run_command(words)


def test_a_console_script_of_another_environment_is_refused_by_name(
    tmp_path: Path,
) -> None:
    tool = tmp_path / "tool"
    tool.write_text("#!/other/venv/bin/python\nprint('ran')\n")
    tool.chmod(0o755)
    with pytest.raises(InvalidInputError, match="/other/venv/bin/python"):
        run_command([str(tool)])


def test_this_interpreter_by_its_path_is_the_same(tmp_path: Path) -> None:
    script = write_script(tmp_path, "0")
    assert run_command([sys.executable, str(script), str(tmp_path / "out")]) == 0


PROGRAM = """
import os, signal, sys
print("file", __file__, sys.modules["__main__"].__file__)
try:
    os.kill(os.getpid(), signal.{signal})
    signal.pause()
except KeyboardInterrupt:
    print("saved")
    sys.exit(9)
"""


def rescue_process(script: Path) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own, for signals."""
    command = [
        sys.executable,
        "-m",
        "thinsection",
        "rescue",
        "titan",
        "--",
        str(script),
    ]
    return subprocess.run(command, capture_output=True, text=True)


def test_ctrl_c_reaches_the_program_as_python_gives_it(tmp_path: Path) -> None:
    script = tmp_path / "tool.py"
    script.write_text(PROGRAM.replace("{signal}", "SIGINT"))
    done = rescue_process(script)
    assert done.returncode == 9
    assert done.stdout.splitlines() == [f"file {script} {script}", "saved"]
    assert done.stderr == ""


def test_sigterm_ends_the_program_as_it_ends_python(tmp_path: Path) -> None:
    script = tmp_path / "tool.py"
    script.write_text(PROGRAM.replace("{signal}", "SIGTERM"))
    assert rescue_process(script).returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("error", "last_line"),
    [
        (
            "OSError(28, 'No space left on device')",
            "OSError: [Errno 28] No space left on device",
        ),
        ("ValueError('mine')", "ValueError: mine"),
    ],
)
def test_an_exception_of_the_program_ends_in_its_own_traceback(
    error: str, last_line: str, tmp_path: Path
) -> None:
    script = tmp_path / "tool.py"
    script.write_text(f"def work():\n    raise {error}\n\nwork()\n")
    done = rescue("--", script)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].strip() == f'File "{script}", line 4, in <module>'
    assert lines[-1] == last_line


def rescue(*words: object) -> Ended:
    return thinsection("rescue", "titan", *words)


def test_an_unused_rescue_is_an_error_and_a_failing_command_keeps_its_own(
    tmp_path: Path,
) -> None:
    done = rescue("--", write_script(tmp_path, "0"), tmp_path / "out")
    assert done.returncode == 5  # after the command's 0
    assert "must be called during the command or block, got no call" in done.stderr
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
    assert done.stderr.count("thinsection: rescued") == 1


@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("strict", [False, True])
def test_a_model_that_does_not_match_runs_as_it_is_unless_strict(
    strict: bool, tmp_path: Path
) -> None:
    optional_package("transformers")
    folder = write_titan(tmp_path / "MahmoodLab" / "TITAN")
    modeling = folder / "modeling_titan.py"
    last = "        self.post_init()\n"
    change = "        self.vision_encoder.pos_encode_type = 'abs'\n"
    modeling.write_text(modeling.read_text().replace(last, last + change))
    script = tmp_path / "tool.py"
    script.write_text(LOADS)
    words = ["--strict"] if strict else []
    done = thinsection("rescue", *words, "titan", "--", "python", script, folder)
    if strict:
        assert done.returncode == 2 and "must be 'alibi'" in done.stderr
        assert "loaded" not in done.stdout
    else:
        assert done.returncode == 5
        assert "loaded" in done.stdout
        assert done.stderr.count("not rescued, so the model runs as it is") == 1


def test_an_unknown_rescue_is_named() -> None:
    done = thinsection("rescue", "tita", "--", "tool.py")
    assert done.returncode == 2
    assert "rescue must be one of: titan, gigapath, stamp" in done.stderr

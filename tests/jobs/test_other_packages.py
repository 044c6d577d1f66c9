"""An executor that another package brings in one file works from the shell."""

from pathlib import Path

import pytest
from tests.support.other_package import in_shell, install

from thinsection.results.folder import open_results
from thinsection.testing.synthetic import write_he_slide

pytestmark = pytest.mark.check  # processes with another package

TOY_EXECUTOR = '''
from concurrent.futures import ThreadPoolExecutor

from thinsection.jobs.backend import Backend


class ThreadBackend(Backend):
    """One thread beside the driver's."""

    def open(self):
        self._pool = self.stack.enter_context(ThreadPoolExecutor(1))
        self._running = {}

    def room(self):
        return 1 - len(self._running)

    def send(self, jobs):
        for job in jobs:
            work = self._pool.submit(job.task, job.entries, on_event=self.context.on_event)
            self._running[work] = job

    def poll(self, *, waiting):
        done = [work for work in self._running if work.done()]
        ended = [(self._running.pop(work), work.result()) for work in done]
        if ended:
            self.context.on_message(f"toy: {len(ended)} ended")
        return [job.ended("reported", report=report) for job, report in ended]
'''


def test_an_executor_of_another_package_is_chosen_from_the_shell(
    tmp_path: Path,
) -> None:
    env = install(
        tmp_path, "toy_executor", TOY_EXECUTOR, "executors", thread="ThreadBackend"
    )
    (tmp_path / "slides").mkdir()
    for name in ("a", "b"):
        write_he_slide(tmp_path / "slides" / f"{name}.svs", (900, 700), seed=ord(name))
    command = [
        "run",
        tmp_path / "slides",
        "--until",
        "tiles",
        "--out",
        tmp_path / "out",
    ]
    command.append("--executor")
    done = in_shell(env, *command, "thread")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "toy: 1 ended" in done.stdout
    assert open_results(tmp_path / "out").slides == ("a", "b")
    wrong = in_shell(env, *command, "thred")
    assert wrong.returncode == 2
    assert "did you mean 'thread'" in wrong.stderr

"""Each executor keeps the contract; what only one of them has."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from thinsection.jobs.executor import ExecutorConfig
from thinsection.testing.executor_contract import (
    ExecutorContract,
    SquareTask,
    WorkerContract,
)


class TestInline(ExecutorContract):
    """A death or an error of this process is the caller's."""

    config: ClassVar[ExecutorConfig] = ExecutorConfig()


@pytest.mark.check
class TestPool(WorkerContract):
    config: ClassVar[ExecutorConfig] = ExecutorConfig(workers=2, threads=1)

    def test_two_processes_do_the_work_and_none_of_them_is_this_one(
        self, tmp_path: Path
    ) -> None:
        heard = self.run(SquareTask(folder=tmp_path), count=40, chunk_slides=1)
        assert len({result.pid for result in heard.results.values()}) == 2

    def test_a_death_costs_only_the_entry_that_was_at_work(
        self, tmp_path: Path
    ) -> None:
        heard = self.run(SquareTask(folder=tmp_path, killed={"2": 1}), chunk_slides=6)
        assert [heard.results[v].small for v in range(6)] == [
            False,
            False,
            True,
            True,
            True,
            True,
        ]
        assert (
            "a worker died with 4 entries, each of which is now retried alone"
            in heard.messages
        )


@pytest.fixture(scope="module")
def dask_cluster() -> Iterator[Any]:
    """A cluster of two workers as a notebook has one, with Dask's own settings."""
    distributed = pytest.importorskip("distributed", reason="dask is not installed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address="localhost:0"
    ) as cluster:
        yield cluster


@pytest.mark.check
class TestDaskClusterFromPython(WorkerContract):
    """The clusters that the settings start are in test_dask.py."""

    config: ClassVar[ExecutorConfig] = ExecutorConfig()

    @pytest.fixture(autouse=True)
    def handed_in(self, dask_cluster: Any) -> None:
        self.cluster = dask_cluster

    def test_what_dies_for_want_of_memory_climbs_the_whole_list(
        self, tmp_path: Path
    ) -> None:
        """Not here: its workers have the memory that they have."""
        task = SquareTask(folder=tmp_path, killed={"2": 9})
        heard = self.run(task, chunk_slides=3, job_memory="2GiB,3GiB,4GiB")
        assert heard.results[2].error.endswith(
            "twice, the second time with this entry alone"
        )

    def test_a_client_is_taken_too_and_stays_open(
        self, dask_cluster: Any, tmp_path: Path
    ) -> None:
        from distributed import Client

        with Client(dask_cluster) as client:
            self.cluster = client
            assert len(self.run(SquareTask(folder=tmp_path)).results) == 6
            assert client.status == "running"


@pytest.fixture(scope="module")
def local_ray() -> Iterator[Any]:
    """A Ray of two workers that the user has started."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
    )
    yield ray
    ray.shutdown()


@pytest.mark.check
class TestRay(WorkerContract):
    config: ClassVar[ExecutorConfig] = ExecutorConfig(executor="ray", threads=1)

    @pytest.fixture(autouse=True)
    def started(self, local_ray: Any) -> None:
        assert local_ray.is_initialized()

    def test_what_dies_for_want_of_memory_climbs_the_whole_list(
        self, tmp_path: Path
    ) -> None:
        """In what the scheduler sets aside for it; a test's Ray has little."""
        task = SquareTask(folder=tmp_path, killed={"2": 9, "4": 2})
        heard = self.run(task, chunk_slides=3, job_memory="200MiB,250MiB,300MiB")
        assert heard.results[4].square == 16
        assert heard.results[2].error.endswith(
            "3 times, the last time with this entry alone"
        )


@pytest.mark.check
def test_a_ray_of_our_own_is_started_and_ended(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed")
    ray.shutdown()

    class Once(WorkerContract):
        config: ClassVar[ExecutorConfig] = ExecutorConfig(
            executor="ray", workers=2, threads=1
        )

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        Once().test_a_worker_that_dies_once_loses_nothing(tmp_path)
        # Ray's own ends the process without a word, with another exit code
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not ray.is_initialized()

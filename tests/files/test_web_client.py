"""URLs whose host resolves to this machine, or redirects to it, are refused as they are opened."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.range_server import RangeServer, serving

from thinsection.errors import SlideOpenError
from thinsection.files.sources import FsspecSource
from thinsection.files.trust import LOCAL_HOSTS, check_table_url, is_local_host
from thinsection.slide.cohort import load_cohort
from thinsection.slide.cohort_table import SlidesConfig

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

DATA = b"thinsection" * 100


class _Server(RangeServer):
    """Serves bytes in ranges, and redirects below /to/."""

    requests: list[str]
    target: str

    def answer(self) -> tuple[int, bytes, dict[str, str]]:
        self.requests.append(self.path)
        if self.path.startswith("/to/"):
            return 302, b"", {"Location": self.target}
        return 200, DATA, {}


@pytest.fixture
def port() -> Iterator[int]:
    """Port of a web server of this machine."""
    _Server.requests = []
    with serving(_Server) as number:
        yield number


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """DNS of the test, by name; no host is allowed yet."""
    table: dict[str, str] = {}
    own = socket.getaddrinfo

    def getaddrinfo(host: Any, *more: Any, **options: Any) -> Any:
        return own(table.get(host, host), *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setenv(LOCAL_HOSTS, "")
    return table


LOCAL = ["127.0.0.1", "127.0.1.1", "169.254.169.254", "0.0.0.0", "100.100.100.200"]


@pytest.mark.parametrize("address", LOCAL)
def test_a_name_that_resolves_to_this_machine_is_refused(
    address: str, names: dict[str, str], port: int
) -> None:
    names["innocent.example"] = address
    url = f"http://innocent.example:{port}/a.svs"
    assert not is_local_host(url)
    check_table_url(url, "line 2")  # as written nothing is wrong
    with pytest.raises(
        SlideOpenError, match=r"innocent.*allow_local_urls=True"
    ) as caught:
        FsspecSource(url)
    assert address in str(caught.value)
    assert _Server.requests == []


def test_a_row_of_a_table_opens_where_local_urls_are_allowed(
    tmp_path: Path, names: dict[str, str], port: int
) -> None:
    names["one.example"] = names["two.example"] = "127.0.0.1"
    urls = [f"http://{name}.example:{port}/{name}.svs" for name in ("one", "two")]
    table = tmp_path / "cohort.csv"
    table.write_text("\n".join(("slide_path", *urls)))
    for entry in load_cohort([table]):
        with pytest.raises(SlideOpenError, match="must not lead to this machine"):
            entry.open("auto")
    assert _Server.requests == []
    load_cohort([table], SlidesConfig(allow_local_urls=True))
    for url in urls:
        assert FsspecSource(url).read_at(11, 11) == b"thinsection"
    # the processes of the command know it, and another name is refused still
    names["three.example"] = "127.0.0.1"
    with pytest.raises(SlideOpenError, match="three"):
        FsspecSource(f"http://three.example:{port}/a.svs")
    code = "from thinsection.files.trust import may_be_local; import json, sys;"
    code += "print(json.dumps([may_be_local(url) for url in sys.argv[1:]]))"
    answer = subprocess.run(
        [sys.executable, "-c", code, *urls, "http://three.example/"],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(answer.stdout) == [True, True, False]


@pytest.mark.parametrize(
    "target", ["http://127.0.0.1:{port}/x.svs", "//localhost:{port}/x.svs",
               "http://behind.example:{port}/x.svs", "http://[::1]:{port}/x.svs"],
)  # fmt: skip
def test_a_redirect_to_this_machine_is_refused(
    target: str, names: dict[str, str], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the first server has an address of a network: for the test it is this machine's, too
    from thinsection.files import sources

    monkeypatch.setattr(
        sources, "is_local_address", lambda address: address != "127.0.0.1"
    )
    names["public.example"] = "127.0.0.1"
    names["behind.example"] = "127.0.0.2"
    _Server.target = target.format(port=port)
    with pytest.raises(SlideOpenError, match="must not lead to this machine"):
        FsspecSource(f"http://public.example:{port}/to/a.svs")
    assert set(_Server.requests) == {"/to/a.svs"}
    # a redirect to elsewhere is followed
    _Server.target = f"http://public.example:{port}/x.svs"
    assert FsspecSource(f"http://public.example:{port}/to/a.svs").size == len(DATA)


def test_an_address_that_the_user_wrote_is_opened(port: int) -> None:
    for host in ("127.0.0.1", "localhost"):
        assert FsspecSource(f"http://{host}:{port}/a.svs").size == len(DATA)

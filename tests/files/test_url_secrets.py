"""Secrets of URLs: none is stored, printed or logged, and a rotated one names the same slide."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.guarded_server import SIGNATURES, WORD, GuardedServer, leaks
from tests.support.range_server import serving

from thinsection.errors import CohortError, SlideOpenError
from thinsection.files.atomic import write_json, write_table
from thinsection.files.sources import FsspecSource
from thinsection.files.urls import (
    VARIABLE,
    hide_secret,
    public_url,
    whole_url,
    without_secrets,
)
from thinsection.results.folder import open_results
from thinsection.run.run import run
from thinsection.slide import open_slide
from thinsection.slide.cohort import load_cohort
from thinsection.stages.config import RunConfig
from thinsection.testing.synthetic import write_he_slide

pytest.importorskip("fsspec", reason="fsspec is not installed")


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole URLs of a test go into a file of its own."""
    place = tmp_path / "whole-urls"
    place.touch(mode=0o600)
    monkeypatch.setenv(VARIABLE, str(place))


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("http://bob:word@host:8080/a.svs", "http://host:8080/a.svs"),
        ("https://bob@host/a.svs", "https://host/a.svs"),
        ("https://b:p@ss:w@host/a@b.svs?x=c@d", "https://host/a@b.svs?x=c@d"),
        (
            "https://h/a.svs?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=A%2Fus&versionId=3"
            "&X-Amz-Date=20260101T0000Z&X-Amz-Expires=60&X-Amz-Signature=ab&X-Amz-Security-Token=t",
            "https://h/a.svs?versionId=3",
        ),
        (
            "https://h/a.svs?AWSAccessKeyId=AK&Signature=x%2B&Expires=17",
            "https://h/a.svs",
        ),
        (
            "https://h/a.svs?X-Goog-Signature=ab&x-goog-date=1&alt=media",
            "https://h/a.svs?alt=media",
        ),
        ("https://h/a.svs?GoogleAccessId=a@b&Expires=1&Signature=x", "https://h/a.svs"),
        (
            "https://acc.blob.core.windows.net/c/a.svs?sv=2022&sr=b&sp=r&se=2026-01-01&st=1&spr=https"
            "&sig=ab%3D&snapshot=7",
            "https://acc.blob.core.windows.net/c/a.svs?snapshot=7",
        ),
        ("https://h/a.svs?sp=3&se=4", "https://h/a.svs?sp=3&se=4"),
        ("https://h/a.svs?access_token=t;page=2", "https://h/a.svs?page=2"),
        (
            "https://h/a.svs?ACCESS-TOKEN=t&Api_Key=k&password=p&%74oken=t",
            "https://h/a.svs",
        ),
        ("https://h/get?key=slides/a.svs&token=t", "https://h/get?key=slides/a.svs"),
        ("https://h/a.svs?key=AIzaSyD-9tSrke72", "https://h/a.svs"),
        ("https://h/a.svs#access_token=t&page=1", "https://h/a.svs#page=1"),
        ("https://h/a.svs#part", "https://h/a.svs#part"),
        ("simplecache::https://b:w@h/a.svs?sig=1", "simplecache::https://h/a.svs"),
        ("abfss://container@acc.dfs.core.windows.net/a.svs", None),
        ("s3://bucket/a.svs", None),
        ("s3://AKID:word@bucket/a.svs", "s3://bucket/a.svs"),
        ("/data/a@b.svs?token=x", None),
        ("https://h/a.svs?versionId=3&region=eu", None),
    ],
)
def test_the_public_form_of_a_url(url: str, public: str | None) -> None:
    assert public_url(url) == (public or url)
    assert public_url(public_url(url)) == public_url(url)


def test_a_text_loses_the_secrets_that_it_holds() -> None:
    url = f"https://bob:{WORD}@host/t1.svs?X-Amz-Signature={SIGNATURES[0]}&a=b"
    text = f"403, message='Forbidden', url=URL('{url}'), BasicAuth('bob', '{WORD}')"
    assert hide_secret(url) == "https://host/t1.svs?a=b"
    clean = without_secrets(text + f" sent {SIGNATURES[0]}")
    assert WORD not in clean and SIGNATURES[0] not in clean
    assert "URL('https://host/t1.svs?a=b')" in clean
    assert whole_url("https://host/t1.svs?a=b") == url
    assert whole_url("https://host/other.svs") == "https://host/other.svs"


def test_files_below_a_folder_by_url_have_its_secret() -> None:
    hide_secret(f"https://eve:{WORD}@host2/slides/?sig=abcdefgh&sv=1")
    whole = whole_url("https://host2/slides/x/a.svs")
    assert whole == f"https://eve:{WORD}@host2/slides/x/a.svs?sig=abcdefgh&sv=1"
    assert whole_url("https://host2/slides2/a.svs") == "https://host2/slides2/a.svs"


def test_json_and_tables_are_written_without_secrets(tmp_path: Path) -> None:
    url = f"https://bob:{WORD}@host/t2.svs?sig=abcdef"
    write_json(
        tmp_path / "a.json", {"slides": [{"path": url, "note": f'"{url}" \\ ok'}]}
    )
    write_table(tmp_path / "a.csv", [{"path": url, "n": 3}])
    assert json.loads((tmp_path / "a.json").read_text()) == {
        "slides": [
            {"path": "https://host/t2.svs", "note": '"https://host/t2.svs" \\ ok'}
        ]
    }
    assert (tmp_path / "a.csv").read_text() == "path,n\nhttps://host/t2.svs,3\n"


def test_another_process_of_the_command_finds_the_whole_url(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys\n"
        "from thinsection.files.urls import hide_secret\n"
        "hide_secret('https://bob:word@host3/a.svs')\n"
        "child = 'from thinsection.files.urls import whole_url;'\n"
        "child += 'print(whole_url(\"https://host3/a.svs\"))'\n"
        "subprocess.run([sys.executable, '-c', child], check=True)\n"
        f"place = os.environ[{VARIABLE!r}]\n"
        "print(place, oct(os.stat(place).st_mode & 0o777), flush=True)\n"
    )
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    environment["PYTHONPATH"] = ":".join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    whole, place_and_mode = done.stdout.split("\n", 1)
    assert whole == "https://bob:word@host3/a.svs"
    place, mode = place_and_mode.split()
    assert mode == "0o600"
    assert Path(place).is_relative_to(tmp_path) and not Path(place).exists()


def test_urls_of_a_table_that_differ_in_a_secret_alone_are_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "cohort.csv"
    urls = "https://h/get?token=a\nhttps://h/get?token=b\n"
    path.write_text(f"slide_path\n{urls}")
    with pytest.raises(CohortError, match=r"line 3 .* and in line 2"):
        load_cohort([path])
    path.write_text("slide_path,roi\nhttps://b:word@h/a.svs,https://b:word@h/a.xml\n")
    (entry,) = load_cohort([path])
    assert (entry.slide_path, entry.more["roi"]) == (
        "https://h/a.svs",
        "https://h/a.xml",
    )


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, type[GuardedServer]]]:
    path = tmp_path_factory.mktemp("served") / "s.svs"
    write_he_slide(path, (1200, 900), seed=5)
    GuardedServer.data = path.read_bytes()
    GuardedServer.signature = SIGNATURES[0]
    with serving(GuardedServer) as port:
        yield f"127.0.0.1:{port}", GuardedServer


def test_a_run_by_urls_with_secrets_leaves_none_and_a_new_signature_resumes(
    served: tuple[str, type[GuardedServer]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    host, server = served
    out = tmp_path / "out"
    messages: list[str] = []

    def urls(signature: str) -> list[str]:
        signed = f"http://{host}/signed.svs?versionId=1&X-Amz-Signature={signature}"
        return [f"http://bob:{WORD}@{host}/user.svs", signed]

    settings: dict[str, Any] = {"tile_px": 128, "until": "tiles", "config": RunConfig()}
    first = run(urls(SIGNATURES[0]), out=out, on_message=messages.append, **settings)
    assert first.exit_code == 0
    assert {result.status for result in first.results} == {"done"}
    server.signature = SIGNATURES[1]
    again = run(urls(SIGNATURES[1]), out=out, on_message=messages.append, **settings)
    assert {result.status for result in again.results} == {"skipped"}
    assert set(open_results(out).ledgers) == {"user", "signed"}
    # a signature that is over, and a wrong password: failures are stored without them, too
    bad = [
        f"http://eve:{WORD}@{host}/e.svs",
        urls(SIGNATURES[0])[1].replace("signed", "late"),
    ]
    failed = run(bad, out=out, on_message=messages.append, **settings)
    assert {result.status for result in failed.results} == {"failed"}
    assert leaks(out) == []
    printed = capfd.readouterr()
    texts = [*messages, printed.out, printed.err, *(str(r) for r in failed.results)]
    assert not any(secret in text for text in texts for secret in (WORD, *SIGNATURES))


def test_a_slide_and_its_errors_show_no_secret(
    served: tuple[str, type[GuardedServer]],
) -> None:
    host, _ = served
    with open_slide(f"http://bob:{WORD}@{host}/one.svs") as slide:
        assert slide.slide_path == f"http://{host}/one.svs"
        assert WORD not in repr(slide)
        assert np.ptp(slide.read_region((0, 0), 0, slide.size)) > 0
    with pytest.raises(SlideOpenError) as caught:
        FsspecSource(f"http://eve:{WORD}@{host}/two.svs")
    assert WORD not in str(caught.value)
    with closing(FsspecSource(f"http://bob:{WORD}@{host}/one.svs")) as source:
        assert source.name == f"http://{host}/one.svs"

"""Who may ask, what is answered, and that a URL names nothing but what is shown."""

import http.client
import json
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
from tests.view.conftest import HOSTILE, A, B

from thinsection.config import replace_flat
from thinsection.errors import BudgetError, ConfigError, InvalidInputError, SlideOpenError
from thinsection.pipeline.folder import Results
from thinsection.slide import open_slide
from thinsection.testing.synthetic import write_he_slide
from thinsection.view import ViewConfig, Viewer
from thinsection.view.server import ShownSlides


def ask(viewer: Viewer, path: str, *, raw: bool = False) -> tuple[int, bytes, dict[str, str]]:
    """A path under the token, sent as it stands; with `raw` a whole path."""
    at = urlsplit(viewer.url)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=60)
    connection.request("GET", path if raw else at.path + path)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, data, {k.lower(): v for k, v in answer.getheaders()}


def test_it_listens_on_this_machine_only_and_answers_whom_it_gave_its_token(viewer: Viewer) -> None:
    assert urlsplit(viewer.url).hostname == "127.0.0.1"
    assert viewer._socket.getsockname()[0] == "127.0.0.1"
    token = urlsplit(viewer.url).path.strip("/")
    assert len(token) >= 32
    for path in ("/", "/slides", f"/{token[:-1]}/slides", f"/{token}x/", f"//{token}/", "/ü%00/"):
        status, data, _ = ask(viewer, quote(path, safe="/%"), raw=True)
        assert (status, data) == (403, b"wrong token; take the address that the viewer printed")
    status, _, headers = ask(viewer, "")
    assert status == 200 and headers["referrer-policy"] == "no-referrer"
    assert "default-src 'self'" in headers["content-security-policy"]


@pytest.mark.parametrize(
    "path",
    [
        "static/../server.py",
        "static/..%2Fserver.py",
        "static/%2Fetc%2Fpasswd",
        "slides/..%2F..%2Fetc",
        "slides/../../../etc/passwd",
        "slides/..",
        "slides/%2e%2e/thumbnail",
        "slides/..%2F..%2Fx/thumbnail",
        "slides/%00/thumbnail",
        "slides/nobody",
        f"slides/{B}/layers/9999",
        f"slides/{B}/tiles/99/0/0",
        f"slides/{B}/pictures/label",
        f"slides/{B}/similar/9/0/0",
    ],
)
def test_what_is_not_shown_is_not_found(viewer: Viewer, path: str) -> None:
    status, data, _ = ask(viewer, path)
    assert status == 404
    assert b"root:" not in data and b"import" not in data


def test_what_cannot_be_is_refused_with_a_word(viewer: Viewer) -> None:
    for path in (f"slides/{B}/tiles/0/7/7", f"slides/{B}/crop/0/0/99999999/1"):
        status, data, _ = ask(viewer, path)
        assert status == 422 and "must" in json.loads(data)["error"]
    assert ask(viewer, f"slides/{B}/tiles/-1/0/0")[0] == 404
    status, data, _ = ask(viewer, f"slides/{B}/similar/0/1000000/0")
    assert status == 422 and "point must lie in a tile" in json.loads(data)["error"]


def test_slides_are_answered_by_their_ids(viewer: Viewer) -> None:
    assert json.loads(ask(viewer, "slides")[1]) == sorted([A, B])
    facts = json.loads(ask(viewer, f"slides/{quote(A, safe='')}")[1])
    assert facts["size"] == [2100, 1500] and facts["id"] == A
    assert HOSTILE in [layer["name"] for layer in facts["layers"]]
    for path in ("tiles/0/0/0", "thumbnail", "crop/100/100/256/256"):
        status, data, headers = ask(viewer, f"slides/{quote(A, safe='')}/{path}")
        assert (status, headers["content-type"]) == (200, "image/jpeg")
        assert data[:2] == b"\xff\xd8"
    status, data, _ = ask(viewer, f"slides/{quote(A, safe='')}/layers/0")
    assert status == 200 and data


def test_label_and_macro_are_shown_when_asked_for(real_slide: Path) -> None:
    shown = ShownSlides([real_slide], replace_flat(ViewConfig(), {"show_label": True}))
    hidden = ShownSlides([real_slide], ViewConfig())
    name = real_slide.stem
    assert shown.facts(name)["pictures"] == hidden.facts(name)["pictures"] == ["label", "macro"]
    assert shown.picture(name, "label")[:2] == b"\xff\xd8"
    for of, picture in ((hidden, "label"), (shown, "thumbnail")):
        with pytest.raises(KeyError):
            of.picture(name, picture)


def test_a_slide_that_moved_says_what_to_do_and_is_found_beside_the_results(
    view_results: Results, view_slides: Path, tmp_path: Path
) -> None:
    import dataclasses
    import shutil

    ledger = view_results.ledgers[B]
    moved = dataclasses.replace(ledger, slide={**ledger.slide, "slide_path": "/gone/b.svs"})
    results = dataclasses.replace(view_results, ledgers={B: moved})
    with pytest.raises(SlideOpenError, match="must be an existing file") as caught:
        ShownSlides(results, ViewConfig()).facts(B)
    assert "beside the results" in caught.value.__notes__[0]
    shutil.copytree(view_results.folder, tmp_path / "r")
    path = tmp_path / "r" / "slides" / B / "slide.json"
    path.write_text(path.read_text().replace(str(view_slides), "/gone"))
    found = ShownSlides([tmp_path / "r", view_slides], ViewConfig())
    assert found.listed() == [A, B] and found.facts(B)["layers"]


def test_few_slides_are_open_at_a_time_and_one_that_goes_is_closed(tmp_path: Path) -> None:
    for n in range(4):
        write_he_slide(tmp_path / f"s{n}.svs", (600, 500), seed=n, downsamples=(1,))
    shown = ShownSlides([tmp_path], replace_flat(ViewConfig(), {"memory": "512MiB"}))
    first = shown._opened("s0")[0].slide
    tiles = [shown.tile(f"s{n}", 0, 0, 0) for n in range(4)]
    assert len(shown._open) == 1 and first._closed
    assert [shown.tile(f"s{n}", 0, 0, 0) for n in range(4)] == tiles  # from the cache


def test_settings_that_cannot_be_are_said(real_slide: Path, view_results: Results) -> None:
    with pytest.raises(BudgetError, match="memory must be >= 512 MiB, got 100MB"):
        Viewer([real_slide], memory="100MB")
    with pytest.raises(InvalidInputError, match="at most one results folder"):
        Viewer([view_results.folder, view_results.folder])
    with Viewer([real_slide]) as viewer:
        port = urlsplit(viewer.url).port
        with pytest.raises(ConfigError, match=f"port must be free, got '{port}'"):
            Viewer([real_slide], port=port)


def test_a_notebook_shows_an_open_slide_and_results(
    real_slide: Path, view_results: Results
) -> None:
    with open_slide(real_slide) as slide, slide.view() as viewer:
        assert json.loads(ask(viewer, "slides")[1]) == [real_slide.name]
        assert viewer.url in viewer._repr_html_() and "<iframe" in viewer._repr_html_()
    with view_results.view(port=0) as viewer:
        assert json.loads(ask(viewer, "slides")[1]) == [A, B]

"""Who may ask, what is answered, and that a URL names nothing but what is shown."""

import http.client
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from tests.view.conftest import HOSTILE, A, B

from thinsection.config import replace_flat
from thinsection.errors import (
    BudgetError,
    ConfigError,
    InvalidInputError,
    SlideOpenError,
)
from thinsection.results.folder import Results
from thinsection.slide import Slide, open_slide
from thinsection.testing.synthetic import write_he_slide
from thinsection.view import ViewConfig, Viewer, view
from thinsection.view.shown import ShownSlides


def ask(
    viewer: Viewer, path: str, *, raw: bool = False
) -> tuple[int, bytes, dict[str, str]]:
    """A path under the token, sent as it stands; with `raw` a whole path."""
    at = urlsplit(viewer.url)
    path = path if raw else at.path + path
    status, data, headers = request(viewer, path)
    if status == 307:  # to the token of pages, as a browser follows it
        status, data, headers = request(viewer, headers["location"])
    return status, data, headers


def request(
    viewer: Viewer, path: str, **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    """One answer to a whole path, without following where it leads."""
    at = urlsplit(viewer.url)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=60)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET", path, headers=names)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, data, {k.lower(): v for k, v in answer.getheaders()}


def test_it_listens_on_this_machine_only_and_answers_whom_it_gave_its_token(
    viewer: Viewer,
) -> None:
    assert urlsplit(viewer.url).hostname == "127.0.0.1"
    assert viewer._socket.getsockname()[0] == "127.0.0.1"
    token = urlsplit(viewer.url).path.strip("/")
    assert len(token) >= 32
    for path in (
        "/",
        "/slides",
        f"/{token[:-1]}/slides",
        f"/{token}x/",
        f"//{token}/",
        "/ü%00/",
    ):
        status, data, _ = ask(viewer, quote(path, safe="/%"), raw=True)
        assert (status, data) == (
            403,
            b"the token in the address is wrong; open the address that the viewer printed",
        )
    status, _, headers = ask(viewer, "")
    assert status == 200 and headers["referrer-policy"] == "no-referrer"
    assert "default-src 'self'" in headers["content-security-policy"]


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1.evil.example:{port}",
        "localhost.evil.example",
        "127.0.0.2:{port}",
        "user@evil.example",
        "",
        "[::1",
    ],
)
def test_a_name_that_was_made_to_point_here_is_refused(
    viewer: Viewer, host: str
) -> None:
    at = urlsplit(viewer.url)
    status, data, _ = request(
        viewer, f"{at.path}slides", Host=host.format(port=at.port)
    )
    assert status in (400, 403)  # 400: no host at all
    assert A.encode() not in data and b"slides" not in data


def test_names_of_this_machine_are_answered_at_any_port(viewer: Viewer) -> None:
    path = f"{urlsplit(viewer.url).path}slides"
    for host in ("localhost", "127.0.0.1:9999", "LOCALHOST:8765", "[::1]:8765"):
        assert request(viewer, path, Host=host)[0] == 200


def test_pages_of_other_origins_are_refused(viewer: Viewer) -> None:
    at = urlsplit(viewer.url)
    path = f"{at.path}slides"
    assert request(viewer, path, Origin=f"http://{at.netloc}")[0] == 200
    others = ("http://evil.example", "null", f"http://localhost:{at.port}")
    for origin in (*others, f"https://{at.netloc}", "http://127.0.0.1:1"):
        status, data, _ = request(viewer, path, Origin=origin)
        assert (status, data) == (403, b"the origin must be the viewer's own")


def test_a_results_page_has_a_token_that_opens_pages_alone(viewer: Viewer) -> None:
    token = urlsplit(viewer.url).path.strip("/")
    status, _, headers = request(viewer, f"/{token}/results/index.html?a=b%20c")
    place = headers["location"]
    assert status == 307 and place.endswith("/results/index.html?a=b%20c")
    pages_token = place.split("/")[1]
    assert len(pages_token) >= 32 and pages_token != token
    status, data, headers = request(viewer, place)
    assert status == 200 and token.encode() not in data
    assert token not in str(headers)
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    for path in ("slides", "static/viewer.js", f"slides/{B}", "news", "results"):
        assert request(viewer, f"/{pages_token}/{path}")[0] == 403
    for path in ("results/../slides", "results/..%2Fslides", "results//../../slides"):
        assert request(viewer, f"/{pages_token}/{path}")[0] in (403, 404)
    # its link to the viewer is a redirect that a browser follows, and no script
    status, _, headers = request(viewer, f"/{pages_token}/", Sec_Fetch_Dest="document")
    assert (status, headers["location"]) == (303, f"/{token}/")
    for kind in ("script", "image", "empty", "iframe", "style"):
        answer = request(viewer, f"/{pages_token}/", Sec_Fetch_Dest=kind)
        assert answer[0] == 403 and token not in str(answer)


def test_the_viewer_is_framed_by_this_machine_alone(viewer: Viewer) -> None:
    policy = ask(viewer, "")[2]["content-security-policy"]
    (ancestors,) = (p for p in policy.split("; ") if p.startswith("frame-ancestors"))
    assert "localhost:*" in ancestors and "https:" not in ancestors.split()
    assert "*" not in ancestors.split()


@pytest.mark.parametrize(
    "path",
    [
        "results/{long}.html",
        "results/{long}/{long}/index.html",
        "slides/{long}",
        "slides/{long}/thumbnail",
        "slides/b/pictures/{long}",
        "static/{long}",
        "{long}",
        "results/{wide}.html",
    ],
)
def test_a_name_that_no_file_can_have_is_not_found(viewer: Viewer, path: str) -> None:
    wide = quote("日" * 1600)
    assert ask(viewer, path.format(long="a" * 5000, wide=wide))[0] == 404


@pytest.mark.parametrize(
    "name", ["features", "coords", "edge_index", "others", "attributes"]
)
def test_a_dataset_without_a_shape_is_refused_with_a_word(
    view_results: Results, tmp_path: Path, name: str
) -> None:
    import h5py

    out = tmp_path / "results"
    shutil.copytree(view_results.folder, out)
    named = ("features", "coords", "edge_index")
    changed = 0
    for path in sorted(out.glob(f"*/*/{B}.h5")):
        with h5py.File(path, "a") as file:
            places: list[str] = []
            file.visititems(
                lambda place, item, places=places: (
                    places.append(place) if isinstance(item, h5py.Dataset) else None
                )
            )
            for place in places:
                attributes = dict(file[place].attrs)
                is_other = name == "others" and place not in named
                if place == name or is_other:
                    del file[place]
                    file[place] = h5py.Empty("f4")
                    file[place].attrs.update(attributes)
                    changed += 1
                for attribute in attributes:
                    if name == "attributes":
                        file[place].attrs[attribute] = h5py.Empty("f4")
                        changed += 1
    assert changed
    with Viewer([out]) as viewer:
        status, data, _ = ask(viewer, f"slides/{B}")
        answers = [(status, data)]
        for number in range(len(json.loads(data).get("layers", ()))):
            answers.append(ask(viewer, f"slides/{B}/layers/{number}")[:2])
        answers += [ask(viewer, f"slides/{B}/similar/0/300/300")[:2]]
        assert {status for status, _ in answers} <= {200, 404, 422}
        refused = [
            json.loads(data)["error"] for status, data in answers if status == 422
        ]
        assert refused and all("must" in text for text in refused), refused


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
    assert status == 422 and "point must be in a tile" in json.loads(data)["error"]


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
    assert (
        shown.facts(name)["pictures"]
        == hidden.facts(name)["pictures"]
        == ["label", "macro"]
    )
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
    moved = dataclasses.replace(
        ledger, slide={**ledger.slide, "slide_path": "/gone/b.svs"}
    )
    results = dataclasses.replace(view_results, ledgers={B: moved})
    with pytest.raises(SlideOpenError, match="must be an existing file") as caught:
        ShownSlides(results, ViewConfig()).facts(B)
    assert "after the results folder" in caught.value.__notes__[0]
    shutil.copytree(view_results.folder, tmp_path / "r")
    path = tmp_path / "r" / "slides" / B / "slide.json"
    path.write_text(path.read_text().replace(str(view_slides), "/gone"))
    found = ShownSlides([tmp_path / "r", view_slides], ViewConfig())
    assert found.listed() == [A, B] and found.facts(B)["layers"]


def test_few_slides_are_open_at_a_time_and_one_that_goes_is_closed(
    tmp_path: Path,
) -> None:
    for n in range(4):
        write_he_slide(tmp_path / f"s{n}.svs", (600, 500), seed=n, downsamples=(1,))
    shown = ShownSlides([tmp_path], replace_flat(ViewConfig(), {"memory": "512MiB"}))
    with shown._reading("s0") as deep:
        first = deep.slide
    tiles = [shown.tile(f"s{n}", 0, 0, 0) for n in range(4)]
    assert len(shown._open) == 1 and first._closed
    assert [shown.tile(f"s{n}", 0, 0, 0) for n in range(4)] == tiles  # from the cache


def test_settings_that_cannot_be_are_said(
    real_slide: Path, view_results: Results
) -> None:
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
    with open_slide(real_slide) as slide, view(slide) as viewer:
        assert json.loads(ask(viewer, "slides")[1]) == [real_slide.name]
        assert viewer.url in viewer._repr_html_() and "<iframe" in viewer._repr_html_()
    with view(view_results, port=0) as viewer:
        assert json.loads(ask(viewer, "slides")[1]) == [A, B]


def test_no_request_meets_a_slide_that_another_closes(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """One slide may be open at a time, and eight ask for four at once, 200 times."""
    folder = tmp_path_factory.mktemp("stress")
    names = [f"s{n}" for n in range(4)]
    for n, name in enumerate(names):
        path = folder / f"{name}.svs"
        write_he_slide(path, (900, 700), seed=n, downsamples=(1,))
    kinds = ("thumbnail", "tiles/0/0/0", "tiles/1/0/0", "crop/{x}/{x}/300/300", "")
    asked = [
        f"slides/{names[n % 4]}/{kinds[n // 4 % 5].format(x=n)}".rstrip("/")
        for n in range(200)
    ]
    with Viewer([folder], memory="512MiB") as viewer:
        shown = viewer._shown
        assert shown._max_open == 1
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda path: ask(viewer, path), asked))
        wrong = [
            (path, status, data)
            for path, (status, data, _) in zip(asked, answers, strict=True)
            if status != 200
        ]
        assert wrong == []
        assert [opened.readers for opened in shown._open.values()] == [0]


@pytest.mark.parametrize(
    ("asked", "reads"), [("thumbnail", "thumbnail"), ("crop", "read_region")]
)
def test_a_slide_stays_open_while_a_request_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, reads: str
) -> None:
    """One may be open at a time; a request for another waits until the pixels are read."""
    for n in range(2):
        write_he_slide(tmp_path / f"s{n}.svs", (600, 500), seed=n, downsamples=(1,))
    shown = ShownSlides([tmp_path], replace_flat(ViewConfig(), {"memory": "512MiB"}))
    assert shown.facts("s0")["size"] == (
        600,
        500,
    )  # opened: readers look at px as they open
    read = getattr(Slide, reads)
    sizes: list[object] = []
    other = threading.Thread(target=lambda: sizes.append(shown.facts("s1")["size"]))
    others = iter([other])

    def interrupted(slide: Slide, *arguments: Any) -> Any:
        for thread in others:
            thread.start()
            while not shown._unread._waiters:  # type: ignore[attr-defined]
                assert thread.is_alive()
            assert list(shown._open) == ["s0"]
        return read(slide, *arguments)

    monkeypatch.setattr(Slide, reads, interrupted)
    place = (0, 0, 100, 100) if asked == "crop" else ()
    assert getattr(shown, asked)("s0", *place)[:2] == b"\xff\xd8"
    assert next(others, None) is None
    other.join(60)
    assert sizes == [(600, 500)]
    assert list(shown._open) == ["s1"]


def test_slides_and_layers_that_are_made_later_appear_on_reload(
    view_results: Results, tmp_path: Path
) -> None:
    out = tmp_path / "results"
    shutil.copytree(view_results.folder, out)
    shutil.move(out / "slides" / A, tmp_path / "later")
    with Viewer([out]) as viewer:
        assert json.loads(ask(viewer, "slides")[1]) == [B]
        before = json.loads(ask(viewer, f"slides/{B}")[1])["layers"]
        shutil.move(tmp_path / "later", out / "slides" / A)
        (grid,) = view_results.grids
        heatmap = out / grid / "heatmap_later" / f"{B}.h5"
        heatmap.parent.mkdir()
        shutil.copy(out / grid / "heatmap_m" / f"{B}.h5", heatmap)
        assert json.loads(ask(viewer, "slides")[1]) == sorted([A, B])
        after = json.loads(ask(viewer, f"slides/{B}")[1])["layers"]
        assert after[: len(before)] == before  # a page of before asks by these numbers
        assert [layer["group"] for layer in after[len(before) :]] == [
            f"{grid}/heatmap_later"
        ]
        status, data, _ = ask(viewer, f"slides/{B}/layers/{len(before)}")
        assert status == 200 and data
        assert ask(viewer, f"slides/{quote(A, safe='')}/thumbnail")[0] == 200


def test_one_path_need_not_be_in_a_list(view_slides: Path) -> None:
    """Of a text, each letter would else be a path."""
    with Viewer([view_slides]) as listed, Viewer(str(view_slides)) as named:
        wanted = sorted(listed._shown._entries)
        assert wanted and sorted(named._shown._entries) == wanted
    with Viewer(view_slides) as named:
        assert sorted(named._shown._entries) == wanted

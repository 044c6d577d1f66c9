"""The viewer's guard in Chromium: a rebinding site, and a hostile page of a results folder."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.view.conftest import B
from tests.view.test_browser import READY

from thinsection.results.folder import Results
from thinsection.view import Viewer

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed"
)
EVIL = "evil.example"
# a page of results that tries to learn the viewer's token, and to read slides
PAGE = """<!doctype html><html><head><title>hostile</title></head><body>
<a id="open" href="../#slide=b">open</a>
<script>
const found = [location.href, document.baseURI, document.referrer];
const note = text => found.push(String(text));
addEventListener("securitypolicyviolation", event => note(event.blockedURI));
addEventListener("error", event => note(event.message + " " + event.filename), true);
try { note(parent.location.href); } catch (error) { note(error.name); }
try { note(opener.location.href); } catch (error) { note(error.name); }
for (const kind of ["img", "script", "iframe"]) {
  const one = document.createElement(kind);
  one.src = "../";
  document.body.append(one);
}
window.popup = open("../");
const learn = async () => {
  for (const path of ["../", "../slides", "../news"]) {
    try { const answer = await fetch(path); note(answer.url + await answer.text()); }
    catch (error) { note(error.name); }
  }
  for (let i = 0; i < 20; i++) {
    await new Promise(done => setTimeout(done, 50));
    try { note(window.popup.location.href); } catch (error) { note(error.name); }
    try { note(window.popup.document.body.innerText); } catch (error) { note(error.name); }
  }
  for (const entry of performance.getEntries()) note(entry.name);
  window.done = found;
};
learn();
</script></body></html>"""


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", f"--host-resolver-rules=MAP {EVIL} 127.0.0.1"],
        )
        yield running
        running.close()


def test_a_site_that_rebinds_its_name_to_this_machine_reads_nothing(
    browser: Any, viewer: Viewer
) -> None:
    at = urlsplit(viewer.url)
    page = browser.new_page()
    answer = page.goto(f"http://{EVIL}:{at.port}{at.path}slides")
    assert answer.status == 403
    assert "the host must be 127.0.0.1 or localhost" in page.content()
    texts = page.evaluate(
        "async paths => Promise.all(paths.map(async path => (await fetch(path)).text()))",
        [at.path, f"{at.path}slides", f"{at.path}slides/{B}/thumbnail"],
    )
    assert all(text.startswith("the host must be") for text in texts)
    page.close()


def test_a_page_of_another_site_cannot_read_the_viewer(
    browser: Any, viewer: Viewer
) -> None:
    page = browser.new_page()
    page.route(
        "http://other.example/", lambda route: route.fulfill(body="<p>other</p>")
    )
    page.goto("http://other.example/")
    read = "async url => { try { return await (await fetch(url)).text() } catch { return '' } }"
    assert page.evaluate(read, f"{viewer.url.partition('#')[0]}slides") == ""
    page.close()


def test_a_hostile_page_of_results_learns_no_token_and_its_link_opens_the_viewer(
    browser: Any, viewer: Viewer, view_results: Results, tmp_path: Path
) -> None:
    out = tmp_path / "results"
    shutil.copytree(view_results.folder, out)
    (out / "hostile.html").write_text(PAGE)
    with Viewer([out]) as running:
        at = urlsplit(running.url)
        token = at.path.strip("/")
        page = browser.new_page()
        page.goto(f"http://{at.netloc}{at.path}results/hostile.html")
        assert token not in page.url and page.url.endswith("/results/hostile.html")
        page.wait_for_function("() => window.done")
        found = page.evaluate("() => window.done")
        assert len(found) > 20
        assert not any(token in text for text in found), found
        assert not any(f'"{B}"' in text for text in found)
        page.click("#open")
        page.wait_for_function(READY)
        assert page.url.startswith(f"http://{at.netloc}{at.path}")
        page.close()

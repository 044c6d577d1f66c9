"""Search in the documentation works on pages that are opened from disk."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("material", reason="needs mkdocs-material")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")

ROOT = Path(__file__).parents[2]
_SITE = """
site_name: Two pages
use_directory_urls: false
theme: {name: material, font: false}
plugins: [material/search, material/offline]
extra: {polyfills: [iframe-worker.js]}
"""


@pytest.mark.check
def test_the_search_finds_a_page_without_a_server(tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    docs = tmp_path / "docs"
    (docs / "below").mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "iframe-worker.js", docs)
    (docs / "index.md").write_text("# Start\n\nNothing to find here.\n")
    (docs / "below" / "page.md").write_text("# Checks\n\nThe haematoxylin is pale.\n")
    (tmp_path / "mkdocs.yml").write_text(_SITE)
    command = [sys.executable, "-m", "mkdocs", "build", "-q"]
    subprocess.run(command, cwd=tmp_path, check=True)
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        for start in ("index.html", "below/page.html"):
            page.goto((tmp_path / "site" / start).as_uri())
            page.click(".md-search__input")
            page.type(".md-search__input", "haematoxylin")
            first = page.locator(".md-search-result__item a").first
            assert "below/page.html" in str(first.get_attribute("href"))
        browser.close()
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "material/offline" in settings
    assert "polyfills: [iframe-worker.js]" in settings

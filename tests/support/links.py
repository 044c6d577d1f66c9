"""Where the pages of a folder lead, and which of these places are not there."""

import json
import re
from collections.abc import Callable, Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

_STYLE_URL = re.compile(r"url\(['\"]?(.*?)['\"]?\)")
_INSIDE = ("data:", "blob:", "#")  # of addresses that are no file
# opens every picture that a click enlarges, and says its address
_ENLARGED = """() => {
  const found = [], large = document.querySelector("#large");
  for (const open of document.querySelectorAll("table .open")) {
    open.click();
    for (const button of large.querySelectorAll(".bar button")) {
      button.click();
      found.push(large.querySelector("img").getAttribute("src"));
    }
    large.close();
  }
  return found;
}"""


class _Parser(HTMLParser):
    """Collects every address of a page: links, pictures, scripts, and those in styles."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.addresses.append(value)
            if name == "style" and value is not None:
                self.addresses += _STYLE_URL.findall(value)
            if name == "data-pictures" and value is not None:
                self.addresses += [address for _, address in json.loads(value)]


def addresses_of(html: str) -> list[str]:
    """Every address in the source of a page."""
    parser = _Parser()
    parser.feed(html)
    return parser.addresses


def broken(page: Path, addresses: Iterable[str]) -> list[str]:
    """Those addresses of a page that lead to no file, or away from this machine."""
    found = []
    for address in addresses:
        if address.startswith(_INSIDE):
            continue
        parts = urlsplit(urljoin(page.as_uri(), address))
        is_file = parts.scheme == "file" and Path(unquote(parts.path)).is_file()
        # the name of a file that is not quoted leaves its end in one of these
        if not is_file or parts.query or parts.fragment:
            found.append(address)
    return found


def shown_addresses(browser: Any) -> Callable[[Path], list[str]]:
    """What finds the addresses of a page as its scripts have made it, in a browser."""

    def find(path: Path) -> list[str]:
        page = browser.new_page()
        errors = list[str]()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(path.as_uri())
        page.wait_for_load_state("load")
        enlarged = page.evaluate(_ENLARGED)
        html = page.content()
        page.close()
        assert errors == [], (path, errors)
        return [*enlarged, *addresses_of(html)]

    return find


def broken_links(
    folder: Path, find: Callable[[Path], list[str]] | None = None
) -> dict[str, list[str]]:
    """Page -> its broken addresses, of every page below a folder that has any."""
    pages = sorted(folder.rglob("*.html"))
    assert pages, f"no page in {folder}"
    found = {}
    for page in pages:
        addresses = addresses_of(page.read_text(encoding="utf-8"))
        addresses += find(page) if find is not None else []
        if lost := broken(page, addresses):
            found[str(page.relative_to(folder))] = sorted(set(lost))
    return found

"""Pages of a results folder, served by the viewer, so that their links open slides in it.

A page runs scripts, and may have been written by anybody who could write to the folder. So it is
served as a sandbox: its scripts have an origin of their own and read nothing from the viewer. Its
address has a token that opens pages alone, so that no page knows the viewer's (`view.guard`).
"""

from collections.abc import Callable
from mimetypes import guess_type
from pathlib import Path

from thinsection.errors import importing
from thinsection.files.pages import VIEWER_META

with importing("the viewer must have starlette and uvicorn", "view"):
    from starlette.requests import Request
    from starlette.responses import FileResponse, Response

# what pages are made of, and the files to which they link
_SUFFIXES = {
    *(".html", ".css", ".js", ".json", ".jsonl", ".geojson"),
    *(".png", ".jpg", ".jpeg", ".webp", ".svg"),
    *(".csv", ".tsv", ".txt", ".log", ".md", ".toml"),
}
_HEADERS = {
    "Content-Security-Policy": "sandbox allow-scripts allow-popups allow-downloads "
    "allow-popups-to-escape-sandbox; default-src 'none'; img-src 'self' data:; "
    "script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",  # the address contains the token
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def page_of(folder: Path) -> Callable[[Request], Response]:
    """Answers requests for pages, pictures and tables of a results folder.

    A path that leads out of the folder, also by a link, or to another kind of file is not found. A
    page gets the address of the viewer, relative to itself.
    """
    root = folder.resolve()

    def answer(request: Request) -> Response:
        name = request.path_params["name"]
        path = _file_below(root, name)
        if path is None:
            raise LookupError(name)
        if path.suffix != ".html":
            kind = guess_type(path.name)[0] or "text/plain"
            return FileResponse(path, media_type=kind, headers=_HEADERS)
        up = "../" * (name.count("/") + 1)
        # the icon, so that the browser does not ask for one without the token
        icon = '<link rel="icon" href="data:,">'
        meta = f'{icon}<meta name="{VIEWER_META}" content="{up}">'
        text = path.read_text(encoding="utf-8", errors="replace")
        text = text.replace("<head>", f"<head>\n{meta}", 1)
        return Response(text, media_type="text/html", headers=_HEADERS)

    return answer


def _file_below(root: Path, name: str) -> Path | None:
    """File of a folder that may be served, or None."""
    if "\\" in name or "\0" in name:
        return None
    try:
        path = (root / name).resolve()
        is_served = path.suffix.lower() in _SUFFIXES and path.is_relative_to(root)
        return path if is_served and path.is_file() else None
    except OSError:  # a name that no file system can have
        return None

"""`thinsection view`: slides and results in the browser."""

from typing import Annotated, Any

import typer

from thinsection.cli.options import with_config
from thinsection.view import ViewConfig, Viewer

app = typer.Typer()


@app.command("view")
@with_config(ViewConfig)
def view(
    paths: Annotated[list[str], typer.Argument(help="Slides, folders, cohort CSV, results.")],
    config: Any = None,
) -> None:
    """Look at slides in the browser: deep zoom, layers of results, similar tiles. Read-only.

    Examples:

        thinsection view slides/

        thinsection view results slides/ --port 8765
    """
    with Viewer(paths, config) as viewer:
        port = viewer.url.split("/")[2].partition(":")[2]
        print(f"{viewer.url}\nopen this address in a browser of this machine; Ctrl-C ends it")
        print(f"from elsewhere: ssh -L {port}:127.0.0.1:{port} THIS_MACHINE, then the same address")
        viewer.wait()

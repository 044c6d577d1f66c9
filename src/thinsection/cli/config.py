"""`thinsection config`: every setting of a run as commented TOML."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("config")(config_command)


def config_command(
    write: Annotated[Path | None, typer.Option(help="Write to this new file.")] = None,
    config: Annotated[Path | None, typer.Option(help="Start from this TOML file, checked.")] = None,
) -> None:
    """Show every setting of `thinsection run` as commented TOML.

    Example: thinsection config --write run.toml
    """
    from thinsection.config import dump_toml, from_mapping, read_toml
    from thinsection.errors import ConfigError
    from thinsection.files.atomic import write_text
    from thinsection.stages.config import RunConfig

    text = dump_toml(from_mapping(RunConfig, read_toml(config)) if config else RunConfig())
    if write is None:
        print(text, end="")
        return
    if write.exists():
        raise ConfigError(f"write must name a new file, got {str(write)!r}; it exists")
    write_text(write, text)
    print(f"wrote {write}")

"""Results folders: `Results`, the tiles that it returns, and what maintains a folder."""

from typing import TYPE_CHECKING

from thinsection.registry import lazy_names, listed_names

if TYPE_CHECKING:
    from thinsection.results.folder import Results as Results
    from thinsection.results.folder import open_results as open_results
    from thinsection.store.tiles_h5 import EmbeddedTiles as EmbeddedTiles
    from thinsection.store.tiles_h5 import TilesFile as TilesFile

# these names are imported on first use, as parts of this room do not need them
_NAMES_OF = {"folder": "EmbeddedTiles Results TilesFile open_results"}
__all__ = [*listed_names(_NAMES_OF)]  # noqa: PLE0604
__getattr__ = lazy_names(__name__, _NAMES_OF)

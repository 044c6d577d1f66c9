"""A slide's embedding from the stored embeddings of its tiles."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from thinsection.stages.labels import features_label
from thinsection.stages.stage import Output, SlideWork, Stage
from thinsection.store.tiles_h5 import read_tiles, write_slide_embedding

if TYPE_CHECKING:
    from thinsection.pool import SlideEncoder


@dataclass(frozen=True, kw_only=True)
class PoolingStage(Stage):
    """`GRID/slide_features_NAME/ID.h5`: `features` (D,).

    Attributes:
        features: stage of the tile embeddings.
        slide_encoder: loaded.
        warnings: what does not fit between the two.
    """

    title: ClassVar[str] = "aggregate"

    features: Stage
    slide_encoder: "SlideEncoder"
    warnings: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        grid, _, folder = self.features.address.rpartition("/")
        return f"{grid}/slide_features_{self.slide_encoder.label(features_label(folder))}"

    @property
    def settings(self) -> Mapping[str, Any]:
        # the hash sees every weight: which revision brought them is for the record
        identity = self.slide_encoder.identity
        return {"slide_encoder": {k: v for k, v in identity.items() if k != "revision"}}

    @property
    def needs(self) -> tuple[Stage, ...]:
        return (self.features,)

    def run(self, work: SlideWork) -> Output:
        """Pools; a slide without tiles has no embedding and no file.

        Memory: 4 N D bytes and the slide encoder's own bound.
        """
        encoder = self.slide_encoder
        tiles = read_tiles(work.path(self.features.file(work.entry.slide_id)))
        if tiles.features is None or len(tiles.features) == 0:
            return Output(files=(), facts={"slide_dim": 0})
        embedding = encoder.encode(
            tiles.features, tiles.coords_l0, tile_px_l0=tiles.tile_px_l0 or 1
        )
        attributes = {
            "name": work.entry.slide_id,
            "slide_encoder": encoder.name,
            "weights_hash": encoder.weights_hash or "",
            "num_tiles": len(tiles.coords_l0),
        }
        name = self.file(work.entry.slide_id)
        write_slide_embedding(work.path(name), embedding, attributes)
        facts = {"slide_encoder": encoder.name, "slide_dim": len(embedding)}
        facts |= {"warnings": "; ".join(self.warnings)}
        return Output(files=(name,), facts=facts)

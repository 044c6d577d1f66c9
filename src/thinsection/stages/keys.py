"""What each stage's result depends on, as keys of the resume ledger."""

from dataclasses import asdict
from typing import Any

from thinsection.qc import Pipeline, load_pipeline
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import RunConfig
from thinsection.store.ledger import stage_key

STAGES = ("tissue", "tile", "embed", "aggregate")


def stage_keys(
    entry: SlideEntry,
    fingerprint: str,
    config: RunConfig,
    identities: dict[str, Any],
    *,
    pipeline: Pipeline | None,
) -> dict[str, str]:
    """Stage name -> key. A key covers the input, the settings so far, and what did the work.

    Settings that cannot change a result (memory, workers, device, batch size) are not in it.

    Args:
        entry: the slide; its mpp override counts.
        fingerprint: of the slide file.
        config: of the run.
        identities: of the loaded encoder and slide encoder (name, weights' hash, precision);
            empty for stages that do not use them.
        pipeline: of quality control (`qc_pipeline`), loaded once for all slides.
    """
    tissue = stage_key(
        slide=fingerprint,
        mpp=entry.slide_mpp,
        slides=asdict(config.slides),
        tissue=asdict(config.tissue),
        qc=[pipeline.as_mapping(), list(config.qc.qc_fail)] if pipeline else None,
        overview=config.output.overview,
    )
    tile = stage_key(of=tissue, tiles=asdict(config.tiles), graph=config.output.graph)
    embed = stage_key(
        of=tile,
        encoder=identities.get("encoder"),
        dtype=config.output.embedding_dtype,
        write=sorted(config.output.write),
    )
    aggregate = aggregate_key(embed, identities.get("slide_encoder"))
    return {"tissue": tissue, "tile": tile, "embed": embed, "aggregate": aggregate}


def qc_pipeline(config: RunConfig) -> Pipeline | None:
    """The pipeline of quality control; None where it is off."""
    return None if config.qc.qc == "off" else load_pipeline(config.qc.qc)


def aggregate_key(embed_key: str, slide_encoder: list[Any] | None) -> str:
    """Key of a slide embedding: of the tile embeddings and of [name, weights' hash]."""
    return stage_key(of=embed_key, slide_encoder=slide_encoder)

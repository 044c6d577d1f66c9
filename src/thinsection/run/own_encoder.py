"""A run with an encoder of its process: a network or function, or what `load_encoder` gave."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from thinsection.encode.registry import OWN_PREFIX
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.store.ledger import load_ledgers

if TYPE_CHECKING:
    from thinsection.encode import OwnTileEncoder, TileEncoder


def current_encoder(encoder: object) -> TileEncoder:
    """The encoder as it is now: a network may have been trained since it got its name.

    Raises ConfigError: it is no tile encoder.
    """
    from thinsection.encode import OwnTileEncoder, TileEncoder

    if isinstance(encoder, OwnTileEncoder):
        return encoder.current()
    if isinstance(encoder, TileEncoder):
        return encoder
    raise ConfigError(
        f"encoder must be a name or a tile encoder, got {type(encoder).__name__}; name a network "
        "or function first: ts.make_encoder(network, name='my_network', transform=...)"
    )


def settings_name(encoder: TileEncoder) -> str:
    """Name of the encoder in the settings of a run, for its record."""
    name = encoder.spec.name
    return name if _own(encoder) is None else f"{OWN_PREFIX}{name}"


def check_own_encoder(out: Path, encoder: TileEncoder) -> None:
    """Compares the encoder with stored embeddings of the same name, version and weights.

    All that is stored under one name agrees, since each run was checked: the first one is enough.

    Raises InvalidInputError: it gives other embeddings of the fixed tiles.
    """
    own = _own(encoder)
    if own is None:
        return
    from thinsection.encode.own import SAMPLE, read_sample, samples_agree

    identity = own.identity
    for ledger in load_ledgers(out):
        for record in ledger.stages.values():
            facts = record.facts
            if SAMPLE not in facts or facts.get("encoder") != identity["name"]:
                continue
            deciding = ("weights_hash", "precision", "preprocessing")
            if any(facts.get(name) != identity[name] for name in deciding):
                continue
            stored = read_sample(str(facts[SAMPLE]))
            if not samples_agree(own.sample, stored, own.precision):
                raise InvalidInputError(
                    f"encoder {own.label!r} must give the embeddings that are stored under its "
                    f"name, got others for the same tiles than in {str(out)!r}; its code or "
                    "transform has changed: pass another version to ts.make_encoder"
                )
            return


def check_weights_kept(encoder: TileEncoder) -> None:
    """Raises InvalidInputError: the weights changed during the run."""
    own = _own(encoder)
    if own is not None:
        own.check_unchanged()


def _own(encoder: TileEncoder) -> OwnTileEncoder | None:
    """The encoder if `make_encoder` made it."""
    from thinsection.encode import OwnTileEncoder

    return encoder if isinstance(encoder, OwnTileEncoder) else None

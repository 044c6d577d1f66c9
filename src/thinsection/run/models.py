"""Models of a run: loaded to encode pixels, otherwise recognised from records of earlier runs.

A run records beside each encoder's identity the files that it was read from, with their size and
times. It also records a hash of the machine and package versions on which the meaning of a name and
of 'auto' depends. While all of this is unchanged, loading would give the recorded encoder again. A
finished folder is then recognised without torch and without reading weights. In any other case
(other files, a moving branch of the hub, code of other packages) the encoders are loaded.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from thinsection.config import coerce, from_mapping
from thinsection.encode.registry import (
    ENCODERS,
    OWN_PREFIX,
    EncoderIdentity,
    is_brought,
)
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.machine import cpu_model
from thinsection.pool.encoder import (
    Expects,
    SlideEncoderIdentity,
    pools_by_torch,
    slide_encoder_identity,
)
from thinsection.stages.config import GPU_BATCH, EncodingSpec
from thinsection.stages.spec import Models
from thinsection.store.ledger import load_ledgers
from thinsection.tiles.transforms import StainStatistics, stain_target
from thinsection.types import Document, PlainValues
from thinsection.weights.origin import Origin, installed_version, read_stamps

if TYPE_CHECKING:
    from thinsection.encode import OwnTileEncoder, TileEncoder


Stamps = tuple[tuple[str, int, int, int], ...]  # name, size and times of files
_READ = "read"  # key in a record, see `_WeightsRead`
# packages whose versions decide the meaning of a name and of 'auto'
_PACKAGES = ("thinsection", "torch", "openvino", "timm", "transformers")
_WITHOUT_WEIGHTS = ("mean", "max")  # slide encoders without weights


@dataclass(frozen=True, kw_only=True)
class _WeightsRead:
    """Files that an encoder was read from, with a hash of machine and package versions."""

    stamps: tuple[tuple[object, ...], ...]  # see `Stamps`
    where: str  # hash of machine and package versions
    tokens: bool  # True if it has a dense token grid


@functools.lru_cache(maxsize=1)
def load_models(
    encoding: EncodingSpec, stamped: Stamps | None = (), num_tiles: int | None = None
) -> Models:
    """Loads the models of a run, once per settings and stamps of the files named there.

    On a CPU, this process then keeps freed memory.

    Args:
        encoding: settings of the models.
        stamped: stamps of files that the settings name.
        num_tiles: tiles that this process is to encode, about; None if nobody knows.
    """
    if not encoding.encoders:
        return Models()
    # imports torch, which runs without encoders do not need
    from thinsection.encode import Workload, load_encoder

    workload = Workload(
        num_tiles=num_tiles, batch_size=encoding.batch_size or GPU_BATCH
    )
    encoders = [
        load_encoder(
            name,
            device=encoding.device,
            precision=encoding.precision,
            weights=encoding.weights,
            pretrained=encoding.pretrained,
            allow_remote_code=encoding.allow_remote_code,
            seed=encoding.seed,
            engine=encoding.engine,
            workload=workload,
        )
        for name in encoding.encoders
    ]
    return models_with(encoders, encoding)


def need_torch(encoders: Sequence[str], slide_encoders: Sequence[str] = ()) -> bool:
    """True if one of the named encoders does not compute by NumPy alone; imports no PyTorch."""
    from thinsection.encode.base import NUMPY

    return any(map(pools_by_torch, slide_encoders)) or not all(
        is_brought(name) and getattr(ENCODERS.load(name), "device", None) is NUMPY
        for name in encoders
    )


def models_with(encoders: Sequence[TileEncoder], encoding: EncodingSpec) -> Models:
    """Models of a run with these tile encoders; see `load_models`."""
    from thinsection.encode.base import encoder_identity
    from thinsection.machine import keep_freed_memory
    from thinsection.pool import load_slide_encoder

    if any(encoder.device.type == "cpu" for encoder in encoders):
        keep_freed_memory()
    slide_encoders = [
        load_slide_encoder(
            name,
            weights=encoding.slide_weights,
            device=encoding.device,
            budget_bytes=encoding.pooling_bytes,
        )
        for name in encoding.slide_encoders
    ]
    return Models(
        encoders=tuple(map(encoder_identity, encoders)),
        slide_encoders=tuple(map(slide_encoder_identity, slide_encoders)),
        stain_target=_stain_target(encoding),
        loaded_encoders=tuple(encoders),
        loaded_slide_encoders=tuple(slide_encoders),
    )


def models_document(models: Models, encoding: EncodingSpec) -> Document:
    """Identities by label, as a record stores them for `recorded_models`."""
    document: Document = {}
    for encoder in models.encoders:
        document[encoder.label] = dict(encoder.provenance)
        if encoder.files is not None:
            document[encoder.label][_READ] = {
                "stamps": file_stamps(encoder.files),
                "where": _environment_hash(encoding),
                "tokens": encoder.supports_tokens,
            }
    for slide_encoder in models.slide_encoders:
        document[slide_encoder.name] = dict(slide_encoder.identity)
    return document


def recorded_models(document: PlainValues, encoding: EncodingSpec) -> Models | None:
    """Models from a `models_document`; None if loading might give other models now."""
    count = len(encoding.encoders)
    entries = list(document.items())
    encoders = []
    for label, entry in entries[:count]:
        encoder = _recorded_encoder(label, entry, encoding)
        if encoder is None:
            return None
        encoders.append(encoder)
    slide_encoders = []
    for name, entry in entries[count:]:
        slide_encoder = _recorded_slide_encoder(name, entry)
        if slide_encoder is None:
            return None
        slide_encoders.append(slide_encoder)
    names = tuple(slide_encoder.name for slide_encoder in slide_encoders)
    if len(encoders) < count or names != encoding.slide_encoders:
        return None
    return Models(
        encoders=tuple(encoders),
        slide_encoders=tuple(slide_encoders),
        stain_target=_stain_target(encoding),
    )


def _recorded_encoder(
    label: str, entry: object, encoding: EncodingSpec
) -> EncoderIdentity | None:
    """Identity in an entry; None if the entry is damaged, or files, machine or versions changed."""
    try:
        provenance = coerce(entry, Document, label)
        read = from_mapping(_WeightsRead, provenance.pop(_READ, {}))
        files = tuple(str(stamp[0]) for stamp in read.stamps)
        name = str(provenance["name"])
    except (ConfigError, AttributeError, IndexError, KeyError):
        return None
    if read.where != _environment_hash(encoding) or read.stamps != file_stamps(files):
        return None
    return EncoderIdentity(
        name=name,
        label=label,
        provenance=provenance,
        supports_tokens=read.tokens,
        files=files,
    )


def _recorded_slide_encoder(name: str, entry: object) -> SlideEncoderIdentity | None:
    """Identity in an entry; None for slide encoders with weights, whose files are not recorded."""
    if name not in _WITHOUT_WEIGHTS or not isinstance(entry, dict):
        return None
    if entry.get("weights_hash") or "precision" not in entry:
        return None
    own_label = Origin().label(name, precision=entry["precision"], weights_hash=None)
    return SlideEncoderIdentity(
        name=name, own_label=own_label, identity=entry, expects=Expects()
    )


def file_stamps(files: Sequence[str]) -> Stamps | None:
    """Name, size and times of each file; None if a file is missing."""
    stamps = read_stamps(files)
    return None if stamps is None else tuple(stamp[:4] for stamp in stamps)


def _stain_target(encoding: EncodingSpec) -> StainStatistics | None:
    """Colours that tiles are normalised to; None if normalisation is off."""
    if encoding.stain.stain_norm == "none":
        return None
    return stain_target(encoding.stain)


def _environment_hash(encoding: EncodingSpec) -> str:
    """Hash of machine and package versions, which decide the meaning of a name and of 'auto'."""
    parts: list[object] = [
        cpu_model(),
        sorted(str(path) for path in Path("/dev").glob("nvidia*")),
        sys.platform,
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        [installed_version(package) for package in _PACKAGES],
    ]
    for name in (*encoding.encoders, encoding.weights):
        if name and Path(name).exists():
            parts.append(str(Path(name).resolve()))
    return sha256(json.dumps(parts).encode()).hexdigest()


def with_current_weights(encoder: object) -> TileEncoder:
    """The encoder as it is now: a network may have been trained since it got its name.

    Raises ConfigError: it is no tile encoder.
    """
    from thinsection.encode import TileEncoder

    if isinstance(encoder, TileEncoder):
        own = _own(encoder)
        return encoder if own is None else own.current()
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
                    f"name, got different ones for the same tiles in {str(out)!r}; its code or "
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
    if not encoder.is_own:
        return None
    from thinsection.encode import OwnTileEncoder

    return encoder if isinstance(encoder, OwnTileEncoder) else None

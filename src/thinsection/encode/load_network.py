"""Loads encoders that are networks of PyTorch: finds their weights, chooses their engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import file_digest
from pathlib import Path

import torch

from thinsection.encode.agreement import prove
from thinsection.encode.backbone import (
    Backbone,
    build_backbone,
    load_with_code,
    needs_remote_code,
    pretrained_backbone,
    published_weights,
)
from thinsection.encode.encoder import NetworkTileEncoder
from thinsection.encode.engine import MAX_FP8_DISTANCE
from thinsection.encode.engine_choice import (
    PRECISIONS,
    EngineChoice,
    Workload,
    why_not_compiled,
    why_not_worth,
    why_torch,
)
from thinsection.encode.registry import (
    ENCODERS,
    HUB_PREFIX,
    EncoderSpec,
    is_declared_encoder,
    needs_of_encoder,
    split_input_px,
)
from thinsection.encode.specs import find_spec
from thinsection.errors import InvalidInputError, StoreError, WeightsError
from thinsection.extras import require_packages
from thinsection.weights import hub
from thinsection.weights.files import WEIGHTS_FILES, hash_state_dict
from thinsection.weights.origin import (
    Origin,
    Stamps,
    commit_of,
    files_of,
    keep_hash,
    known_hash,
    read_stamps,
)
from thinsection.weights.placement import Placement, place

_log = logging.getLogger(__name__)


def load_network(
    name: str,
    *,
    device: str | torch.device,
    precision: str,
    weights: str | Path | None,
    pretrained: bool,
    allow_remote_code: bool,
    seed: int,
    engine: EngineChoice,
    workload: Workload | None,
    check_fingerprint: bool,
) -> NetworkTileEncoder:
    """See `load_encoder`."""
    base, _ = split_input_px(name)
    path = Path(base) if base not in ENCODERS and Path(base).exists() else None
    origin = Origin(
        own_weights=weights is not None or path is not None,
        seed=None if pretrained else seed,
    )
    from_hub = pretrained and weights is None
    purpose, packages = needs_of_encoder(name, from_hub=from_hub)
    require_packages(purpose, *packages)
    spec = find_spec(name)
    # a checkpoint's own name, unless it is generic
    is_named = path is not None and path.is_file() and path.name not in WEIGHTS_FILES
    label = path.stem if path and is_named else spec.name
    if spec.input_px != find_spec(base).input_px:
        label += f"_{spec.input_px}px"
    origin = replace(origin, name=label)
    placement = place(
        device, precision, half_precision=spec.half_precision, has_fp8=True
    )

    reload = partial(
        load_network,
        name if path is None else str(path.absolute()) + name.removeprefix(base),
        device=str(placement.device),
        precision=placement.precision,
        weights=_absolute(weights),
        pretrained=pretrained,
        allow_remote_code=allow_remote_code,
        seed=seed,
        engine=engine,
        workload=workload,
        check_fingerprint=True,
    )
    file = None
    encoder: NetworkTileEncoder | None = None
    if not pretrained:
        # the spec of a folder or of the hub may change; those of other names cannot
        may_change = path is not None or base.startswith(HUB_PREFIX)
        origin = replace(origin, files=None if may_change else ())
    elif needs_remote_code(spec):
        origin = replace(origin, revision=spec.revision)
    else:
        file = find_weights_file(spec, base, path if weights is None else weights)
        origin = replace(origin, revision=file.revision, files=file.files)
        if not why_torch(engine, str(placement.device), is_random=False):
            encoder = _load_stored_graph(spec, file, placement, origin)

    def load_on_torch(placement: Placement = placement) -> NetworkTileEncoder:
        weights_hash = None
        if file is not None:
            backbone, weights_hash = _load_weights(spec, file)
        elif pretrained:
            backbone = load_with_code(spec, allow_remote_code=allow_remote_code)
        else:
            backbone = build_backbone(spec, seed=seed)
        if placement.precision != "fp8":
            return NetworkTileEncoder(spec, backbone, placement, origin, weights_hash)
        in_fp32 = Placement(placement.device, "fp32")
        exact = NetworkTileEncoder(spec, backbone, in_fp32, origin, weights_hash)
        if check_fingerprint:
            # rounding may hide a fault of preprocessing
            prove(exact)
        _move_to_fp8(exact)
        return exact

    if encoder is None:
        encoder = _on_engine(
            load_on_torch,
            engine,
            is_random=not pretrained,
            workload=workload or Workload(),
        )
    encoder.reload = reload
    if check_fingerprint:
        prove(encoder)
    return encoder


def _absolute(weights: str | Path | None) -> str | Path | None:
    """Source of weights for a process with another working folder."""
    if weights is not None and Path(weights).exists():
        return Path(weights).absolute()
    return weights


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """File of weights, its origin, and by what it is known again."""

    path: Path
    revision: str | None  # commit on the hub
    files: tuple[str, ...] | None  # None if the weights depend on more than these files
    stamps: Stamps | None  # of the file, its shards and configs, before any is read
    network: str  # text that tells apart the networks which the file may fill


def find_weights_file(
    spec: EncoderSpec, name: str, source: str | Path | None
) -> WeightsFile:
    """File of weights at the source, or the published one."""
    revision = None
    if source is not None:
        path = hub.find_weights(source, files=spec.weights_files)
        files: tuple[str, ...] | None = files_of(path)
    else:
        check_pinned(spec, name)
        path = published_weights(spec)
        _check_published(spec, path)
        revision = commit_of(path)
        # 'hf:' without a commit means the current commit of the repository
        can_move = name.startswith(HUB_PREFIX) or "@" in name
        is_moving = can_move and str(revision) not in name
        is_pinned = spec.revision == revision and not is_moving
        files = files_of(path) if is_pinned else None
    return WeightsFile(
        path=path,
        revision=revision,
        files=files,
        # without the folder, in which files that decide nothing come and go
        stamps=read_stamps(files_of(path)[1:]),
        network=f"{spec.name}|{spec.architecture}",
    )


def check_pinned(spec: EncoderSpec, name: str) -> None:
    """Raises WeightsError: no commit of a declared encoder is known, and the name states none."""
    if spec.pin == "unpinned" and is_declared_encoder(name):
        raise WeightsError(
            f"encoder must be pinned to a commit of {spec.repo!r}, got {name!r}, of which no "
            f"commit is known here; pass '{name}@COMMIT', or '{name}@main' for its weights of today"
        )


def _check_published(spec: EncoderSpec, path: Path) -> None:
    """Compares a file with the public records of it; it is hashed once, and known by its stamps.

    Raises:
        WeightsError: its size or its sha256 differs.
    """
    for file in spec.published:
        if file.name != path.name:
            continue
        size_bytes = path.stat().st_size
        remedy = "delete it, so that it is downloaded again"
        if file.size_bytes not in (None, size_bytes):
            raise WeightsError(
                f"weights of {spec.name!r} must have {file.size_bytes} bytes, got {size_bytes} in "
                f"{str(path)!r}; {remedy}"
            )
        stamps = read_stamps([path])
        digest = known_hash("sha256", stamps)
        if digest is None:
            with path.open("rb") as content:
                digest = file_digest(content, "sha256").hexdigest()
            keep_hash("sha256", stamps, digest)
        if digest != file.sha256:
            raise WeightsError(
                f"weights of {spec.name!r} must have sha256 {file.sha256}, got {digest} in "
                f"{str(path)!r}; {remedy}"
            )


def _load_weights(spec: EncoderSpec, file: WeightsFile) -> tuple[Backbone, str]:
    """Network with the weights of a file, and their hash, computed once for each file."""
    backbone = pretrained_backbone(spec, file.path)
    weights_hash = known_hash(file.network, file.stamps)
    if weights_hash is None:
        weights_hash = hash_state_dict(backbone.network.state_dict())
        keep_hash(file.network, file.stamps, weights_hash)
    return backbone, weights_hash


def hash_of_weights(spec: EncoderSpec, file: WeightsFile) -> str:
    """Hash of the weights in a file; reads them only if it is not known by the file's stamps."""
    weights_hash = known_hash(file.network, file.stamps)
    if weights_hash is None:
        return _load_weights(spec, file)[1]
    return weights_hash


def _load_stored_graph(
    spec: EncoderSpec, file: WeightsFile, placement: Placement, origin: Origin
) -> NetworkTileEncoder | None:
    """Encoder on a graph that OpenVINO has converted before; no weights are read.

    None where the hash of the weights is not known by the stamps of their files, or the cache has
    no graph of them that was compared with PyTorch on this CPU and passed.
    """
    weights_hash = known_hash(file.network, file.stamps)
    # transformers builds its networks from the file's own folder
    if weights_hash is None or spec.architecture.kind in ("transformers", "auto"):
        return None
    encoder = NetworkTileEncoder(spec, None, placement, origin, weights_hash)
    return None if _move_to_openvino(encoder) else encoder


def _on_engine(
    load_on_torch: Callable[..., NetworkTileEncoder],
    engine: EngineChoice,
    *,
    is_random: bool,
    workload: Workload,
) -> NetworkTileEncoder:
    """Encoder on the requested engine; with 'auto', it records why another one was rejected."""
    encoder = load_on_torch()
    reason = why_torch(engine, str(encoder.device), is_random=is_random)
    if not reason and encoder.precision not in PRECISIONS:
        allowed = " or ".join(PRECISIONS)
        got = encoder.precision
        reason = f"precision must be {allowed} with OpenVINO, got {got!r}"
    other: EngineChoice = "openvino"
    if engine == "compiled" or (engine == "auto" and encoder.device.type == "cuda"):
        other = "compiled"
        reason = _move_to_compiled(
            encoder,
            lambda: load_on_torch(Placement(encoder.device, "fp32")),
            workload,
            must_pay=engine == "auto",
        )
    elif engine == "torch" or encoder.device.type != "cpu":
        return encoder
    elif not reason:
        reason = _move_to_openvino(encoder)
        if reason and engine == "auto":
            # the PyTorch weights were released
            encoder = load_on_torch()
    if not reason:
        return encoder
    if engine == other:
        raise InvalidInputError(
            f"engine must be torch for {encoder.spec.name!r} in {encoder.precision}, got "
            f"{engine}: {reason}"
        )
    encoder.engine += f" (not {other}: {reason})"
    return encoder


def _move_to_compiled(
    encoder: NetworkTileEncoder,
    load_exact: Callable[[], NetworkTileEncoder],
    workload: Workload,
    *,
    must_pay: bool,
) -> str:
    """Move the computation to a compiled network; returns the reason if it stays, or ''."""
    reason = why_not_compiled(str(encoder.device))
    if reason:
        return reason
    batch_size = workload.batch_size
    try:
        if must_pay:
            reason = why_not_worth(
                workload,
                tiles_per_s=partial(encoder.tiles_per_s, batch_size),
                is_stored=partial(encoder.has_compiled, batch_size),
            )
            if reason:
                return reason
        check = encoder.to_compiled(batch_size=batch_size, load_exact=load_exact)
    except (InvalidInputError, StoreError, OSError, RuntimeError) as error:
        return str(error).splitlines()[0]
    if check.passes(encoder.precision):
        return ""
    return f"the output differs too much from torch's: {check}"


def _move_to_fp8(encoder: NetworkTileEncoder) -> None:
    """Rounds the weights of an encoder in fp32, and says how far its embeddings are from them.

    Raises InvalidInputError: they are too far, or the network has no layers to round.
    """
    check = encoder.to_fp8()
    name = encoder.spec.name
    cosine = 1 - check.angle
    least = 1 - MAX_FP8_DISTANCE
    if not check.passes("fp8"):
        raise InvalidInputError(
            f"embeddings of {name!r} in fp8 must have a cosine >= {least:g} to those in fp32, got "
            f'{cosine:.6f} on random test tiles; pass precision="bf16"'
        )
    slow = ""
    if encoder.device.type == "cpu":
        slow = (
            "; a CPU has no FP8 and is slower than in fp32, so use it for comparisons"
        )
    _log.warning("%s on %s: %s%s", name, encoder.device, encoder.engine, slow)


def _move_to_openvino(encoder: NetworkTileEncoder) -> str:
    """Move the computation to OpenVINO; returns the reason if that is not possible, or ''."""
    try:
        check = encoder.to_openvino()
    except (InvalidInputError, StoreError, OSError, RuntimeError) as error:
        return str(error).splitlines()[0]
    if check.passes(encoder.precision):
        return ""
    return f"the output differs too much from torch's: {check}"

"""Would an encoder load here, and if not, why not: asked without loading it."""

from dataclasses import dataclass

import psutil
import torch

from thinsection.encode.load import find_spec
from thinsection.encode.registry import ENCODERS, declared_encoders
from thinsection.encode.spec import EncoderSpec
from thinsection.errors import (
    DeviceError,
    InvalidInputError,
    MissingDependencyError,
    UnknownEncoderError,
    WeightsError,
)
from thinsection.units import format_bytes
from thinsection.weights.hub import cached_file, has_token, hub_library, is_reachable
from thinsection.weights.packages import is_installed
from thinsection.weights.placement import resolve_device

INSTALL = "pip install 'thinsection[hub]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One condition for loading.

    Attributes:
        name: declared, packages, weights, device or memory.
        ok: whether it holds.
        detail: what was found, and what to do where it does not hold.
    """

    name: str
    ok: bool
    detail: str


def check_encoder(name: str, *, device: str = "auto") -> tuple[Check, ...]:
    """What loading needs, in the order in which it would fail; later ones only if those hold.

    Raises:
        UnknownEncoderError: no encoder of that name.
    """
    if name not in declared_encoders() and name in ENCODERS:
        return (_brought(name),)
    try:
        spec = find_spec(name)
    except UnknownEncoderError:
        raise
    except (MissingDependencyError, WeightsError) as error:
        return (Check(name="declared", ok=False, detail=str(error)),)
    found = Check(name="declared", ok=True, detail=f"{spec.source}; licence {spec.licence}")
    packages = _packages(spec)
    if not packages.ok:
        return (found, packages)
    where = _device(device)
    checks = (found, packages, _weights(spec), where)
    return (*checks, _memory(spec, device)) if where.ok else checks


def _brought(name: str) -> Check:
    try:
        entry = ENCODERS.entry(name)
    except InvalidInputError as error:
        return Check(name="declared", ok=False, detail=str(error))
    detail = f"brought by another package: {entry.help}"
    if entry.missing:
        detail = f"not installed: {', '.join(entry.missing)}; {entry.remedy}"
    return Check(name="declared", ok=not entry.missing, detail=detail)


def _packages(spec: EncoderSpec) -> Check:
    missing = [package for package in spec.needs if not is_installed(package)]
    if missing:
        detail = f"not installed: {', '.join(missing)}; {INSTALL}"
        return Check(name="packages", ok=False, detail=detail)
    detail = ", ".join(spec.needs) or "none beyond thinsection's"
    return Check(name="packages", ok=True, detail=detail)


def _weights(spec: EncoderSpec) -> Check:
    if spec.architecture.kind == "lite0":
        return Check(name="weights", ok=True, detail="in the package efficientnet_lite0")
    if spec.repo is None:
        return Check(name="weights", ok=True, detail="in the checkpoint's own folder")
    for filename in spec.weights_files:
        path = cached_file(spec.repo, filename, spec.revision)
        if path is not None:
            return Check(name="weights", ok=True, detail=f"cached at {path}")
    constants = hub_library().constants
    page = f"{constants.ENDPOINT}/{spec.repo}"
    at = f" --revision {spec.revision}" if spec.revision else ""
    fetch = f"hf download {spec.repo} {spec.weights_files[0]}{at}"
    if constants.HF_HUB_OFFLINE:
        detail = f"not cached, and HF_HUB_OFFLINE is set; fetch them elsewhere: {fetch}"
    elif spec.gated and not has_token():
        detail = f"gated: accept the terms at {page}, then set HF_TOKEN or run: hf auth login"
    elif not is_reachable(constants.ENDPOINT):
        detail = f"not cached, and {constants.ENDPOINT} does not answer; fetch elsewhere: {fetch}"
    else:
        access = "; the token's account must have been granted access" if spec.gated else ""
        return Check(name="weights", ok=True, detail=f"would be downloaded from {page}{access}")
    return Check(name="weights", ok=False, detail=detail)


def _device(device: str) -> Check:
    try:
        return Check(name="device", ok=True, detail=str(resolve_device(device)))
    except DeviceError as error:
        return Check(name="device", ok=False, detail=str(error))


def _memory(spec: EncoderSpec, device: str) -> Check:
    where = resolve_device(device)
    if where.type == "cuda":
        free, _ = torch.cuda.mem_get_info(where)
    else:
        free = int(psutil.virtual_memory().available)
    if spec.num_params is None:
        return Check(name="memory", ok=True, detail=f"{format_bytes(free)} free on {where}")
    needed = 4 * spec.num_params  # float32
    detail = f"weights take {format_bytes(needed)}, {format_bytes(free)} are free on {where}"
    return Check(name="memory", ok=needed <= free, detail=detail)

"""Would an encoder load here, and if not, why not: asked without loading it."""

from dataclasses import dataclass

import psutil
import torch

from thinsection.encode.load import find_spec
from thinsection.encode.registry import ENCODERS, EncoderSpec, declared_encoders
from thinsection.errors import DeviceError, InvalidInputError, MissingDependencyError, WeightsError
from thinsection.units import format_bytes
from thinsection.weights import hub
from thinsection.weights.packages import is_installed
from thinsection.weights.placement import resolve_device


@dataclass(frozen=True, slots=True)
class Check:
    """One condition for loading: what was found, and what to do where it does not hold."""

    name: str  # declared, packages, weights, device or memory
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
    except (MissingDependencyError, WeightsError) as error:
        return (Check("declared", False, str(error)),)
    found = Check("declared", True, f"{spec.source}; licence {spec.licence}")
    if missing := [package for package in spec.needs if not is_installed(package)]:
        detail = f"not installed: {', '.join(missing)}; pip install 'thinsection[hub]'"
        return (found, Check("packages", False, detail))
    packages = Check("packages", True, ", ".join(spec.needs) or "none beyond thinsection's")
    checks = (found, packages, Check("weights", *_weights(spec)))
    try:
        where = resolve_device(device)
    except DeviceError as error:
        return (*checks, Check("device", False, str(error)))
    return (*checks, Check("device", True, str(where)), Check("memory", *_memory(spec, where)))


def _brought(name: str) -> Check:
    try:
        entry = ENCODERS.entry(name)
    except InvalidInputError as error:
        return Check("declared", False, str(error))
    detail = f"brought by another package: {entry.help}"
    if entry.missing:
        detail = f"not installed: {', '.join(entry.missing)}; {entry.remedy}"
    return Check("declared", not entry.missing, detail)


def _weights(spec: EncoderSpec) -> tuple[bool, str]:
    if spec.architecture.kind == "lite0":
        return True, "in the package efficientnet_lite0"
    if spec.repo is None:
        return True, "in the checkpoint's own folder"
    for filename in spec.weights_files:
        if path := hub.cached_file(spec.repo, filename, spec.revision):
            return True, f"cached at {path}"
    constants = hub.hub_library().constants
    page = f"{constants.ENDPOINT}/{spec.repo}"
    fetch = hub.fetch_command(spec.repo, spec.weights_files[0], spec.revision)
    if constants.HF_HUB_OFFLINE:
        return False, f"not cached, and HF_HUB_OFFLINE is set; fetch them elsewhere: {fetch}"
    if spec.gated and not hub.has_token():
        return False, f"gated: accept the terms at {page}, then set HF_TOKEN or run: hf auth login"
    if not hub.is_reachable(constants.ENDPOINT):
        why = f"not cached, and {constants.ENDPOINT} does not answer"
        return False, f"{why}; fetch elsewhere: {fetch}"
    access = "; the token's account must have been granted access" if spec.gated else ""
    return True, f"would be downloaded from {page}{access}"


def _memory(spec: EncoderSpec, where: torch.device) -> tuple[bool, str]:
    on_cuda = where.type == "cuda"
    free = torch.cuda.mem_get_info(where)[0] if on_cuda else psutil.virtual_memory().available
    if spec.num_params is None:
        return True, f"{format_bytes(free)} free on {where}"
    needed = 4 * spec.num_params  # float32
    detail = f"weights take {format_bytes(needed)}, {format_bytes(free)} are free on {where}"
    return needed <= free, detail

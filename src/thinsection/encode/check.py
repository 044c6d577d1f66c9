"""Conditions for loading an encoder on this machine, for `thinsection models`."""

from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import torch

from thinsection import errors
from thinsection.encode.engine_choice import EngineChoice
from thinsection.encode.fingerprint import find_fingerprint
from thinsection.encode.load import load_encoder
from thinsection.encode.load_network import check_pinned
from thinsection.encode.registry import ENCODERS, EncoderSpec, is_brought
from thinsection.encode.specs import find_spec
from thinsection.extras import missing_of, remedy_for
from thinsection.types import format_bytes
from thinsection.weights import hub
from thinsection.weights.placement import resolve_device


@dataclass(frozen=True, slots=True)
class Check:
    """Condition for loading."""

    name: str  # declared, packages, weights, device, memory or fingerprint
    ok: bool
    detail: str  # result of the check, with a remedy if the condition does not hold


def check_encoder(name: str, *, device: str = "auto") -> tuple[Check, ...]:
    """Conditions for loading, in their order, up to the first that does not hold."""
    return tuple(_checks(name, device))


def _checks(name: str, device: str) -> Iterator[Check]:
    if is_brought(name):
        yield _check_entry(name)
        return
    try:
        spec = find_spec(name)
    except (
        errors.MissingDependencyError,
        errors.WeightsError,
        errors.InvalidInputError,
    ) as error:
        yield Check("declared", False, str(error))
        return
    yield Check("declared", True, f"{spec.source}; licence {spec.licence}")
    missing = missing_of(spec.needs)
    if missing:
        detail = f"not installed: {', '.join(missing)}; {remedy_for(missing)}"
        yield Check("packages", False, detail)
        return
    needs = ", ".join(spec.needs) or "no packages beyond those of thinsection"
    yield Check("packages", True, needs)
    try:
        check_pinned(spec, name)
    except errors.WeightsError as error:
        yield Check("weights", False, str(error))
        return
    yield _check_weights(spec)
    try:
        placed_on = resolve_device(device)
    except errors.DeviceError as error:
        yield Check("device", False, str(error))
        return
    yield Check("device", True, str(placed_on))
    memory = _check_memory(spec, placed_on)
    yield memory
    if memory.ok:
        yield from _check_fingerprint(name, spec, device)


def _check_fingerprint(name: str, spec: EncoderSpec, device: str) -> Iterator[Check]:
    """Comparisons with the fingerprint: exact, and in the precision and engine of a run."""
    fingerprint = find_fingerprint(spec.name)
    if fingerprint is None:
        detail = (
            "none, so nobody has proved these embeddings; whoever has the weights can make it: "
            f"thinsection models fingerprint {name}"
        )
        yield Check("fingerprint", True, detail)
        return
    if find_local_weights(spec) is None:
        detail = "not compared, since the weights are not here"
        yield Check("fingerprint", True, detail)
        return
    choices: tuple[tuple[str, EngineChoice], ...] = (
        ("fp32", "torch"),
        ("auto", "auto"),
    )
    seen = set()
    for precision, engine in choices:
        try:
            encoder = load_encoder(
                name, device=device, precision=precision, engine=engine
            )
        except errors.WeightsError as error:
            yield Check("fingerprint", False, str(error))
            return
        if encoder.fingerprint not in seen:
            yield Check("fingerprint", True, encoder.fingerprint)
        seen.add(encoder.fingerprint)


def _check_entry(name: str) -> Check:
    """Condition for an encoder of another package."""
    try:
        entry = ENCODERS.entry(name)
    except errors.InvalidInputError as error:
        return Check("declared", False, str(error))
    if entry.missing:
        detail = f"not installed: {', '.join(entry.missing)}; {entry.remedy}"
        return Check("declared", False, detail)
    return Check("declared", True, f"from another package: {entry.help}")


def find_local_weights(spec: EncoderSpec) -> str | None:
    """Place on this machine where the weights are; None if they are not here."""
    if spec.architecture.kind == "lite0":
        return "in this package"
    if spec.repo is None:
        return "in the checkpoint's own folder"
    for filename in spec.weights_files:
        path = hub.cached_file(spec.repo, filename, spec.revision)
        if path:
            return f"cached at {path}"
    return None


def _check_weights(spec: EncoderSpec) -> Check:
    """Condition that the weights are stored here, or can be downloaded."""
    place = find_local_weights(spec)
    if place is not None:
        return Check("weights", True, place)
    assert spec.repo is not None
    obstacle = _download_obstacle(spec, spec.repo)
    if obstacle is not None:
        return Check("weights", False, obstacle)
    page = f"{hub.hub_library().constants.ENDPOINT}/{spec.repo}"
    access = "; the account of your token needs access to it" if spec.gated else ""
    return Check("weights", True, f"would be downloaded from {page}{access}")


def _download_obstacle(spec: EncoderSpec, repo: str) -> str | None:
    """Reason why the weights cannot be downloaded, with a remedy; or None."""
    constants = hub.hub_library().constants
    fetch = hub.fetch_command(repo, spec.weights_files[0], spec.revision)
    if constants.HF_HUB_OFFLINE:
        return (
            "not cached, and HF_HUB_OFFLINE is set; download them on a machine with a network: "
            f"{fetch}"
        )
    if spec.gated and not hub.has_token():
        return (
            f"gated: accept the terms at {constants.ENDPOINT}/{repo}, "
            "then set HF_TOKEN or run: hf auth login"
        )
    if not hub.is_reachable(constants.ENDPOINT):
        return (
            f"not cached, and {constants.ENDPOINT} does not answer; download them on a machine "
            f"with a network: {fetch}"
        )
    return None


def _check_memory(spec: EncoderSpec, device: torch.device) -> Check:
    """Condition that the weights in float32 fit into free memory."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available
    if spec.num_params is None:
        return Check("memory", True, f"{format_bytes(free)} free on {device}")
    needed = 4 * spec.num_params
    return Check(
        "memory",
        needed <= free,
        f"the weights need {format_bytes(needed)}, and {format_bytes(free)} are free on {device}",
    )

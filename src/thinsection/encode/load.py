"""`load_encoder`: makes a ready encoder from a name. PyTorch is imported only for its networks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from thinsection.encode.answers import load_from_package
from thinsection.encode.base import TileEncoder
from thinsection.encode.engine_choice import EngineChoice, Workload
from thinsection.encode.registry import is_brought
from thinsection.errors import InvalidInputError
from thinsection.weights.origin import Origin

if TYPE_CHECKING:
    import torch


def load_encoder(
    name: str,
    *,
    device: str | torch.device = "auto",
    precision: str = "auto",
    weights: str | Path | None = None,
    pretrained: bool = True,
    allow_remote_code: bool = False,
    seed: int = 0,
    engine: EngineChoice = "auto",
    workload: Workload | None = None,
    check_fingerprint: bool = True,
) -> TileEncoder:
    """Encoder of that name, on its device, with its weights.

    Args:
        name: a registry name, `timm:<name>`, `hf:<repo>[@<revision>]`, the path of a checkpoint
            with its config.json, or the name of an encoder from another package. ':448px' after it
            asks for another input size than the authors'.
        device: auto, cpu, cuda, cuda:N or mps.
        precision: auto, fp32, fp16, bf16 or fp8. fp8 rounds the linear layers of a vision
            transformer; a line states the cosine to fp32, and a cosine below 0.99 is an error.
        weights: weights in place of the published ones: a file, a folder, or `owner/name@COMMIT`.
        pretrained: False uses seeded random weights, without a download.
        allow_remote_code: True allows code from the hub to run, for the models that need it.
        seed: seed of the random weights.
        engine: torch, openvino (on a CPU), compiled, or auto. On a CPU, auto uses openvino if it is
            installed and its embeddings match PyTorch's; random weights use torch. On CUDA, auto
            uses a compiled network if that pays for the workload. `encoder.engine` has the reason.
        workload: number of tiles to encode and tiles of a batch, for a compiled network.
        check_fingerprint: False does not compare the encoder with its fingerprint.

    Memory: the weights once, in float32, also before fp8 rounds them; twice while OpenVINO converts
        their layout or a compiled network in half precision is compared with fp32.
    Raises UnknownEncoderError, DeviceError, MissingDependencyError; WeightsError: the weights
    cannot be downloaded, may not be used, or do not match, or the embedding of the fixed tile is
    not that of the encoder's fingerprint; InvalidInputError: the network does not take the input
    size, or the precision.
    """
    if is_brought(name):
        if engine in ("openvino", "compiled"):
            raise InvalidInputError(
                f"engine must be auto or torch for {name!r}, which another package provides, "
                f"got {engine!r}"
            )
        brought = load_from_package(
            name,
            device=device,
            precision=precision,
            weights=weights,
            pretrained=pretrained,
            seed=seed,
        )
        brought.origin = Origin(
            name=name,
            own_weights=weights is not None,
            seed=None if pretrained else seed,
        )
        return brought
    from thinsection.encode.load_network import load_network

    return load_network(
        name,
        device=device,
        precision=precision,
        weights=weights,
        pretrained=pretrained,
        allow_remote_code=allow_remote_code,
        seed=seed,
        engine=engine,
        workload=workload,
        check_fingerprint=check_fingerprint,
    )

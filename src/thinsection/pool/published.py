"""Slide encoders with published weights: found, loaded strictly, or random where asked for."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn

from thinsection.errors import WeightsError
from thinsection.pool.encoder import LoadOptions, SlideEncoder
from thinsection.weights.files import load_strictly, read_state_dict
from thinsection.weights.hub import commit_of, find_weights


class PublishedSlideEncoder(SlideEncoder):
    """A network with published weights; a subclass says where they are and builds the network.

    Attributes:
        repository, revision: on the hub, the revision a commit.
        files: names of the weights file, the preferred one first.
        prefix: of the weights' names; what lies outside of it is another model and left aside.
    """

    repository: ClassVar[str]
    revision: ClassVar[str]
    files: ClassVar[tuple[str, ...]]
    prefix: ClassVar[str] = ""

    @classmethod
    def build(cls, config: Any = None) -> nn.Module:
        """The network, of the published sizes or of `config`, its weights to be loaded."""
        raise NotImplementedError(f"{cls.__name__} must build a network")

    @classmethod
    def from_state_dict(
        cls,
        state_dict: Mapping[str, torch.Tensor],
        *,
        config: Any = None,
        options: LoadOptions | None = None,
        **own: Any,
    ) -> Self:
        """The encoder with published weights; names must fit exactly.

        Raises:
            WeightsError: a name is missing or unexpected, or a shape is wrong.
        """
        with torch.device("meta"):
            net = cls.build(config)
        weights = {
            name.removeprefix(cls.prefix): value.detach().clone()
            for name, value in state_dict.items()
            if name.startswith(cls.prefix)
        }
        digest = load_strictly(net, weights, source=cls.name)
        encoder = cls(net, options=options or LoadOptions(), **own)  # type: ignore[call-arg]
        encoder.weights_hash = digest
        return encoder

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | Path | None = None,
        *,
        config: Any = None,
        options: LoadOptions | None = None,
        **own: Any,
    ) -> Self:
        """The encoder from a file, a folder, or the hub: as published, or `owner/name@COMMIT`.

        Raises:
            WeightsError: nothing is there, it is not plain tensors, or it does not fit.
            MissingDependencyError: a hub repository, and huggingface_hub is not installed.
        """
        source = path_or_repo or cls.repository
        known = cls.revision if str(source) == cls.repository else None
        path = find_weights(source, files=cls.files, revision=known)
        state = read_state_dict(path)
        encoder = cls.from_state_dict(state, config=config, options=options, **own)
        encoder.origin = replace(encoder.origin, revision=commit_of(path))
        return encoder

    @classmethod
    def load(cls, options: LoadOptions) -> Self:
        """The encoder for the registry; `pretrained=False` gives seeded random weights."""
        if options.pretrained:
            return cls.from_pretrained(options.weights, options=options)
        if options.weights is not None:
            raise WeightsError("weights must be left out with pretrained=False, got both")
        return cls.from_state_dict(cls.random_weights(seed=0), options=options)

    @classmethod
    def random_weights(cls, config: Any = None, *, seed: int) -> dict[str, torch.Tensor]:
        """A state dict with the published names and shapes and seeded random values.

        Matrices are normal with deviation C^-0.5, so that every layer matters; for tests, dry runs
        and benchmarks, never for results.
        """
        with torch.device("meta"):
            wanted = cls.build(config).state_dict()
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for name, value in wanted.items():
            noise = torch.randn(value.shape, generator=generator)
            is_norm = any(part in name for part in ("norm", ".ln_", "_ln."))
            if is_norm and name.endswith("weight"):
                noise = 1 + 0.1 * noise
            elif name.endswith("bias"):
                noise = 0.05 * noise
            elif not name.endswith(("query", "cls_token")):
                noise = noise * value.shape[-1] ** -0.5
            weights[cls.prefix + name] = noise
        return weights

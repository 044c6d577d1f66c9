"""Slide transformers with published weights: found, loaded strictly, placed, within a budget."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from thinsection.errors import BudgetError, WeightsError, require
from thinsection.pool.encoder import LoadOptions, SlideEncoder
from thinsection.types import MIB
from thinsection.units import format_bytes
from thinsection.weights.files import load_strictly, read_state_dict
from thinsection.weights.hub import commit_of, find_weights
from thinsection.weights.placement import resolve_device

TOKEN_BLOCK = 1024  # tokens a block of the MLP: hidden states of 1024 x 3072 float32 are 12 MiB
ATTENTION_BYTES = 64 * MIB  # block buffers of the attention; its preferred CPU blocks take 20 MiB


class PublishedSlideEncoder(SlideEncoder):
    """A network with published weights; a subclass says where they are and builds the network."""

    repository: ClassVar[str]  # on the hub
    revision: ClassVar[str]  # a commit
    files: ClassVar[tuple[str, ...]]  # names of the weights file, the preferred one first
    prefix: ClassVar[str] = ""  # of the weights' names; outside of it lies another model
    large: ClassVar[str]  # pattern of the names of the layers whose products bfloat16 is for

    def __init__(self, net: nn.Module, *, options: LoadOptions) -> None:
        self._device = resolve_device(options.device, mps=False)
        self._budget_bytes = options.budget_bytes
        self.net = net.to(self._device).eval().requires_grad_(False)
        if options.precision == "bf16":  # all but the large products stays as it is
            self.precision = "bf16"
            for name, layer in net.named_modules():
                if re.fullmatch(self.large, name):
                    layer.to(torch.bfloat16)

    @classmethod
    def build(cls, config: Any = None) -> nn.Module:
        """The network, of the published sizes or of `config`, its weights to be loaded."""
        raise NotImplementedError(f"{cls.__name__} must build a network")

    @classmethod
    def from_state_dict(
        cls,
        state_dict: Mapping[str, Tensor],
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
        own_names = [name for name in state_dict if name.startswith(cls.prefix)]
        weights = {n.removeprefix(cls.prefix): state_dict[n].detach().clone() for n in own_names}
        digest = load_strictly(net, weights, source=cls.name)
        encoder = cls(net, options=options or LoadOptions(), **own)
        encoder.weights_hash = digest
        return encoder

    @classmethod
    def from_pretrained(cls, path_or_repo: str | Path | None = None, **own: Any) -> Self:
        """The encoder from a file, a folder, or the hub: as published, or `owner/name@COMMIT`.

        Further arguments are those of `from_state_dict`.

        Raises:
            WeightsError: nothing is there, it is not plain tensors, or it does not fit.
            MissingDependencyError: a hub repository, and huggingface_hub is not installed.
        """
        source = path_or_repo or cls.repository
        known = cls.revision if str(source) == cls.repository else None
        path = find_weights(source, files=cls.files, revision=known)
        encoder = cls.from_state_dict(read_state_dict(path), **own)
        encoder.origin = replace(encoder.origin, revision=commit_of(path))
        return encoder

    @classmethod
    def load(cls, options: LoadOptions) -> Self:
        """The encoder for the registry; `pretrained=False` gives seeded random weights."""
        if options.pretrained:
            return cls.from_pretrained(options.weights, options=options)
        rule = "weights must be left out with pretrained=False"
        require(options.weights is None, rule, "both", error=WeightsError)
        return cls.from_state_dict(cls.random_weights(seed=0), options=options)

    @classmethod
    def random_weights(cls, config: Any = None, *, seed: int) -> dict[str, Tensor]:
        """Seeded random values of the published names and shapes, never for results.

        Matrices are normal with deviation C^-0.5, so that every layer matters.
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


class HeadPlan(NamedTuple):
    """How a forward pass keeps within a budget."""

    heads_at_a_time: int  # whose q, k and v are held
    peak_bytes: int


def plan_heads(
    name: str, num_tokens: int, num_heads: int, peak: Callable[[int], int], budget_bytes: int
) -> HeadPlan:
    """As many heads at a time as the budget allows, by the `peak` bytes of so many; or an error."""
    for heads in (n for n in range(num_heads, 0, -1) if num_heads % n == 0):
        if peak(heads) <= budget_bytes:
            return HeadPlan(heads, peak(heads))
    needs = f"{name} needs {format_bytes(peak(1))} for {num_tokens} tokens"
    raise BudgetError(f"{needs}, the budget is {format_bytes(budget_bytes)}; raise budget_bytes")

"""Text towers of two-tower models: texts become vectors that are compared with those of tiles.

A text tower belongs to one image tower. `TextEncoder.image_hash` is the hash of that tower's
weights. Embeddings record the same hash, so that texts are not compared with another model's tiles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from thinsection.encode import towers
from thinsection.encode.load_network import find_weights_file, hash_of_weights
from thinsection.encode.registry import EncoderSpec, declared_encoders
from thinsection.encode.specs import find_spec
from thinsection.errors import InvalidInputError, WeightsError, rewording
from thinsection.registry import Registry
from thinsection.weights import hub
from thinsection.weights.files import fill_strictly, read_state_dict
from thinsection.weights.origin import commit_of
from thinsection.weights.placement import optional_package, resolve_device

TOKENIZER_NAME = "tokenizer.json"
_BATCH = 32  # prompts at a time


class TextEncoder(ABC):
    """Encoder from texts to vectors, for the tile embeddings of one image tower.

    An encoder of another package sets the attributes and the abstract method.
    """

    name: str
    # `weights_hash` of the tile encoder whose embeddings fit to the texts
    image_hash: str
    # factor by which cosines are multiplied before a softmax over classes
    scale: float

    def __repr__(self) -> str:
        return f"<{self.name}: text encoder, tiles of weights {self.image_hash[:12]}>"

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> Tensor:
        """Unit vectors float32 (P, D), one for each text, on the CPU."""

    def project(self, tile_embeddings: Tensor) -> Tensor:
        """Turns stored tile embeddings into unit vectors float32 (N, D), to compare with texts."""
        return F.normalize(tile_embeddings.float(), dim=-1)


# text encoders of other packages, by the name of their tile encoder
TEXT_ENCODERS: Registry[Callable[..., TextEncoder]] = Registry(
    "text encoder", "thinsection.text_encoders", tuple
)


def load_text_encoder(
    name: str,
    *,
    weights: str | Path | None = None,
    tokenizer: str | Path | None = None,
    device: str | torch.device = "auto",
) -> TextEncoder:
    """Loads the text encoder of a two-tower model from the weights of its tile encoder.

    Args:
        name: name of the tile encoder, as for `load_encoder`.
        weights: weights in place of the published ones: a file, a folder or `owner/name@COMMIT`.
        tokenizer: tokenizer.json; None takes the one beside the weights.
        device: auto, cpu, cuda, cuda:N or mps.

    Memory: the weights of both towers while they are loaded, then those of the text tower.

    Raises InvalidInputError: the encoder has no text tower; WeightsError: weights or tokenizer
    are missing or do not fit.
    """
    if name in TEXT_ENCODERS:
        return TEXT_ENCODERS.load(name)(
            weights=weights, tokenizer=tokenizer, device=resolve_device(device)
        )
    spec = find_spec(name)
    if not spec.has_text_tower:
        with_text = [n for n, s in declared_encoders().items() if s.has_text_tower]
        raise InvalidInputError(
            f"encoder must have a text tower, got {name!r}; these have: "
            f"{', '.join([*with_text, *TEXT_ENCODERS.names()])}, and each folder or hub "
            "repository with a CLIP model of open_clip or transformers"
        )
    source = Path(name) if weights is None and Path(name).exists() else weights
    file = find_weights_file(spec, name, source)
    image_hash = hash_of_weights(spec, file)
    options = spec.architecture.options
    tower: towers.TextTower
    match spec.architecture.kind:
        case "clip":
            tower = towers.ClipText(towers.clip_config(options))
        case "conch":
            tower = towers.ConchText(towers.ConchTowersConfig(**options))
        case _:
            tower = towers.KeepText()
    state = towers.in_open_clip_names(read_state_dict(file.path))
    fill_strictly(tower, state, source=str(file.path), unused=towers.IMAGE_NAMES)
    tokens = _read_tokenizer(spec, file.path, tokenizer)
    return TowerTextEncoder(spec.name, tower, tokens, image_hash, device=device)


def _read_tokenizer(
    spec: EncoderSpec, weights: Path, tokenizer: str | Path | None
) -> Tokenizer:
    """Tokenizer from the given file, the folder of the weights, or their commit on the hub."""
    path = weights.parent / TOKENIZER_NAME if tokenizer is None else Path(tokenizer)
    commit = commit_of(weights)
    is_elsewhere = spec.name in _WHERE
    if not (tokenizer or path.is_file() or is_elsewhere) and spec.repo and commit:
        path = hub.hub_file(spec.repo, (TOKENIZER_NAME,), revision=commit)
    if not path.is_file():
        raise WeightsError(
            f"tokenizer must be an existing file, got {str(path)!r}; pass the tokenizer.json of "
            f"{spec.name!r}{_WHERE.get(spec.name, '')} by tokenizer=..."
        )
    return Tokenizer(path)


_WHERE = {
    "conch": ", conch_byte_level_bpe_uncased.json in the GitHub repository of CONCH"
}


class Tokenizer:
    """Texts to token ids, by a tokenizer.json: data that runs no code."""

    def __init__(self, path: Path) -> None:
        tokenizers = optional_package("tokenizers")
        self.path = path
        with rewording(
            "tokenizer must be a tokenizer.json", path, Exception, error=WeightsError
        ):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        if not self._tokenizer.encode("").ids:
            raise WeightsError(
                "tokenizer must put start and end tokens around a text, got none in "
                f"{str(path)!r}; add its post_processor"
            )

    def __call__(self, texts: Sequence[str], context: int, pad_id: int) -> Tensor:
        """Ids int64 (P, L), padded at the end. Raises InvalidInputError: a text is too long."""
        rows: list[list[int]] = [
            encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))
        ]
        for text, row in zip(texts, rows, strict=True):
            if len(row) > context:
                raise InvalidInputError(
                    f"prompt must have at most {context} tokens, got {len(row)} in {text!r}; "
                    "shorten it"
                )
        longest = max(map(len, rows))
        padded = [row + [pad_id] * (longest - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.int64)


class TowerTextEncoder(TextEncoder):
    """A `TextTower` with its tokenizer, on one device, in float32."""

    def __init__(
        self,
        name: str,
        tower: towers.TextTower,
        tokenizer: Tokenizer,
        image_hash: str,
        *,
        device: str | torch.device = "cpu",
    ) -> None:
        self.name = name
        self.image_hash = image_hash
        self.device = resolve_device(device)
        self._tower = tower.eval().requires_grad_(False).to(self.device)
        self._tokenizer = tokenizer
        self.scale = float(tower.logit_scale.exp())

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Unit vectors float32 (P, D). Memory: the activations of 32 texts, and 4 P D bytes."""
        tower = self._tower
        tokens = self._tokenizer(texts, tower.context, tower.pad_id)
        self._check(tokens)
        parts = []
        with torch.no_grad():
            for start in range(0, len(tokens), _BATCH):
                vectors = tower(tokens[start : start + _BATCH].to(self.device))
                parts.append(F.normalize(vectors.float(), dim=-1).cpu())
        return torch.cat(parts)

    def project(self, tile_embeddings: Tensor) -> Tensor:
        """Turns stored tile embeddings into unit vectors float32 (N, D), on the CPU."""
        with torch.no_grad():
            projected = self._tower.project(tile_embeddings.float().to(self.device))
            return F.normalize(projected, dim=-1).cpu()

    def _check(self, tokens: Tensor) -> None:
        """Raises WeightsError: the tokenizer belongs to another model."""
        table = next(
            layer
            for layer in self._tower.modules()
            if isinstance(layer, torch.nn.Embedding)
        )
        if int(tokens.max()) >= table.num_embeddings:
            raise WeightsError(
                f"tokenizer must have at most {table.num_embeddings} tokens, got the id "
                f"{int(tokens.max())} in {str(self._tokenizer.path)!r}; pass that of "
                f"{self.name!r}"
            )

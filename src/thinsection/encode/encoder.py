"""`NetworkTileEncoder`: tile encoders that are networks of PyTorch.

Shapes: B tiles, [B, H, W, 3] uint8 in; embeddings [B, D] and tokens [B, T, C] float32 out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinsection.encode.backbone import Backbone, cast_matmul_weights, unfilled_backbone
from thinsection.encode.base import TileEncoder
from thinsection.encode.engine import (
    Network,
    SelfCheck,
    compared,
    converted_network,
    stored_network,
)
from thinsection.encode.engine_choice import engine_version
from thinsection.encode.preprocessing import (
    TilePixels,
    as_uint8_batch,
    colours_of,
    input_tiles,
    preprocess,
)
from thinsection.encode.registry import EncoderSpec
from thinsection.encode.sizes import CPU_TILES
from thinsection.errors import (
    InvalidInputError,
    MissingDependencyError,
    WeightsError,
)
from thinsection.weights.files import hash_state_dict
from thinsection.weights.origin import Origin
from thinsection.weights.placement import (
    DTYPES,
    NEED_TORCHVISION,
    Placement,
    optional_package,
)

if TYPE_CHECKING:
    # most encoders are not compiled
    from thinsection.encode.compiled import (
        Compilation,
        CompiledCheck,
        CompiledNetwork,
    )

_RATE_PASSES = 3  # passes for the rate of a batch size, after one to warm up


class NetworkTileEncoder(TileEncoder):
    """`Backbone` with its preprocessing, on one device, in one precision.

    A copy or a pickle has the weights, once more in memory. An encoder on OpenVINO, which has
    released them, is copied by their hash: whoever receives it loads the stored graph of these
    weights, or else the encoder by its name again, and refuses other weights. A copy of a compiled
    one loads the compiled network from the cache; where there is none, PyTorch computes.
    """

    device: torch.device
    # loads the same encoder again; `load_encoder` sets it
    reload: Callable[[], TileEncoder] | None = None
    _graphs: Path | None = None  # folder of the stored graphs; None: the user's cache
    _compiled: CompiledNetwork | None = None
    # tiles of the batches for which it was compiled; 0: it was not
    _compiled_batch: int = 0

    def __init__(
        self,
        spec: EncoderSpec,
        backbone: Backbone | None,
        placement: Placement,
        origin: Origin,
        weights_hash: str | None = None,
    ) -> None:
        """Places the network; None needs `to_openvino` to load the stored graph of `weights_hash`.

        `weights_hash` is computed from the weights where it is not known already.
        """
        self.spec = spec
        self.origin = origin
        self.device = placement.device
        self.precision = placement.precision
        self._network: Network | None = None
        if weights_hash is not None:
            self.weights_hash = weights_hash
        if backbone is None:
            return
        self.backbone = backbone.eval().requires_grad_(False)
        # convolutions are up to twice as fast with channels last; linear layers are not affected
        self.backbone.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.device.type == "cuda" and self.precision != "fp32":
            # computed before the weights are rounded
            _ = self.weights_hash
            cast_matmul_weights(self.backbone, DTYPES[self.precision])
        self._network = self.backbone

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        """Copies and pickles the weights, or the hash of the weights of a stored graph."""
        if self._network is None or isinstance(self._network, Backbone):
            modules = self.backbone.modules()
            packages = {type(each).__module__.partition(".")[0] for each in modules}
            needed = sorted(packages.intersection(NEED_TORCHVISION))
            state = vars(self) | {"_compiled": None}
            return _empty_encoder, (type(self), needed), state
        placement = Placement(self.device, self.precision)  # type: ignore[arg-type]
        arguments = (self.spec, placement, self.origin, self.weights_hash)
        recorded = {"fingerprint": self.fingerprint}
        return _load_graph_again, (*arguments, self._graphs, self.reload), recorded

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes the values of the original; a compiled network is loaded from the cache."""
        vars(self).update(state)
        if not self._compiled_batch:
            return
        try:
            if self._load_compiled(self._compilation(self._compiled_batch)):
                return
            reason = "it is not stored on this machine"
        except InvalidInputError as error:
            reason = str(error)
        self._compiled_batch = 0
        self.engine = f"{engine_version('torch')} (not compiled: {reason})"

    @cached_property
    def backbone(self) -> Backbone:
        """The network; beside a stored graph it is built without weights, only to count memory."""
        backbone = unfilled_backbone(self.spec).to("meta")
        return backbone.eval().requires_grad_(False)

    @cached_property
    def weights_hash(self) -> str:
        return hash_state_dict(self.backbone.network.state_dict())

    def to_fp8(self) -> SelfCheck:
        """Compute the linear layers of the blocks in FP8 from now on; the weights are rounded.

        The encoder computes in fp32 before. Returns the distance of its embeddings of seeded tiles
        from those in fp32; the caller decides.

        Memory: the weights in fp32 until all are rounded, and one layer more.
        Raises InvalidInputError: the network has no such layers, or they do not compute here.
        """
        from thinsection.encode.fp8 import quantise_blocks

        tiles = seeded_tiles(self.spec.tile_px)
        # computed before the weights are rounded
        _ = self.weights_hash
        exact = self.encode(tiles)
        rounded_layers, num_layers = quantise_blocks(self.backbone)
        name = self.spec.name
        rule = f"precision must be auto, fp32, fp16 or bf16 for {name!r}"
        if not rounded_layers:
            raise InvalidInputError(
                f"{rule}, whose network has no linear layers in equal blocks, got 'fp8'"
            )
        self.precision = "fp8"
        cast_matmul_weights(self.backbone, DTYPES[self.precision])
        try:
            rounded = self.encode(tiles)
        except (RuntimeError, AttributeError) as error:
            reason = str(error).splitlines()[0]
            raise InvalidInputError(f"{rule}, got 'fp8': {reason}") from error
        check = compared(rounded, exact)
        self.engine += (
            f" (fp8 in {rounded_layers} of {num_layers} linear layers, "
            f"cosine {1 - check.angle:.6f} to fp32)"
        )
        return check

    def to_openvino(self, cache_dir: Path | None = None) -> SelfCheck:
        """Compute by OpenVINO from now on; PyTorch's weights are released.

        Returns the distance of its embeddings of seeded tiles from PyTorch's; the caller decides.

        Raises InvalidInputError: OpenVINO does not support this precision, or cannot convert this
        network; the weights are absent, and its cache has no graph that was checked on this CPU.
        """
        shape = (CPU_TILES, 3, self.spec.input_px, self.spec.input_px)
        if not isinstance(self._network, Backbone):
            network, check = stored_network(
                shape,
                self.precision,
                weights_hash=self.weights_hash,
                cache_dir=cache_dir,
            )
        else:
            network, check = converted_network(
                self.backbone,
                partial(preprocess, seeded_tiles(self.spec.tile_px), self.spec),
                shape,
                self.precision,
                weights_hash=self.weights_hash,
                cache_dir=cache_dir,
            )
        self._network = network
        self._graphs = cache_dir
        self.engine = network.engine
        return check

    def to_compiled(
        self,
        *,
        batch_size: int,
        load_exact: Callable[[], NetworkTileEncoder],
        cache_dir: Path | None = None,
    ) -> CompiledCheck:
        """Compute by a compiled network from now on, if it gives PyTorch's embeddings.

        Args:
            batch_size: tiles of a batch of the caller.
            load_exact: loads the same encoder in fp32, by PyTorch; called only to compare.
            cache_dir: folder in place of the user's cache.

        Returns the comparison; where it does not pass, PyTorch goes on.

        Raises:
            InvalidInputError: the network does not compile, or others may write the cache.
            StoreError: the disk is full.
        """
        self._graphs = cache_dir
        compilation = self._compilation(batch_size)
        if compilation.stored_check() is None:
            tiles = seeded_tiles(self.spec.tile_px).to(self.device)

            def by_torch(encoder: NetworkTileEncoder) -> Tensor:
                return encoder.encode(tiles)

            compilation.build(
                partial(self._rows_of_a_pass, batch_size),
                input_tiles(tiles, self.spec),
                in_torch=partial(by_torch, self),
                in_fp32=lambda: by_torch(
                    self if self.precision == "fp32" else load_exact()
                ),
            )
        check = self._load_compiled(compilation)
        assert check is not None, "it was built above"
        return check

    def has_compiled(self, batch_size: int) -> bool:
        """True if the network was compiled before for batches of this size on this device.

        Raises InvalidInputError: others may write the folder of compiled networks.
        """
        return self._compilation(batch_size).stored_check() is not None

    def tiles_per_s(self, num_tiles: int) -> float:
        """Rate of PyTorch for so many tiles at a time; 0 if they do not fit the device."""
        edge = self.spec.input_px
        try:
            tiles = torch.zeros(
                (num_tiles, edge, edge, 3), dtype=torch.uint8, device=self.device
            )
            self._by_torch(tiles)
            self._synchronise()
            start = time.perf_counter()
            for _ in range(_RATE_PASSES):
                self._by_torch(tiles)
            self._synchronise()
        except torch.OutOfMemoryError:
            return 0.0
        return _RATE_PASSES * num_tiles / (time.perf_counter() - start)

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _by_torch(self, tiles: Tensor) -> None:
        """One pass of PyTorch's network over tiles of the input size."""
        with torch.no_grad(), arithmetic(self.device, self.precision):
            self.backbone(preprocess(tiles, replace(self.spec, resize_px=None)))

    def _rows_of_a_pass(self, batch_size: int) -> int:
        """Rows of a compiled pass: as PyTorch's on a CPU, else measured."""
        from thinsection.encode.compiled import rows_within

        if self.device.type == "cpu":
            return self.tiles_at_once(batch_size)
        return rows_within(batch_size, self.tiles_per_s)

    def _compilation(self, batch_size: int) -> Compilation:
        # imports the compiler's side of torch only where it is used
        from thinsection.encode.compiled import Compilation

        return Compilation(
            backbone=self.backbone,
            spec=self.spec,
            placement=Placement(self.device, self.precision),  # type: ignore[arg-type]
            weights_hash=self.weights_hash,
            batch_size=batch_size,
            cache_dir=self._graphs,
        )

    def _load_compiled(self, compilation: Compilation) -> CompiledCheck | None:
        """Uses the stored network if it agrees with PyTorch; None if there is none."""
        check = compilation.stored_check()
        if check is not None and check.passes(self.precision):
            self._compiled = compilation.load(check.rows)
            self._compiled_batch = compilation.batch_size
            self.engine = f"{self._compiled.engine} ({check})"
        return check

    def encode(self, tiles_u8: TilePixels) -> Tensor:
        """float32 [B, D] embeddings on `device`; InvalidInputError for tiles of a wrong shape.

        Memory: see `batch_bytes`. On a CPU the network receives `CPU_TILES` at a time, so that a
            larger batch costs only its tiles and embeddings.
        """
        (embeddings,) = self._answers(tiles_u8, with_tokens=False)
        return embeddings

    def encode_with_tokens(self, tiles_u8: TilePixels) -> tuple[Tensor, Tensor]:
        """Embeddings [B, D] and patch tokens [B, T, C], float32, from one pass.

        Memory: as `encode`, and 4 B T C bytes; see `batch_bytes(..., tokens=True)`.
        """
        if not self.spec.supports_tokens:
            return super().encode_with_tokens(tiles_u8)
        embeddings, tokens = self._answers(tiles_u8, with_tokens=True)
        return embeddings, tokens

    def encode_as(
        self, tiles_u8: TilePixels, spec: EncoderSpec
    ) -> tuple[Tensor, Tensor]:
        """Embeddings and tokens under the preprocessing of another spec with the same input size.

        Memory: as `encode_with_tokens`.
        """
        embeddings, tokens = self._answers(tiles_u8, with_tokens=True, spec=spec)
        return embeddings, tokens

    def tiles_at_once(self, batch_size: int) -> int:
        """Number of tiles of a batch that the network receives at a time on this device."""
        if self._compiled is not None:
            return min(batch_size, self._compiled.rows)
        return min(batch_size, CPU_TILES) if self.device.type == "cpu" else batch_size

    def _answers(
        self,
        tiles_u8: TilePixels,
        *,
        with_tokens: bool,
        spec: EncoderSpec | None = None,
    ) -> list[Tensor]:
        """Embeddings and, if requested, tokens of a batch, float32, computed part by part."""
        assert self._network is not None, "its graph is loaded by to_openvino"
        spec = spec or self.spec
        colours = colours_of(spec.mean, spec.std, self.device)
        batch = as_uint8_batch(tiles_u8)
        step = max(1, self.tiles_at_once(len(batch)))
        num_answers = 2 if with_tokens else 1
        wholes: list[Tensor] = []
        pixels = None
        with torch.no_grad(), arithmetic(self.device, self.precision):
            for start in range(0, max(len(batch), 1), step):
                tiles = batch[start : start + step].to(self.device, non_blocking=True)
                answers: Sequence[Tensor]
                if self._compiled is not None:
                    answers = self._compiled(
                        input_tiles(tiles, spec), colours, with_tokens=with_tokens
                    )
                else:
                    pixels = preprocess(tiles, spec, out=pixels)
                    answers = self._network(pixels)[:num_answers]
                parts = [answer.float() for answer in answers]
                if len(batch) <= step:
                    return parts
                if not wholes:
                    wholes = [x.new_empty((len(batch), *x.shape[1:])) for x in parts]
                for whole, part in zip(wholes, parts, strict=True):
                    whole[start : start + step] = part
        return wholes


def _empty_encoder(
    kind: type[NetworkTileEncoder], packages: Sequence[str]
) -> NetworkTileEncoder:
    """Makes an encoder without values, and imports the packages of its network before they come."""
    for package in packages:
        optional_package(package)
    return kind.__new__(kind)


def _load_graph_again(  # noqa: PLR0917 - what a pickle holds
    spec: EncoderSpec,
    placement: Placement,
    origin: Origin,
    weights_hash: str,
    cache_dir: Path | None,
    reload: Callable[[], TileEncoder] | None,
) -> TileEncoder:
    """Loads an encoder on OpenVINO that was copied or pickled.

    Raises:
        WeightsError: there is no graph of its weights here, and they cannot be loaded again.
    """
    encoder = NetworkTileEncoder(spec, None, placement, origin, weights_hash)
    encoder.reload = reload
    try:
        encoder.to_openvino(cache_dir)
    except (InvalidInputError, MissingDependencyError) as error:
        loaded = None if reload is None else reload()
        if loaded is None or loaded.weights_hash != weights_hash:
            raise WeightsError(
                f"encoder {spec.name!r} must be loaded with weights {weights_hash[:12]}, got "
                f"{'others' if loaded else 'no graph of them'} on this machine; load it here by "
                "load_encoder"
            ) from error
        return loaded
    return encoder


@contextmanager
def arithmetic(device: torch.device, precision: str) -> Iterator[None]:
    """Autocast to the precision; on CUDA also one cuDNN algorithm, and no TF32 in fp32."""
    is_half = precision != "fp32"
    autocast = (
        torch.autocast(device.type, DTYPES[precision]) if is_half else nullcontext()
    )
    if device.type != "cuda":
        with autocast:
            yield
        return
    with (
        autocast,
        torch.backends.cudnn.flags(
            enabled=True, deterministic=True, allow_tf32=is_half
        ),
    ):
        yield


def seeded_tiles(edge: int) -> Tensor:
    """uint8 [CPU_TILES, edge, edge, 3]: patches of 16 pixels in random colours, with fine noise."""
    generator = torch.Generator().manual_seed(0)
    patches = -(-edge // 16)
    shape = (CPU_TILES, patches, patches, 3)
    colours = torch.randint(0, 225, shape, generator=generator)
    tiles = colours.repeat_interleave(16, 1).repeat_interleave(16, 2)
    tiles = tiles[:, :edge, :edge]
    noise = torch.randint(0, 31, tiles.shape, generator=generator)
    return (tiles + noise).to(torch.uint8)

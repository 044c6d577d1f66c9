"""MOOZY's slide encoder and case transformer: a vision transformer with 2-D ALiBi over tiles.

Shapes: N tiles, T tokens (cls, registers, then tiles), C channels of a state, H heads of D
channels, S slides of a case.

Source: "MOOZY: a patient-first foundation model for computational pathology", 2026,
arXiv:2603.27048. Names of parameters are those of the authors' file.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinsection.attention import alibi2d_attention
from thinsection.attention.blocks import blocks_of
from thinsection.errors import ConfigError, InvalidInputError, WeightsError
from thinsection.pool.encoder import (
    Expects,
    LoadOptions,
    SlideEmbedding,
    TileEmbeddings,
    TileLayout,
)
from thinsection.pool.published import (
    ATTENTION_BYTES,
    TOKEN_BLOCK,
    PublishedSlideEncoder,
    check_heads,
    plan_heads,
    stated_int,
)
from thinsection.types import CoordsL0, Document, Size
from thinsection.weights.files import read_settings

# the authors' tolerance: distance of a tile from the grid, in tile edges
OFF_GRID = 0.25
SLIDE_NAMES = (
    "teacher_slide_encoder."  # begins the names of the slide encoder's weights
)
CASE_NAMES = "case_transformer."

# tables of a MOOZY checkpoint that state the sizes of the two networks
_TABLES = ("slide_encoder_config", "case_transformer_config")
# sizes in these tables that the shapes of the weights show too
_STATED = {
    f"{_TABLES[0]}.feat_dim": "tile_dim",
    f"{_TABLES[0]}.d_model": "dim",
    f"{_TABLES[0]}.n_layers": "num_layers",
    f"{_TABLES[0]}.n_heads": "num_heads",
    f"{_TABLES[0]}.dim_feedforward": "mlp_dim",
    f"{_TABLES[0]}.num_registers": "num_registers",
    f"{_TABLES[0]}.qk_norm": "normed_heads",
    f"{_TABLES[0]}.layerscale_enabled": "scaled",
    f"{_TABLES[1]}.num_layers": "case_layers",
    f"{_TABLES[1]}.dim_feedforward": "case_mlp_dim",
    f"{_TABLES[1]}.num_registers": "case_registers",
    f"{_TABLES[1]}.qk_norm": "case_normed_heads",
    f"{_TABLES[1]}.layerscale_init": "case_scaled",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoozySizes:
    """Sizes of the networks; the defaults are those that the authors have published."""

    tile_dim: int = 384
    dim: int = 768
    num_layers: int = 6
    num_heads: int = 12
    mlp_dim: int = 3072
    num_registers: int = 4
    normed_heads: bool = False  # True if q and k of each head have a layer norm
    # True if a layer's output is multiplied by a factor per channel
    scaled: bool = False
    case_layers: int = 3
    case_heads: int = 12
    case_mlp_dim: int = 3072
    case_registers: int = 0
    case_normed_heads: bool = False
    case_scaled: bool = True


class ChannelFactors(nn.Module):
    """A factor for each channel."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


# computes the attention of q, k and v (h, T, D) for these heads, and writes it over q
Attend = Callable[[Tensor, Tensor, Tensor, slice], None]


class MoozyBlock(nn.Module):
    """x += attention(norm1(x)); x += mlp(norm2(x)); both networks consist of these blocks."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_dim: int,
        *,
        normed_heads: bool,
        scaled: bool,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)
        self.q_norm = nn.LayerNorm(self.head_dim) if normed_heads else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if normed_heads else nn.Identity()
        self.fc1 = nn.Linear(dim, mlp_dim)
        self.fc2 = nn.Linear(mlp_dim, dim)
        self.ls_attn = ChannelFactors(dim) if scaled else nn.Identity()
        self.ls_mlp = ChannelFactors(dim) if scaled else nn.Identity()

    def forward_(self, x: Tensor, attend: Attend, heads_at_a_time: int) -> None:
        """Write the states (T, C) after this block over `x`; for inference."""
        attended = self._attended(x, attend, heads_at_a_time)
        for rows in blocks_of(len(x), TOKEN_BLOCK):
            x[rows] += self.ls_attn(self.out_proj(attended[rows].flatten(1)))
            hidden = F.gelu(self.fc1(self.norm2(x[rows])))
            x[rows] += self.ls_mlp(self.fc2(hidden))

    def _attended(self, x: Tensor, attend: Attend, at_a_time: int) -> Tensor:
        """Attention output (T, H, D) before the projection."""
        qkv = x.new_empty(3, len(x), at_a_time, self.head_dim)
        output = None
        if at_a_time < self.num_heads:
            output = x.new_empty(len(x), self.num_heads, self.head_dim)
        for first in range(0, self.num_heads, at_a_time):
            heads = slice(first, first + at_a_time)
            self._project(x, heads, qkv)
            q, k, v = qkv.transpose(1, 2)
            attend(q, k, v, heads)
            if output is not None:
                output[:, heads] = qkv[0]
        return qkv[0] if output is None else output

    def _project(self, x: Tensor, heads: slice, qkv: Tensor) -> None:
        """Write q, k and v of these heads to `qkv` (3, T, h, D)."""
        layers = (self.q_proj, self.k_proj, self.v_proj)
        norms = (self.q_norm, self.k_norm, nn.Identity())
        channels = slice(heads.start * self.head_dim, heads.stop * self.head_dim)
        for rows in blocks_of(len(x), TOKEN_BLOCK):
            normed = self.norm1(x[rows])
            for index, (layer, norm) in enumerate(zip(layers, norms, strict=True)):
                projected = F.linear(
                    normed, layer.weight[channels], layer.bias[channels]
                )
                qkv[index, rows] = norm(
                    projected.view(len(projected), -1, self.head_dim)
                )


def attend_without_places(q: Tensor, k: Tensor, v: Tensor, _: slice) -> None:
    """Attention of tokens without positions."""
    q.copy_(F.scaled_dot_product_attention(q[None], k[None], v[None])[0])


class MoozySlideNet(nn.Module):
    """The slide encoder; the authors train it as the teacher network."""

    def __init__(self, sizes: MoozySizes) -> None:
        super().__init__()
        self.input_proj = nn.Sequential(nn.Linear(sizes.tile_dim, sizes.dim), nn.GELU())
        self.cls_token = nn.Parameter(torch.zeros(1, 1, sizes.dim))
        if sizes.num_registers:
            self.register_tokens = nn.Parameter(
                torch.zeros(1, sizes.num_registers, sizes.dim)
            )
        self.pos_bias = nn.Module()
        self.pos_bias.register_buffer("slopes", torch.zeros(sizes.num_heads, 1))
        self.blocks = nn.ModuleList(
            MoozyBlock(
                sizes.dim,
                sizes.num_heads,
                sizes.mlp_dim,
                normed_heads=sizes.normed_heads,
                scaled=sizes.scaled,
            )
            for _ in range(sizes.num_layers)
        )
        self.norm = nn.LayerNorm(sizes.dim)
        self.num_registers = sizes.num_registers

    def cls_(
        self, tiles: Tensor, rows: Tensor, cells: Tensor, *, heads_at_a_time: int
    ) -> Tensor:
        """Class token (C,) of the tiles (N, D) at these rows; `cells` (n, 2) on the grid."""
        num_prefix = 1 + self.num_registers
        x = self.cls_token.new_empty(num_prefix + len(rows), self.cls_token.shape[-1])
        x[:1] = self.cls_token[0]
        if self.num_registers:
            x[1:num_prefix] = self.register_tokens[0]
        for block in blocks_of(len(rows), TOKEN_BLOCK):
            picked = tiles.index_select(0, rows[block].to(tiles.device))
            embedded = self.input_proj(picked.to(x.device, x.dtype))
            x[num_prefix + block.start : num_prefix + block.stop] = embedded
        slopes = -cast(Tensor, self.pos_bias.slopes)[:, 0]

        def attend(q: Tensor, k: Tensor, v: Tensor, heads: slice) -> None:
            alibi2d_attention(
                q[None],
                k[None],
                v[None],
                cells,
                slopes[heads],
                num_prefix_tokens=num_prefix,
                budget_bytes=ATTENTION_BYTES,
                out=q[None],
            )

        for layer in self.blocks:
            cast(MoozyBlock, layer).forward_(x, attend, heads_at_a_time)
        return cast(Tensor, self.norm(x[0]))


class MoozyCaseNet(nn.Module):
    """The case transformer: computes one state of a case from the class tokens of its slides."""

    def __init__(self, sizes: MoozySizes) -> None:
        super().__init__()
        self.case_token = nn.Parameter(torch.zeros(1, 1, sizes.dim))
        if sizes.case_registers:
            self.register_tokens = nn.Parameter(
                torch.zeros(1, sizes.case_registers, sizes.dim)
            )
        self.blocks = nn.ModuleList(
            MoozyBlock(
                sizes.dim,
                sizes.case_heads,
                sizes.case_mlp_dim,
                normed_heads=sizes.case_normed_heads,
                scaled=sizes.case_scaled,
            )
            for _ in range(sizes.case_layers)
        )
        self.norm = nn.LayerNorm(sizes.dim)
        self.num_heads = sizes.case_heads
        self.num_registers = sizes.case_registers

    def forward(self, slides: Tensor) -> Tensor:
        """State (C,) of a case of slides (S, C)."""
        tokens = [self.case_token[0]]
        if self.num_registers:
            tokens.append(self.register_tokens[0])
        x = torch.cat([*tokens, slides])
        for block in self.blocks:
            attend = attend_without_places
            cast(MoozyBlock, block).forward_(x, attend, self.num_heads)
        return cast(Tensor, self.norm(x[0]))


class MoozyNet(nn.Module):
    """Both networks, with the names of the tables in the authors' file."""

    def __init__(self, sizes: MoozySizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.teacher_slide_encoder = MoozySlideNet(sizes)
        self.case_transformer = MoozyCaseNet(sizes)


class MoozySlideEncoder(PublishedSlideEncoder[MoozySizes]):
    """MOOZY's slide embeddings (768,), from tile embeddings of Lunit's ViT-S/8.

    'moozy' is the class token of the slide encoder. 'moozy:case' is the state of the case
    transformer, as written by `moozy encode`: of this one slide, or in `patient_embedding` of all
    slides.

    Memory: 7 to 12 KiB per tile, depending on the budget; BudgetError if there are too many tiles.
    """

    name = "moozy"
    expects = Expects(
        tile_encoders=("lunit_vits8", "lunit_vit_small_patch8_dino"),
        tile_dim=384,
        tile_px=224,
        tile_mpp=0.5,
    )
    has_outputs = True
    repository = "AtlasAnalyticsLab/MOOZY"
    revision = None
    files = ("moozy.safetensors", "moozy.pt")
    tables = ("teacher_slide_encoder", "case_transformer")
    unused: ClassVar[tuple[str, ...]] = (f"{SLIDE_NAMES}mask_token",)
    network = MoozyNet
    published_sizes = MoozySizes()

    net: MoozyNet

    def __init__(self, net: MoozyNet, *, options: LoadOptions) -> None:
        super().__init__(net, options=options)
        if options.output not in ("", "slide", "case"):
            raise ConfigError(
                "output of slide encoder 'moozy' must be slide or case, got "
                f"{options.output!r}"
            )
        self._of_case = options.output == "case"
        if self._of_case:
            self.name = "moozy:case"
            self.fuses_embeddings = False
        self.dim = net.sizes.dim
        slopes = cast(Tensor, net.teacher_slide_encoder.pos_bias.slopes)
        if bool((slopes > 0).any()):
            raise WeightsError(
                "slopes of slide encoder 'moozy' must be <= 0, so that near tiles count for "
                "more, got a larger one"
            )

    @classmethod
    def sizes_of(cls, state_dict: Mapping[str, Tensor]) -> MoozySizes | None:
        """Sizes according to names and shapes, which do not show the number of heads of the case.

        Raises WeightsError: a size is not the published one, so the case may have other heads.
        """
        shown = _shown_sizes(state_dict)
        if shown is None or shown == MoozySizes() or shown.case_normed_heads:
            return shown
        raise WeightsError(
            f"weights of slide encoder 'moozy' must contain {' and '.join(_TABLES)}, got neither; "
            "these weights do not have the published sizes, and their shapes do not show the "
            "number of heads of the case transformer; pass the .pt that MOOZY wrote"
        )

    @classmethod
    def stated_sizes(
        cls, path: Path, state_dict: Mapping[str, Tensor]
    ) -> MoozySizes | None:
        """Sizes of the two tables of MOOZY's own checkpoint; see `PublishedSlideEncoder`."""
        settings = read_settings(path, _TABLES)
        shown = _shown_sizes(state_dict)
        if not settings or shown is None:
            return None
        missing = [name for name in _TABLES if name not in settings]
        if missing:
            raise WeightsError(
                f"weights of slide encoder 'moozy' must have both {' and '.join(_TABLES)}, got "
                f"no {missing[0]} in {str(path)!r}; pass the .pt as MOOZY wrote it"
            )
        slide, case = (settings[name] for name in _TABLES)
        # older exports do not state this size; the authors' loader also looks at the weights
        slide.setdefault("layerscale_enabled", shown.scaled)
        stated = _sizes_of_tables(slide, case)
        names = dict(_STATED)
        if stated.case_normed_heads:
            names["case_transformer_config.num_heads"] = "case_heads"
        for name, size in names.items():
            stated_size = getattr(stated, size)
            shown_size = getattr(shown, size)
            if stated_size != shown_size:
                raise WeightsError(
                    f"{name} must agree with the weights, got {stated_size} where their names and "
                    f"shapes show {shown_size} in {str(path)!r}; check that the file is as its "
                    "authors wrote it"
                )
        return stated

    @classmethod
    def first_name(cls, name: str, config: MoozySizes | None) -> str:
        """Name of the slopes in the first block; the authors' file repeats them in every block."""
        return re.sub(r"\.blocks\.\d+\.pos_bias\.slopes$", ".pos_bias.slopes", name)

    @classmethod
    def random_weights(
        cls, config: MoozySizes | None = None, *, seed: int
    ) -> dict[str, Tensor]:
        """Random weights as for all encoders, but with slopes from -1/2 down to -1/256."""
        weights = super().random_weights(config, seed=seed)
        name = f"{SLIDE_NAMES}pos_bias.slopes"
        exponents = torch.linspace(-1, -8, len(weights[name]))
        weights[name] = -(2**exponents)[:, None]
        return weights

    def encode_tiles(
        self,
        tile_embeddings: TileEmbeddings,
        coords_l0: CoordsL0,
        layout: TileLayout,
    ) -> SlideEmbedding:
        """Slide embedding (768,) float32 from embeddings (N, 384).

        Raises InvalidInputError: the tiles do not lie on one grid without overlap.
        """
        state = self.case_state(tile_embeddings, coords_l0, layout)
        return self.fuse(state[None])

    @torch.inference_mode()
    def fuse(self, states: npt.NDArray[np.float32]) -> SlideEmbedding:
        """Embedding (768,) of a case from the class tokens (S, C) of its slides.

        For 'moozy' their mean; for 'moozy:case' the state of the case transformer.
        """
        if not self._of_case:
            return super().fuse(states)
        tokens = torch.from_numpy(states).to(self._device)
        return cast(SlideEmbedding, self.net.case_transformer(tokens).cpu().numpy())

    def case_state(
        self,
        tile_embeddings: TileEmbeddings,
        coords_l0: CoordsL0,
        layout: TileLayout,
    ) -> npt.NDArray[np.float32]:
        """Class token (C,) of a slide."""
        return super().encode_tiles(tile_embeddings, coords_l0, layout)

    def embed(self, tiles: Tensor, coords_l0: CoordsL0, layout: TileLayout) -> Tensor:
        """Class token (C,) of a slide."""
        sizes = self.net.sizes
        rows, cells = tiles_on_grid(tiles, coords_l0, layout.size_l0)
        num_tokens = 1 + sizes.num_registers + len(rows)
        return self.net.teacher_slide_encoder.cls_(
            tiles,
            torch.from_numpy(rows),
            torch.from_numpy(cells).to(self._device),
            heads_at_a_time=heads_at_a_time(
                num_tokens, sizes, budget_bytes=self._budget_bytes
            ),
        )


def _shown_sizes(state_dict: Mapping[str, Tensor]) -> MoozySizes | None:
    """Sizes according to names and shapes; the number of case heads needs q and k norms there.

    Without these norms it is the published number. None if the weights are not MOOZY's.
    """
    first = f"{SLIDE_NAMES}blocks.0."
    case_first = f"{CASE_NAMES}blocks.0."
    projection = state_dict.get(f"{SLIDE_NAMES}input_proj.0.weight")
    slopes = state_dict.get(f"{SLIDE_NAMES}pos_bias.slopes")
    mlp = state_dict.get(f"{first}fc1.weight")
    case_mlp = state_dict.get(f"{case_first}fc1.weight")
    if projection is None or slopes is None or mlp is None or case_mlp is None:
        return None
    dim, tile_dim = projection.shape
    case_norm = state_dict.get(f"{case_first}q_norm.weight")
    case_heads = MoozySizes().case_heads
    if case_norm is not None:
        case_heads = dim // len(case_norm)
    return MoozySizes(
        tile_dim=tile_dim,
        dim=dim,
        num_layers=_num_blocks(state_dict, SLIDE_NAMES),
        num_heads=len(slopes),
        mlp_dim=len(mlp),
        num_registers=_num_registers(state_dict, SLIDE_NAMES),
        normed_heads=f"{first}q_norm.weight" in state_dict,
        scaled=f"{first}ls_attn.gamma" in state_dict,
        case_layers=_num_blocks(state_dict, CASE_NAMES),
        case_heads=case_heads,
        case_mlp_dim=len(case_mlp),
        case_registers=_num_registers(state_dict, CASE_NAMES),
        case_normed_heads=case_norm is not None,
        case_scaled=f"{case_first}ls_attn.gamma" in state_dict,
    )


def _sizes_of_tables(slide: Document, case: Document) -> MoozySizes:
    """Sizes in the two tables of a MOOZY checkpoint."""

    def of_slide(name: str, default: int | None = None) -> int:
        return stated_int(slide, name, _TABLES[0], default=default)

    def of_case(name: str, default: int | None = None) -> int:
        return stated_int(case, name, _TABLES[1], default=default)

    dim = of_slide("d_model")
    case_dim = of_case("d_model", dim)
    if case_dim != dim:
        raise WeightsError(
            f"{_TABLES[1]}.d_model must be that of {_TABLES[0]}, {dim}, got {case_dim}"
        )
    num_heads = of_slide("n_heads")
    case_heads = of_case("num_heads")
    check_heads(dim, num_heads, f"{_TABLES[0]}.n_heads")
    check_heads(dim, case_heads, f"{_TABLES[1]}.num_heads")
    return MoozySizes(
        tile_dim=of_slide("feat_dim"),
        dim=dim,
        num_layers=of_slide("n_layers"),
        num_heads=num_heads,
        mlp_dim=of_slide("dim_feedforward"),
        num_registers=of_slide("num_registers", 0),
        normed_heads=bool(slide.get("qk_norm", False)),
        scaled=bool(slide["layerscale_enabled"]),
        case_layers=of_case("num_layers"),
        case_heads=case_heads,
        case_mlp_dim=of_case("dim_feedforward"),
        case_registers=of_case("num_registers", 0),
        case_normed_heads=bool(case.get("qk_norm", False)),
        case_scaled=float(case.get("layerscale_init", 0) or 0) > 0,
    )


def _num_blocks(state_dict: Mapping[str, Tensor], prefix: str) -> int:
    pattern = re.compile(rf"{re.escape(prefix)}blocks\.\d+\.fc1\.weight")
    return sum(pattern.fullmatch(name) is not None for name in state_dict)


def _num_registers(state_dict: Mapping[str, Tensor], prefix: str) -> int:
    registers = state_dict.get(f"{prefix}register_tokens")
    return 0 if registers is None else registers.shape[1]


def heads_at_a_time(num_tokens: int, sizes: MoozySizes, *, budget_bytes: int) -> int:
    """Largest number of heads at a time in the budget. Raises BudgetError: not one head fits."""
    state = 4 * num_tokens * sizes.dim
    hidden = 8 * TOKEN_BLOCK * (sizes.mlp_dim + 4 * sizes.dim)
    # log-sum-exp values of all heads, and rows and cells
    per_token = 8 * (sizes.num_heads + 4)
    fixed = ATTENTION_BYTES + hidden + num_tokens * per_token

    def peak_bytes(heads: int) -> int:
        output_share = 0 if heads == sizes.num_heads else 1
        shares = 1 + output_share + 3 * heads / sizes.num_heads
        return int(state * shares) + fixed

    plan = plan_heads(
        "moozy",
        num_tokens,
        sizes.num_heads,
        peak_bytes=peak_bytes,
        budget_bytes=budget_bytes,
    )
    return plan.heads_at_a_time


def tiles_on_grid(
    tiles: Tensor, coords_l0: CoordsL0, size_l0: Size
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows (n,) of the tiles that become tokens, and their grid cells (n, 2), in row-major order.

    As in the authors' code, the last of several tiles in a cell counts, and a tile whose embedding
    is all zero is background.

    Memory: 6 N int64, and TOKEN_BLOCK x D of the tile embeddings.
    Raises InvalidInputError: a tile lies off the grid, or all are zero.
    """
    steps = (coords_l0 - coords_l0.min(0)) / np.array(size_l0)
    cells = np.round(steps).astype(np.int64)
    if (np.abs(steps - cells) > OFF_GRID).any():
        raise InvalidInputError(
            "coords_l0 must lie on one grid of tiles without overlap for slide encoder "
            f"'moozy', got tiles off the grid of {size_l0[0]} x {size_l0[1]} px; check "
            "tile_px_l0"
        )
    number = cells[:, 1] * (int(cells[:, 0].max()) + 1) + cells[:, 0]
    _, last_from_behind = np.unique(number[::-1], return_index=True)
    rows = len(number) - 1 - last_from_behind
    is_tissue = np.concatenate(
        [
            (tiles[torch.from_numpy(rows[block]).to(tiles.device)] != 0).any(1).cpu()
            for block in blocks_of(len(rows), TOKEN_BLOCK)
        ]
    )
    if not is_tissue.any():
        raise InvalidInputError(
            "tile_embeddings must contain a row that is not all zero, got none"
        )
    rows = rows[is_tissue]
    return rows, cells[rows]

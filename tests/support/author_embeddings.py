"""Slide embeddings by the authors' own modules, on seeded weights: the yardstick of our tests.

    python -m tests.support.author_embeddings FOLDER [NAME ...]

FOLDER has a checkout of each repository of `AUTHORS` at its commit, under the repository's name.
einops must be installed, and what a repository imports. Their modules get our seeded weights by
name, strictly. `tests/pool/authors/NAME.npz` is written: the embedding in float32 as they publish
it, and in float64. Nothing of theirs is copied.
"""

import importlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from thinsection.pool.attention_pools import (
    AttentionPoolSlideEncoder,
    ChiefSlideEncoder,
    FeatherSlideEncoder,
    FeatherUni2SlideEncoder,
    FeatherUniSlideEncoder,
    MadeleineSlideEncoder,
    PoolSizes,
    TangleSlideEncoder,
)
from thinsection.pool.cobra import CobraSizes, CobraSlideEncoder
from thinsection.pool.moozy import (
    CASE_NAMES,
    SLIDE_NAMES,
    MoozySizes,
    MoozySlideEncoder,
)
from thinsection.pool.prism import PerceiverSizes, PrismSlideEncoder
from thinsection.weights.placement import optional_package

GOLDEN = Path(__file__).parents[1] / "pool" / "authors"
SEED = 7
TILE_PX_L0 = 512
Slides = list[tuple[Tensor, np.ndarray]]  # of a case: tiles (N, D), corners (N, 2)
Theirs = Callable[[dict[str, Tensor], Slides], Tensor]
POOLED_TILES = 5_000  # more than a block of ours


class Case(NamedTuple):
    """A network of ours, and its authors' module on a number of tiles."""

    encoder: Any  # class of the slide encoder
    config: Any  # its sizes
    repository: str
    commit: str
    num_tiles: int  # of a slide
    # (state dict of the names that our network has, slides) -> embedding
    theirs: Theirs
    num_slides: int = 1
    output: str = ""  # see `LoadOptions`
    is_irregular: bool = False  # with what only encoders notice that know places
    is_quick: bool = True  # for the test suite; the benchmark runs all


def seeded_slides(case: Case) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tiles (N, D) and corners (N, 2) of the slides of a case, in rows of 70."""
    slides = []
    places = np.arange(case.num_tiles)
    for number in range(case.num_slides):
        tiles = seeded_tiles(case.num_tiles, tile_dim_of(case), SEED + number)
        coords = np.stack([places % 70, places // 70], 1).astype(np.int64) * TILE_PX_L0
        if case.is_irregular:
            rng = np.random.default_rng(SEED)
            coords += 300 + rng.integers(-60, 60, coords.shape)
            coords[8] = coords[7]  # the later one counts
            tiles[20] = 0  # background
        slides.append((tiles, coords))
    return slides


def tile_dim_of(case: Case) -> int:
    """Channels of a tile embedding; the last of COBRA's."""
    if isinstance(case.config, CobraSizes):
        return case.config.tile_dims[-1]
    return int(case.config.tile_dim)


def seeded_tiles(num_tiles: int, dim: int, seed: int = SEED) -> np.ndarray:
    """Tile embeddings (N, D) float32, some of which stand out."""
    rng = np.random.default_rng(seed)
    tiles = rng.standard_normal((num_tiles, dim), dtype=np.float32)
    return tiles * rng.uniform(0.5, 3, (num_tiles, 1)).astype(np.float32)


def load_theirs(
    net: nn.Module,
    weights: dict[str, Tensor],
    unused: tuple[str, ...],
    dtype: torch.dtype,
) -> Any:
    """Their module with our weights: none of ours is left over, and it lacks only `unused`."""
    lacking, left_over = net.load_state_dict(weights, strict=False)
    assert not left_over, left_over
    assert all(name.startswith(unused) for name in lacking), lacking
    return net.eval().to(dtype)


def feather(weights: dict[str, Tensor], slides: Slides) -> Tensor:
    """Embedding by MIL-Lab's ABMIL of the sizes of `base.yaml`."""
    tiles = slides[0][0]
    optional_package("transformers")  # which torchvision of another build would break
    theirs = importlib.import_module("src.models.abmil")
    net = theirs.ABMIL(in_dim=tiles.shape[1], embed_dim=512, attn_dim=384)
    net = load_theirs(net, weights, FeatherSlideEncoder.unused, tiles.dtype)
    return net.forward_features(tiles[None])[0][0]


def chief(weights: dict[str, Tensor], slides: Slides) -> Tensor:
    """`WSI_feature` by CHIEF's module, which reads a file of texts that nothing here depends on."""
    tiles = slides[0][0]
    theirs = importlib.import_module("models.CHIEF")
    with mock.patch.object(torch, "load", lambda *_: torch.zeros(19, 768)):
        net = theirs.CHIEF(size_arg="small", dropout=True, n_classes=2)
    net = load_theirs(net, weights, ChiefSlideEncoder.unused, tiles.dtype)
    return net(tiles, torch.tensor([13]))["WSI_feature"][0]


def madeleine(weights: dict[str, Tensor], slides: Slides) -> Tensor:
    """`encode_he` by MADELEINE's module, of the sizes of their launch scripts."""
    tiles = slides[0][0]
    theirs = importlib.import_module("madeleine.models.Model")
    config = SimpleNamespace(
        MODALITIES=["HE"],
        wsi_encoder="abmil",
        patch_embedding_dim=512,
        wsi_encoder_hidden_dim=512,
        activation="softmax",
        n_heads=4,
    )
    net = theirs.MADELEINE(config)
    net = load_theirs(net, weights, MadeleineSlideEncoder.unused, tiles.dtype)
    return net.encode_he(tiles[None], "cpu")[0]


def tangle(sizes: PoolSizes) -> Theirs:
    """`get_features` by TANGLE's module of these sizes."""

    def embedding(weights: dict[str, Tensor], slides: Slides) -> Tensor:
        tiles = slides[0][0]
        theirs = importlib.import_module("core.models.mmssl")
        config = {
            "n_tokens": 2048,
            "embedding_dim": tiles.shape[1],
            "hidden_dim": sizes.hidden,
            "wsi_encoder": "abmil" if sizes.num_heads == 1 else "abmil_mh",
            "n_heads": sizes.num_heads,
            "activation": "softmax",
            "rna_encoder": "mlp",
            "rna_reconstruction": False,
            "study": "tanglev2",
        }
        net = theirs.MMSSL(config, n_tokens_rna=10)
        net = load_theirs(net, weights, TangleSlideEncoder.unused, tiles.dtype)
        return net.get_features(tiles[None])[0]

    return embedding


def prism(sizes: PerceiverSizes) -> Theirs:
    """`image_embedding` by PRISM's module, of which another project publishes a copy."""

    def embedding(weights: dict[str, Tensor], slides: Slides) -> Tensor:
        tiles = slides[0][0]
        package = "prism_embedder.models.prism"
        stand_in = SimpleNamespace(PerceiverConfig=object)
        names = {f"{package}.configuring_prism": stand_in}
        parents = ["prism_embedder", "prism_embedder.models", package]
        for name in parents:  # whose own imports the module does not need
            names[name] = ModuleType(name)
            names[name].__path__ = [name.replace(".", "/")]
        names[package].__path__ = [f"{sys.path[0]}/{package.replace('.', '/')}"]
        with mock.patch.dict(sys.modules, names):
            theirs = importlib.import_module(f"{package}.perceiver")
        config = SimpleNamespace(
            latent_seq=sizes.num_latents - 1,
            latent_dim=sizes.dim,
            context_dim=sizes.tile_dim,
            mhsa_heads=sizes.latent_heads,
            perceiver_depth=sizes.depth,
            transformer_depth=sizes.num_blocks,
            share_xattn_start_layer=sizes.shared_from,
            share_tf_start_layer=0,
            xattn_heads=sizes.tile_heads,
            mlp_mult=1,
            mlp_activation="geglu",
        )
        net = theirs.PerceiverResampler(config)
        unused = (
            "img_norm.",
            *(f"perceiver.layers.{i}." for i in range(1, sizes.depth)),
        )
        net = load_theirs(net, weights, unused, tiles.dtype)
        return net(tiles[None])["image_embedding"][0]

    return embedding


def moozy(sizes: MoozySizes) -> Theirs:
    """Class token of MOOZY's slide encoder, or of several slides the case transformer's state."""

    def embedding(weights: dict[str, Tensor], slides: Slides) -> Tensor:
        spec = SimpleNamespace(
            feat_dim=sizes.tile_dim,
            d_model=sizes.dim,
            n_heads=sizes.num_heads,
            n_layers=sizes.num_layers,
            dim_feedforward=sizes.mlp_dim,
            num_registers=sizes.num_registers,
            qk_norm=sizes.normed_heads,
            layerscale_init=1.0 if sizes.scaled else 0.0,
        )
        encoders = importlib.import_module("moozy.models.moozy_slide_encoder")
        cases = importlib.import_module("moozy.models.case_transformer")
        grids = importlib.import_module("moozy.data.features.grid")
        dtype = slides[0][0].dtype
        ours = {
            name.split(".", 1)[1]: value
            for name, value in weights.items()
            if name.startswith(SLIDE_NAMES)
        }
        unused = (
            "mask_token",
            *(f"blocks.{i}.pos_bias" for i in range(sizes.num_layers)),
        )
        net = load_theirs(encoders.MOOZYSlideEncoder(**vars(spec)), ours, unused, dtype)
        tokens = []
        for tiles, coords in slides:
            grid, xs, ys = grids.build_grid_from_coords(
                tiles.numpy(), coords, TILE_PX_L0
            )
            corners = np.stack(np.meshgrid(xs, ys, indexing="xy"), axis=-1)
            token, _, _ = net(
                torch.from_numpy(grid)[None],
                invalid_mask=torch.from_numpy(~(grid != 0).any(axis=2))[None],
                coords_xy=torch.from_numpy(corners).float()[None],
                patch_sizes=torch.tensor([float(TILE_PX_L0)]),
            )
            tokens.append(token[0])
        if len(slides) == 1:
            return tokens[0]
        case = cases.CaseAggregator(
            sizes.dim,
            num_layers=sizes.case_layers,
            num_heads=sizes.case_heads,
            dim_feedforward=sizes.case_mlp_dim,
            layerscale_init=1.0 if sizes.case_scaled else 0.0,
            qk_norm=sizes.case_normed_heads,
            num_registers=sizes.case_registers,
        )
        ours = {
            name.split(".", 1)[1]: value
            for name, value in weights.items()
            if name.startswith(CASE_NAMES)
        }
        return load_theirs(case, ours, ("no name",), dtype)(torch.stack(tokens))

    return embedding


def moozy_payload(
    sizes: MoozySizes, weights: dict[str, Tensor]
) -> dict[str, dict[str, Any]]:
    """A checkpoint as MOOZY writes it, with its two tables of sizes; weights by our names."""
    slide: dict[str, Any] = {"mask_token": torch.ones(1, 1, sizes.dim)}
    case: dict[str, Any] = {}
    for name, value in weights.items():
        table, _, own_name = name.partition(".")
        (case if f"{table}." == CASE_NAMES else slide)[own_name] = value
    for block in range(sizes.num_layers):
        slide[f"blocks.{block}.pos_bias.slopes"] = slide["pos_bias.slopes"]
    return {
        "teacher_slide_encoder": slide,
        "case_transformer": case,
        "slide_encoder_config": {
            "feat_dim": sizes.tile_dim,
            "d_model": sizes.dim,
            "n_layers": sizes.num_layers,
            "n_heads": sizes.num_heads,
            "dim_feedforward": sizes.mlp_dim,
            "num_registers": sizes.num_registers,
            "learnable_alibi": False,
            "qk_norm": sizes.normed_heads,
            "layerscale_enabled": sizes.scaled,
            "layerscale_init": 1.0 if sizes.scaled else 0.0,
            "patch_size_dynamic": True,
            "dropout": 0.1,
            "attn_dropout": 0.0,
            "layer_drop": 0.0,
        },
        "case_transformer_config": {
            "d_model": sizes.dim,
            "num_layers": sizes.case_layers,
            "num_heads": sizes.case_heads,
            "dim_feedforward": sizes.case_mlp_dim,
            "dropout": 0.1,
            "layerscale_init": 1.0 if sizes.case_scaled else 0.0,
            "layer_drop": 0.0,
            "qk_norm": sizes.case_normed_heads,
            "num_registers": sizes.case_registers,
        },
    }


def moozy_file(sizes: MoozySizes) -> Theirs:
    """State of the case by the model that MOOZY's own loader makes of a checkpoint's tables."""

    def embedding(weights: dict[str, Tensor], slides: Slides) -> Tensor:
        factory = importlib.import_module("moozy.models.factory")
        grids = importlib.import_module("moozy.data.features.grid")
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/moozy.pt"
            torch.save(moozy_payload(sizes, weights), path)
            model = factory.load_stage2_inference_model(path, torch.device("cpu"))
        model = model.to(slides[0][0].dtype)
        tokens = []
        for tiles, coords in slides:
            grid, xs, ys = grids.build_grid_from_coords(
                tiles.numpy(), coords, TILE_PX_L0
            )
            corners = np.stack(np.meshgrid(xs, ys, indexing="xy"), axis=-1)
            token, _, _ = model.slide_encoder(
                torch.from_numpy(grid)[None],
                invalid_mask=torch.from_numpy(~(grid != 0).any(axis=2))[None],
                coords_xy=torch.from_numpy(corners).float()[None],
                patch_sizes=torch.tensor([float(TILE_PX_L0)]),
            )
            tokens.append(token[0])
        case: Tensor = model.case_transformer(torch.stack(tokens))
        return case

    return embedding


def cobra(sizes: CobraSizes) -> Theirs:
    """COBRA's module, with Mamba-2 of its authors, whose kernels their own references replace."""

    def embedding(weights: dict[str, Tensor], slides: Slides) -> Tensor:
        tiles = slides[0][0]
        importlib.import_module("triton.language")  # which must not be imported twice
        mamba_ssm = ModuleType("mamba_ssm")  # whose own imports need CUDA
        mamba_ssm.__path__ = [str(Path(sys.path[0]).parent / "mamba" / "mamba_ssm")]
        with mock.patch.dict(sys.modules, {"mamba_ssm": mamba_ssm}):
            mamba2 = importlib.import_module("mamba_ssm.modules.mamba2")
            minimal = importlib.import_module("mamba_ssm.modules.ssd_minimal")
            norms = importlib.import_module("mamba_ssm.ops.triton.layernorm_gated")

            def scan(
                x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, **more: Any
            ):
                steps = torch.nn.functional.softplus(dt + more["dt_bias"])
                inputs = (x * steps[..., None], (steps * a).to(x.dtype))
                heads = [each.expand(-1, -1, x.shape[2], -1) for each in (b, c)]
                y, _ = minimal.ssd_minimal_discrete(*inputs, *heads, block_len=50)
                return y + more["D"][:, None] * x

            def norm(self: Any, x: Tensor, z: Tensor) -> Tensor:
                weight = self.weight
                return norms.rms_norm_ref(
                    x,
                    weight,
                    None,
                    z,
                    self.eps,
                    None,
                    self.norm_before_gate,
                    upcast=False,
                )

            vars(mamba2)["mamba_chunk_scan_combined"] = scan
            norms.RMSNorm.forward = norm
            vars(mamba_ssm)["Mamba2"] = partial(mamba2.Mamba2, use_mem_eff_path=False)
            theirs = importlib.import_module("cobra.model.cobra")
        net = theirs.Cobra(
            embed_dim=sizes.dim,
            input_dims=sizes.tile_dims,
            num_heads=sizes.num_heads,
            layers=sizes.num_layers,
            att_dim=sizes.hidden,
            d_state=sizes.state,
        )
        net = load_theirs(net, weights, CobraSlideEncoder.unused, tiles.dtype)
        return net(tiles[None])[0]

    return embedding


def pooled(
    encoder: type[AttentionPoolSlideEncoder],
    repository: str,
    commit: str,
    theirs: Theirs,
    config: PoolSizes | None = None,
) -> Case:
    """Case of an encoder that pools by attention."""
    sizes = config or encoder.published_sizes
    return Case(encoder, sizes, repository, commit, POOLED_TILES, theirs)


MIL_LAB = ("MIL-Lab", "dfc3c17ca6876a8f9bd33a9162c40f2c22631d9d")
TANGLE = ("TANGLE", "266a756a2574e18baab0b56a6809b5b274d48f14")
ONE_HEAD = PoolSizes(tile_dim=1024, dim=1024, hidden=768)  # of their defaults
PRISM = ("prism-embedder", "7022cf08845f92e90f2e2e78d55db4344f6793ba")
SMALL_PERCEIVER = PerceiverSizes(
    tile_dim=40,
    dim=48,
    num_latents=7,
    depth=5,
    shared_from=2,
    num_blocks=2,
    tile_heads=3,
    latent_heads=4,
)
MOOZY = ("MOOZY", "382ce54b987c7615bed18f92aeb90f3f1098f04c")
SMALL_MOOZY = MoozySizes(
    tile_dim=20,
    dim=48,
    num_layers=2,
    num_heads=6,
    mlp_dim=56,
    num_registers=0,
    normed_heads=True,
    scaled=True,
    case_layers=2,
    case_heads=4,
    case_mlp_dim=56,
    case_registers=3,
    case_normed_heads=True,
    case_scaled=False,
)
# neither heads nor widths of the case are the published ones, and no shape shows its heads
SIX_HEADS = MoozySizes(
    tile_dim=20,
    dim=48,
    num_layers=2,
    num_heads=4,
    mlp_dim=56,
    num_registers=3,
    case_layers=2,
    case_heads=6,
    case_mlp_dim=72,
    case_registers=1,
)
COBRA = ("COBRA", "49d231191db5a9c2ea37a2398dd922c8c9ee9cdb")
# with Mamba-2 of state-spaces/mamba, commit e9594ce1c732d97440f0332fdc43170a2294dbfa
COBRA_1 = CobraSizes(
    tile_dims=(768, 1024, 1280, 1536), num_layers=2, num_heads=8, hidden=96
)
AUTHORS = {
    "feather": pooled(FeatherSlideEncoder, *MIL_LAB, feather),
    "feather_uni": pooled(FeatherUniSlideEncoder, *MIL_LAB, feather),
    "feather_uni2_h": pooled(FeatherUni2SlideEncoder, *MIL_LAB, feather),
    "chief": pooled(
        ChiefSlideEncoder,
        "CHIEF",
        "1abed334e674ad2b6ee0430d1ce7d0b566420bb4",
        chief,
    ),
    "madeleine": pooled(
        MadeleineSlideEncoder,
        "MADELEINE",
        "419287dc60a57296d959840b893481019c4f0d21",
        madeleine,
    ),
    "tangle": pooled(
        TangleSlideEncoder, *TANGLE, tangle(TangleSlideEncoder.published_sizes)
    ),
    "cobra": Case(CobraSlideEncoder, CobraSizes(), *COBRA, 1_000, cobra(CobraSizes())),
    "cobra_1": Case(CobraSlideEncoder, COBRA_1, *COBRA, 1_000, cobra(COBRA_1)),
    "moozy": Case(
        MoozySlideEncoder,
        MoozySizes(),
        *MOOZY,
        1_000,
        moozy(MoozySizes()),
        is_irregular=True,
    ),
    "moozy_case": Case(
        MoozySlideEncoder,
        MoozySizes(),
        *MOOZY,
        300,
        moozy(MoozySizes()),
        num_slides=3,
        output="case",
        is_irregular=True,
    ),
    "moozy_small": Case(
        MoozySlideEncoder,
        SMALL_MOOZY,
        *MOOZY,
        300,
        moozy(SMALL_MOOZY),
        num_slides=2,
        output="case",
        is_irregular=True,
    ),
    "moozy_six_heads": Case(
        MoozySlideEncoder,
        SIX_HEADS,
        *MOOZY,
        300,
        moozy_file(SIX_HEADS),
        num_slides=2,
        output="case",
        is_irregular=True,
    ),
    "prism": Case(
        PrismSlideEncoder,
        PerceiverSizes(),
        *PRISM,
        3_000,
        prism(PerceiverSizes()),
        is_quick=False,
    ),
    "prism_small": Case(
        PrismSlideEncoder, SMALL_PERCEIVER, *PRISM, 3_000, prism(SMALL_PERCEIVER)
    ),
    "tangle_one_head": pooled(TangleSlideEncoder, *TANGLE, tangle(ONE_HEAD), ONE_HEAD),
}


@contextmanager
def checkout_first(folder: Path) -> Any:
    """Their modules by their names, and forgotten afterwards."""
    before = dict(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in sys.modules.keys() - before.keys():
            if str(folder) in str(getattr(sys.modules[name], "__file__", None)):
                del sys.modules[name]


def write_golden(name: str, folder: Path) -> None:
    """Writes the authors' embeddings of one case."""
    case = AUTHORS[name]
    checkout = folder / case.repository
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    commit = subprocess.check_output(command, text=True).strip()
    assert commit == case.commit, (name, commit)
    weights = {
        each.removeprefix(case.encoder.prefix): value
        for each, value in case.encoder.random_weights(case.config, seed=SEED).items()
    }
    slides = seeded_slides(case)
    embeddings = {}
    with checkout_first(checkout), torch.inference_mode():
        for key, dtype in (("float32", torch.float32), ("float64", torch.float64)):
            theirs: Slides = [(torch.from_numpy(t).to(dtype), c) for t, c in slides]
            embeddings[key] = case.theirs(weights, theirs).numpy()
    GOLDEN.mkdir(exist_ok=True)
    np.savez(
        GOLDEN / f"{name}.npz",
        commit=np.array(case.commit),
        num_tiles=np.array(case.num_tiles),
        **embeddings,
    )
    error = np.abs(embeddings["float32"] - embeddings["float64"]).max()
    channels = len(embeddings["float32"])
    sys.stdout.write(f"{name}: {channels} channels, their own error {error:.2e}\n")


if __name__ == "__main__":
    wanted = sys.argv[2:] or list(AUTHORS)
    for each in wanted:
        write_golden(each, Path(sys.argv[1]))

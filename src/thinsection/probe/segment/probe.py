"""Segmentation probe: dense tokens through the feature cache, a MaskTransformer on each fold.

It compares patch tokens and learned class tokens by cosine. Shapes: B images, T = g * g tokens of D
channels, K classes, C = width of the head. The order of images, the weights and every operation are
the same whether features come from RAM or from the cache: losses and scores agree to the bit.

Source: Strudel et al., Segmenter, arXiv:2105.05633, as THUNDER and nanopath use it.
"""

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from thinsection.encode import DEFAULT_ENCODER, TileEncoder, load_encoder
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.evaluation import metrics
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.intervals import Sampling, interval
from thinsection.evaluation.metrics import Counts, FloatVector, IndexArray, image_counts
from thinsection.probe.config import SegmentConfig
from thinsection.probe.data.sets import left_out_fact
from thinsection.probe.protocol import (
    NANOPATH,
    Geometry,
    Protocol,
    SegmentSettings,
    get_protocol,
)
from thinsection.probe.result import Examples, ProbeResult
from thinsection.probe.segment.data import SEGMENT_DATASETS, SegmentSet
from thinsection.store.cache import (
    CacheKey,
    FeatureCache,
    Storage,
    default_root,
    open_or_write,
)
from thinsection.types import GIB, RgbArray, parse_bytes
from thinsection.weights.placement import resolve_device

NUM_EXAMPLES = 4  # images shown beside their prediction
INIT_STD = 0.02
NORM_EPS = 1e-5
LabelImages = npt.NDArray[np.uint8]  # (N, H, W)


def run_segment_probe(root: Path, config: SegmentConfig) -> ProbeResult:
    """The probe on a dataset's folder, with features from the cache.

    Memory: `cache_memory` + the encoder, then the head (see `SegmentTrainer`) + 65,536 N bytes.
    """
    chosen = config.segment
    cached = config.cache
    protocol = get_protocol(NANOPATH.name, seed=chosen.seed)
    settings = protocol.require("segment", SegmentSettings)
    if chosen.epochs is not None:
        if chosen.epochs < 1:
            raise ConfigError(f"epochs must be >= 1, got {chosen.epochs}")
        settings = replace(settings, epochs=chosen.epochs)
        protocol = replace(protocol, segment=settings)
    data = SEGMENT_DATASETS[chosen.dataset](root).readable()
    with segment_features(
        data,
        load_encoder(  # without a name, so that it is freed once the features are there
            chosen.encoder or DEFAULT_ENCODER,
            engine=chosen.engine,
            device=chosen.device,
            precision=chosen.precision,
        ),
        settings,
        root=cached.cache_dir or default_root(),
        budget_bytes=parse_bytes(cached.cache_memory, name="cache_memory"),
        storage=cached.cache_dtype,
        batch_size=chosen.batch_size,
    ) as cache:
        result = segment_probe(
            data,
            cache,
            protocol=protocol,
            geometry=chosen.geometry,
            device=chosen.device,
        )
        return with_cache_facts(result, cache)


def segment_features(
    data: SegmentSet,
    encoder: TileEncoder,
    settings: SegmentSettings,
    *,
    root: Path,
    budget_bytes: int = GIB,
    storage: Storage = "lossless",
    batch_size: int = 16,
) -> FeatureCache:
    """The dataset's tokens [N, T, D] in the cache of `root`; computed where they are not there yet.

    Memory: a batch of images, the encoder, and the budget.
    """
    tokens = encoder.encode_tokens(centre(data.image(0)[None], settings))
    grid_edge(tokens.shape[1])

    def produce(start: int) -> Iterator[torch.Tensor]:
        for images in data.image_batches(start, batch_size):
            yield encoder.encode_tokens(centre(images, settings))

    preprocessing = {
        "image_px": settings.image_px,
        "crop_px": settings.crop_px,
        **encoder.spec.preprocessing,
        "precision": encoder.precision,
        "device": encoder.device.type,
        # its sums are in an order of their own
        "engine": encoder.engine.partition(" (")[0],
    }
    key = CacheKey(
        encoder=encoder.spec.name,
        weights_hash=encoder.weights_hash,
        preprocessing=json.dumps(preprocessing, sort_keys=True),
        data_hash=data.contents_hash(),
        storage=storage,
    )
    shape = (len(data), *tokens.shape[1:])
    return open_or_write(root, key, shape, produce, budget_bytes=budget_bytes)


def centre(images: RgbArray, settings: SegmentSettings) -> RgbArray:
    """The centre crop of (N, H, W, 3); a copy in C order."""
    return np.ascontiguousarray(label_window(images, settings, "correct"))


def segment_probe(
    data: SegmentSet,
    features: FeatureCache,
    *,
    protocol: Protocol = NANOPATH,
    geometry: Geometry = "compatible",
    device: str = "cpu",
) -> ProbeResult:
    """The mean over folds of the weighted per-image Jaccard, with images to look at.

    `features` are a `FeatureCache` of the data's tokens, or what serves as one; `geometry` is
    'compatible' with the suite's numbers, or 'correct' (see `upsampled`); the head is on `device`.

    Memory: what `features` takes + 65,536 N bytes of labels + 24 K² N of counts + the trainer.
    """
    settings = protocol.require("segment", SegmentSettings)
    trainer = SegmentTrainer(
        features,
        data.labels(),
        num_classes=len(data.class_names),
        settings=settings,
        geometry=geometry,
        device=resolve_device(device, mps=False),
    )
    fits = [
        trainer.fit(train, val, seed=protocol.seed + i)
        for i, (train, val) in enumerate(data.folds)
    ]
    counts = [fit.counts for fit in fits]
    weight = settings.background_weight
    jaccard = np.concatenate([metrics.image_jaccard(c) for c in counts])
    weights = np.concatenate([metrics.image_weights(c, weight) for c in counts])

    def score(draws: FloatVector) -> FloatVector:
        return draws @ (weights * jaccard) / (draws @ weights)  # type: ignore[no-any-return]

    rows = np.concatenate([val for _, val in data.folds])
    groups = data.groups or Groups.each(data.ids, "images")
    sampling = Sampling.of_rows(groups.take(rows))
    background = float(np.mean([metrics.background_score(c, weight) for c in counts]))
    per_class = metrics.class_jaccard(np.concatenate(counts).sum(axis=0)).tolist()
    scores = [metrics.weighted_jaccard(c, weight) for c in counts]
    images, tokens, dim = features.shape
    return ProbeResult(
        probe="segment",
        dataset=data.name,
        metric="weighted_jaccard",
        score=float(np.mean(scores)),
        interval=interval(sampling, score, "weighted_jaccard", seed=protocol.seed),
        protocol=protocol,
        details={
            "fold_scores": scores,
            "all_background_score": background,
            "best_epochs": [fit.best_epoch for fit in fits],
            "class_jaccard_of_all_px": dict(
                zip(data.class_names, per_class, strict=True)
            ),
            "first_batch_losses": [fit.first_batch_losses[0] for fit in fits],
            "train_losses": [fit.train_losses for fit in fits],
            "val_losses": [fit.val_losses for fit in fits],
        },
        facts={
            "images": images,
            "tokens": tokens,
            "dim": dim,
            "geometry": geometry,
            "split_rule": data.split_rule,
            **left_out_fact(data.left_out),
        },
        examples=_examples(data, trainer, fits[0].head),
        remarks=(f"predicting background everywhere would score {background:.4f}",),
    )


def _examples(
    data: SegmentSet, trainer: "SegmentTrainer", head: "MaskTransformer"
) -> Examples:
    """Evenly spaced validation images of the first fold, in the frame that is scored."""
    val = data.folds[0][1]
    places = np.linspace(0, len(val) - 1, min(NUM_EXAMPLES, len(val)))
    rows = val[places.astype(np.int64)]
    truths, predictions = zip(*trainer.predict(head, rows), strict=True)
    images = np.stack([data.image(int(row)) for row in rows])
    return Examples(
        images=label_window(images, trainer.settings, trainer.geometry),
        truth=np.concatenate(truths),
        prediction=np.concatenate(predictions),
        class_names=data.class_names,
    )


def with_cache_facts(result: ProbeResult, cache: FeatureCache) -> ProbeResult:
    """The result with what the cache kept and, for a lossy dtype, what that cost."""
    manifest = cache.manifest
    loss = manifest.loss
    remarks = result.remarks
    if loss is not None:
        changed = f"{loss.changed} of {loss.values} values changed"
        error = f"largest error {loss.max_abs_error:.3g}"
        remarks += (f"lossy cache ({manifest.key.storage}): {error}, {changed}",)
    facts = {
        **result.facts,
        "encoder": manifest.key.encoder,
        "weights_sha256": manifest.key.weights_hash,
        "engine": json.loads(manifest.key.preprocessing).get("engine", "not recorded"),
        "cache_dtypes": manifest.dtype_rows,
        "cache_bytes": manifest.data_bytes,
        "cache_loss": "none" if loss is None else asdict(loss),
    }
    return replace(result, facts=facts, remarks=remarks)


class Block(nn.Module):
    """Pre-norm transformer block: attention with biases, exact GELU, no dropout."""

    def __init__(self, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width, eps=NORM_EPS)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width, eps=NORM_EPS)
        self.up = nn.Linear(width, mlp)
        self.down = nn.Linear(mlp, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T + K, C] -> the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))  # type: ignore[no-any-return]


class MaskTransformer(nn.Module):
    """[B, T, D] tokens -> [B, K, g, g] class scores per token."""

    def __init__(self, dim: int, num_classes: int, settings: SegmentSettings) -> None:
        super().__init__()
        width = settings.width
        self.project = nn.Linear(dim, width)
        self.class_tokens = nn.Parameter(torch.empty(1, num_classes, width))
        blocks = (
            Block(width, settings.heads, settings.mlp) for _ in range(settings.blocks)
        )
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.patch_projection = nn.Parameter(torch.empty(width, width))
        self.class_projection = nn.Parameter(torch.empty(width, width))
        self.norm_scores = nn.LayerNorm(num_classes, eps=NORM_EPS)

    def forward(self, tokens: Tensor) -> Tensor:
        num_classes = self.class_tokens.shape[1]
        class_tokens = self.class_tokens.expand(len(tokens), -1, -1)
        x = torch.cat([self.project(tokens), class_tokens], dim=1)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        patches = F.normalize(x[:, :-num_classes] @ self.patch_projection, dim=-1)
        classes = F.normalize(x[:, -num_classes:] @ self.class_projection, dim=-1)
        scores = self.norm_scores(patches @ classes.transpose(1, 2))
        edge = grid_edge(tokens.shape[1])
        return scores.transpose(1, 2).reshape(len(x), num_classes, edge, edge)  # type: ignore[no-any-return]


def grid_edge(num_tokens: int) -> int:
    """g of T = g * g tokens; raises InvalidInputError where T is no square."""
    edge = math.isqrt(num_tokens)
    if edge * edge != num_tokens:
        raise InvalidInputError(
            f"tokens must form a square grid, got {num_tokens}; the encoder must return patch "
            "tokens without prefix tokens"
        )
    return edge


def initial_head(
    dim: int, num_classes: int, settings: SegmentSettings, generator: torch.Generator
) -> MaskTransformer:
    """A head whose weights come from the generator alone: truncated normal 0.02, P and C scaled."""
    with torch.device("meta"):
        head = MaskTransformer(dim, num_classes, settings)
    head = head.to_empty(device="cpu")
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=INIT_STD, generator=generator)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()  # ones and zeros
    nn.init.trunc_normal_(head.class_tokens, std=INIT_STD, generator=generator)
    for projection in (head.patch_projection, head.class_projection):
        nn.init.normal_(projection, std=settings.width**-0.5, generator=generator)
    return head


def dice_loss(scores: Tensor, labels: Tensor, smooth: float) -> Tensor:
    """1 - mean over classes of (2 I + s) / (U + s), I and U over batch and space, s `smooth`.

    `scores`: [B, K, H, W] before the softmax; `labels`: int64 [B, H, W].
    """
    probability = scores.softmax(dim=1)
    truth = F.one_hot(labels, scores.shape[1]).permute(0, 3, 1, 2).to(probability.dtype)
    overlap = (probability * truth).sum(dim=(0, 2, 3))
    total = (probability + truth).sum(dim=(0, 2, 3))
    return 1 - ((2 * overlap + smooth) / (total + smooth)).mean()


def upsampled(scores: Tensor, settings: SegmentSettings, geometry: Geometry) -> Tensor:
    """[B, K, g, g] -> [B, K, px, px] to hold against the label.

    'compatible' stretches the crop's prediction over the whole label, as the suite does: away from
    the centre, prediction and label part by up to (image_px - crop_px) / 2 px. 'correct' gives the
    crop's own px; the label is cropped alike.
    """
    edge = settings.image_px if geometry == "compatible" else settings.crop_px
    return F.interpolate(
        scores, size=(edge, edge), mode="bilinear", align_corners=False
    )


def label_window(
    labels: LabelImages, settings: SegmentSettings, geometry: Geometry
) -> LabelImages:
    """The part of the labels that is trained on and scored; a view."""
    if geometry == "compatible":
        return labels
    margin = (settings.image_px - settings.crop_px) // 2
    inner = slice(margin, margin + settings.crop_px)
    return labels[:, inner, inner]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldFit:
    """A head at the epoch of its best validation loss, and the way there.

    A loss of an epoch is the mean over its batches, however small the last.
    """

    head: MaskTransformer
    counts: Counts  # (N, K, K) of each validation image
    first_batch_losses: list[float]  # of each epoch, as the next
    train_losses: list[float]
    val_losses: list[float]

    @property
    def best_epoch(self) -> int:
        """The first of the epochs with the least validation loss, from 1."""
        return 1 + int(np.argmin(self.val_losses))


@dataclass(frozen=True, slots=True)
class SegmentTrainer:
    """One training: the data, what decides the score, and where it computes.

    Memory: the head with Adam's state (4 times 768 D + 15.4 M parameters in float32), activations
    of one batch, and what the features' source takes.
    """

    features: FeatureCache  # or what has its `shape` and `batches`
    labels: LabelImages
    num_classes: int
    settings: SegmentSettings
    geometry: Geometry
    device: torch.device

    def fit(self, train: IndexArray, val: IndexArray, *, seed: int) -> FoldFit:
        """Trains on rows `train`; the epoch with the best dice loss on rows `val` counts."""
        settings = self.settings
        dim = self.features.shape[2]
        generator = torch.Generator().manual_seed(seed)
        head = initial_head(dim, self.num_classes, settings, generator).to(self.device)
        optimizer = torch.optim.Adam(
            head.parameters(), lr=settings.lr, weight_decay=settings.weight_decay
        )
        best: dict[str, Tensor] = {}
        first_batch_losses: list[float] = []
        train_losses: list[float] = []
        val_losses: list[float] = []
        for epoch in range(1, settings.epochs + 1):
            order = train[torch.randperm(len(train), generator=generator).numpy()]
            batch_losses = self._epoch(head, order, optimizer)
            loss = float(batch_losses.mean())
            val_loss = float(self._epoch(head, val).mean())
            if not math.isfinite(loss + val_loss):
                raise InvalidInputError(
                    f"training loss must stay finite, got {loss} in epoch {epoch}; "
                    "scale the features"
                )
            if val_loss < min(val_losses, default=math.inf):
                best = copy.deepcopy(head.state_dict())
            first_batch_losses.append(float(batch_losses[0]))
            train_losses.append(loss)
            val_losses.append(val_loss)
        head.load_state_dict(best)
        counts = [
            image_counts(truth, prediction, self.num_classes)
            for truth, prediction in self.predict(head, val)
        ]
        return FoldFit(
            head=head,
            counts=np.concatenate(counts),
            first_batch_losses=first_batch_losses,
            train_losses=train_losses,
            val_losses=val_losses,
        )

    def _epoch(
        self,
        head: MaskTransformer,
        rows: IndexArray,
        optimizer: Optimizer | None = None,
    ) -> FloatVector:
        """Dice loss of each batch of rows, in their order; with an optimizer the head learns."""
        losses = []
        with torch.set_grad_enabled(optimizer is not None):
            for scores, labels in self._scored(head, rows):
                loss = dice_loss(scores, labels, self.settings.dice_smooth)
                if optimizer is not None:
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                losses.append(loss.detach())
        return np.array([float(loss) for loss in losses])

    def predict(
        self, head: MaskTransformer, rows: IndexArray
    ) -> Iterator[tuple[LabelImages, LabelImages]]:
        """uint8 (truth, prediction) of rows, batch by batch, in the frame that is scored."""
        with torch.no_grad():
            for scores, labels in self._scored(head, rows):
                prediction = scores.argmax(dim=1)
                yield labels.byte().cpu().numpy(), prediction.byte().cpu().numpy()

    def _scored(
        self, head: MaskTransformer, rows: IndexArray
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(scores, labels) of each batch on the device."""
        settings = self.settings
        batches = self.features.batches(rows, settings.batch_size, device=self.device)
        done = 0
        for tokens in batches:
            truth = self.labels[rows[done : done + len(tokens)]]
            truth = np.ascontiguousarray(label_window(truth, settings, self.geometry))
            labels = torch.from_numpy(truth).to(self.device).long()
            yield upsampled(head(tokens), settings, self.geometry), labels
            done += len(tokens)

"""One batch through several encoders: the same bytes as alone, the buffer released once."""

import numpy as np
import pytest
import torch
from tests.support.few_layers import few_layers

from thinsection.encode import TileEncoder, embed_tiles, load_encoder
from thinsection.encode.embed import BatchEncoder
from thinsection.encode.memory import batch_bytes, simulate_pass
from thinsection.errors import InvalidInputError
from thinsection.slide import open_slide
from thinsection.testing.synthetic import write_he_slide
from thinsection.tiles import StepTimer, TileBatch, iter_tiles, tile_grid
from thinsection.tiles.stream import EmbeddedBatch

NAMES = ("efficientnet_lite0", "lunit_vits16")


@pytest.fixture(scope="module")
def encoders() -> list[TileEncoder]:
    return [
        load_encoder(n, device="cpu", precision="fp32", pretrained=n == NAMES[0])
        for n in NAMES
    ]


def batches(count: int = 3, released: list[int] | None = None) -> list[TileBatch]:
    rng = np.random.default_rng(5)
    released = [] if released is None else released
    made = []
    for i in range(count):
        size = 5 - i
        coords = np.stack([np.arange(size), np.arange(size) + 10 * i], axis=1)
        tiles = rng.integers(0, 256, (size, 224, 224, 3), dtype=np.uint8)
        made.append(
            TileBatch(
                source=i,
                indices=np.arange(size) + 10 * i,
                coords_l0=coords,
                tiles=tiles,
                _release=lambda i=i: released.append(i),
            )
        )
    return made


def test_two_encoders_over_one_batch_give_the_bytes_of_single_runs(encoders) -> None:
    released: list[int] = []
    together = BatchEncoder(encoders, clock=StepTimer())
    found = [item for batch in batches(3, released) for item in together.submit(batch)]
    found += together.flush()
    assert [item.source for item in found] == released == [0, 1, 2]
    for encoder in encoders:
        label = encoder.label
        alone = BatchEncoder([encoder])
        single = [item for batch in batches() for item in alone.submit(batch)]
        for both, one, batch in zip(found, single, batches(), strict=True):
            assert list(both.tile_embeddings) == [e.label for e in encoders]
            assert both.tile_embeddings[label].dtype == np.float32
            assert (
                both.tile_embeddings[label].tobytes()
                == one.tile_embeddings[label].tobytes()
            )
            assert (
                one.tile_embeddings[label].tobytes()
                == encoder.encode(batch.tiles).numpy().tobytes()
            )
            assert both.tokens == {} and np.array_equal(both.indices, batch.indices)


def test_a_marker_comes_out_after_the_batches_before_it(encoders) -> None:
    worker = BatchEncoder(encoders[1:])
    first, second = batches(2)
    order = [
        *worker.submit(first),
        *worker.queue_in_order("end of a slide"),
        *worker.submit(second),
    ]
    order += worker.flush()
    assert [o.source if isinstance(o, EmbeddedBatch) else o for o in order] == [
        *(0, "end of a slide", 1)
    ]
    with pytest.raises(InvalidInputError, match="at least one encoder, got none"):
        BatchEncoder([])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "name", [*NAMES, "h0_mini", "conch_v15", "phikon", "timm:resnet18"]
)
@pytest.mark.check
def test_tokens_and_embeddings_of_one_pass_are_those_of_two(
    name: str, precision: str
) -> None:
    """Of two layers of each kind: the wiring of tokens and pooling is that of the whole network."""
    encoder = few_layers(name, precision)
    edge = encoder.spec.tile_px
    count = 5 if edge < 448 else 3  # more than are computed at once
    tiles = np.random.default_rng(8).integers(
        0, 256, (count, edge, edge, 3), dtype=np.uint8
    )
    pooled, tokens = encoder.encode_with_tokens(tiles)
    assert torch.equal(pooled, encoder.encode(tiles))
    assert (
        torch.equal(tokens, encoder.encode_tokens(tiles))
        and tokens.dtype == torch.float32
    )
    assert tokens.shape[1:] == simulate_pass(encoder, 1, encoder.spec.tile_px)[1:]


def test_a_batch_of_tokens_is_one_pass_and_is_counted(encoders, monkeypatch) -> None:
    (batch,) = batches(1)
    (found,) = BatchEncoder(encoders).submit(batch, ["tokens", "tokens"])
    shapes = [tokens.shape for tokens in found.tokens.values()]
    assert shapes == [(5, 49, 1280), (5, 196, 384)]
    for encoder in encoders:
        embedding = found.tile_embeddings[encoder.label]
        assert np.array_equal(embedding, encoder.encode(batch.tiles).numpy())
        more = batch_bytes(encoder, batch_size=32, tokens=True) - batch_bytes(
            encoder, batch_size=32
        )
        _, count, channels = simulate_pass(encoder, 1, encoder.spec.tile_px)
        assert more >= 32 * count * channels * 4


def test_an_encoder_of_which_nothing_is_wanted_is_left_out(
    encoders, monkeypatch
) -> None:
    (batch,) = batches(1)
    monkeypatch.setattr(encoders[0], "encode", None)
    (found,) = BatchEncoder(encoders).submit(batch, ["", "embeddings"])
    (label,) = found.tile_embeddings
    assert label == encoders[1].label and found.tokens == {}
    assert np.array_equal(found.tile_embeddings[label], encoders[1].encode(batch.tiles))


def test_an_encoder_without_tokens_names_those_that_have_them(encoders) -> None:
    class Plain(TileEncoder):
        spec, device, precision = encoders[0].spec, encoders[0].device, "fp32"
        weights_hash = "0"

        def encode(self, tiles_u8):
            return encoders[0].encode(tiles_u8)

    message = r"must have patch tokens, got 'efficientnet_lite0'; these have: .*conch_v15, .*uni2_h"
    for call in (Plain().encode_with_tokens, Plain().encode_tokens):
        with pytest.raises(InvalidInputError, match=message):
            call(batches(1)[0].tiles)
    assert Plain().dim == 1280 and Plain().label == "efficientnet_lite0"


def test_embed_tiles_gives_what_the_encoder_gives(encoders, tmp_path) -> None:
    write_he_slide(tmp_path / "a.svs", (1300, 900))
    with open_slide(tmp_path / "a.svs") as slide:
        tiles = tile_grid(slide)
        embeddings, table = embed_tiles(slide, tiles, encoders[0], batch_size=4)
        batches = iter_tiles(slide, tiles, batch_size=4)
        expected = torch.cat([encoders[0].encode(batch.tiles) for batch in batches])
    assert embeddings.shape == (len(tiles), 1280) and len(table) == len(tiles) > 4
    assert np.array_equal(embeddings, expected.numpy())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_two_encoders_share_one_copy_and_give_the_bytes_of_single_runs() -> (
    None
):
    made = [
        load_encoder(n, device="cuda", precision="fp32", pretrained=False)
        for n in NAMES
    ]
    released: list[int] = []
    together = BatchEncoder(made)
    found, first = [], batches(3, released)
    for batch in first:
        found += together.submit(batch)
        assert len(found) == max(0, batch.source - 1) and len(released) in (
            batch.source,
            batch.source + 1,
        )
    found += together.flush()
    assert released == [0, 1, 2]
    for encoder in made:
        label = encoder.label
        alone = BatchEncoder([encoder])
        single = [i for batch in batches() for i in alone.submit(batch)] + [
            *alone.flush()
        ]
        for both, one in zip(found, single, strict=True):
            assert (
                both.tile_embeddings[label].tobytes()
                == one.tile_embeddings[label].tobytes()
            )

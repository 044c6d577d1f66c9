"""Images to embeddings: read in order, batched by size, embedded by an encoder."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thinsection.errors import DatasetError
from thinsection.probe.data.sets import Embeddings, ImageRef, ImageSet, TileSet, make_split
from thinsection.types import MIB, Closing, RgbArray

if TYPE_CHECKING:
    import h5py
    import torch

    from thinsection.encode import TileEncoder

BATCH_BYTES = 64 * MIB  # of decoded images at a time (one image may be larger)

Encode = Callable[[RgbArray], "torch.Tensor"]  # uint8 (B, H, W, 3) to (B, D)


def embed_image_set(data: ImageSet, encoder: "TileEncoder", *, batch_size: int = 64) -> TileSet:
    """The set with embeddings in place of images; the encoder does its own preprocessing.

    Memory: 4 N D + 2 BATCH_BYTES (or two images) + the encoder.

    Raises:
        DatasetError: an image cannot be read; names it.
        InvalidInputError: the encoder gave NaN or inf.
    """
    train, val = (
        make_split(
            embed_images(part.images, encoder.encode, batch_size=batch_size),
            part.labels,
            [ref.name for ref in part.images],
        )
        for part in (data.train, data.val)
    )
    facts = {**data.facts, **encoder_facts(encoder)}
    names = data.class_names
    return TileSet(name=data.name, class_names=names, train=train, val=val, facts=facts)


def encoder_facts(encoder: "TileEncoder") -> dict[str, Any]:
    """What a result file says of the encoder."""
    return {
        "encoder": encoder.spec.name,
        "precision": encoder.precision,
        "weights_sha256": encoder.weights_hash,
    }


def embed_images(images: Sequence[ImageRef], encode: Encode, *, batch_size: int = 64) -> Embeddings:
    """Embeddings (N, D) of images, in their order.

    Memory: 4 N D + 2 BATCH_BYTES (or two images) + the encoder.

    Raises:
        DatasetError: there is no image, or one cannot be read.
    """
    out: Embeddings | None = None
    done = 0
    for batch in image_batches(images, batch_size):
        vectors = encode(batch).float().cpu().numpy()
        if out is None:
            out = np.empty((len(images), vectors.shape[1]), dtype=np.float32)
        out[done : done + len(batch)] = vectors
        done += len(batch)
    if out is None:
        raise DatasetError("images must be given to embed, got none")
    return out


def class_and_mean(encoder: "TileEncoder") -> tuple[Encode, str]:
    """PathoROB's embedding, [CLS | mean of the patch tokens], and what it is made of.

    An encoder that joins both already, or has no class token, gives its own embedding.
    """
    import torch

    if encoder.spec.pooling != "cls" or not encoder.spec.supports_tokens:
        return encoder.encode, f"the encoder's own ({encoder.spec.pooling})"

    def encode(batch: RgbArray) -> torch.Tensor:
        return torch.cat([encoder.encode(batch), encoder.encode_tokens(batch).mean(dim=1)], dim=1)

    return encode, "class token and mean of the patch tokens"


def image_batches(images: Sequence[ImageRef], batch_size: int) -> Iterator[RgbArray]:
    """Batches uint8 (B, H, W, 3) in order; a batch ends where the image size changes.

    Memory: 2 BATCH_BYTES, or two images: those read, and the batch made of them.
    """
    pending: list[RgbArray] = []
    with ImageReader() as reader:
        for ref in images:
            image = reader.read(ref)
            full = len(pending) == batch_size or sum(i.nbytes for i in pending) >= BATCH_BYTES
            if pending and (full or pending[0].shape != image.shape):
                yield np.stack(pending)
                pending = []
            pending.append(image)
    if pending:
        yield np.stack(pending)


class ImageReader(Closing):
    """Reads images; the HDF5 file of the last one stays open, since its rows come in a run."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: h5py.File | None = None

    def close(self) -> None:
        """Closes the file that is open, if one is."""
        if self._file is not None:
            self._file.close()

    def read(self, ref: ImageRef) -> RgbArray:
        """The image as uint8 (H, W, 3), RGB.

        Raises:
            DatasetError: it cannot be read; names it.
        """
        from PIL import Image, UnidentifiedImageError

        try:
            if ref.row is not None:
                return np.asarray(self._open(ref.path)["x"][ref.row], dtype=np.uint8)
            with Image.open(ref.path) as image:
                return np.asarray(image.convert("RGB"))
        except (OSError, KeyError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise DatasetError(f"image must be readable, got {str(ref.path)!r}: {error}") from error

    def _open(self, path: Path) -> "h5py.File":
        import h5py

        if self._file is None or self._path != path:
            if self._file is not None:
                self._file.close()
            self._path, self._file = path, h5py.File(path, "r")
        return self._file

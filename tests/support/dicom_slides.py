"""DICOM slides that are written for tests, with pydicom."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pydicom
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate, encapsulate_extended
from pydicom.pixels.encoders import RLELosslessEncoder
from pydicom.uid import generate_uid

from thinsection.types import RgbArray

_CLASS = "1.2.840.10008.5.1.4.1.1.77.1.6"
_BASE = "1.2.840.10008.1.2"
SYNTAXES = {
    "implicit": _BASE,
    "explicit": f"{_BASE}.1",
    "deflated": f"{_BASE}.1.99",
    "jpeg": f"{_BASE}.4.50",
    "jpeg-lossless": f"{_BASE}.4.70",
    "jpeg-ls": f"{_BASE}.4.80",
    "jpeg2000": f"{_BASE}.4.90",
    "htj2k": f"{_BASE}.4.201",
    "jpeg-xl": f"{_BASE}.4.110",
    "rle": f"{_BASE}.5",
    "deflated-frames": f"{_BASE}.8.1",
}
LOSSY = ("jpeg",)


@dataclass(frozen=True, kw_only=True)
class DicomKind:
    """How a synthetic DICOM slide is stored."""

    syntax: str = "explicit"
    tile: tuple[int, int] = (64, 48)  # width, height
    sparse: bool = False
    planar: bool = False
    parts: int = 1  # of a concatenation
    offsets: str = "basic"  # 'basic', 'extended' or 'none'
    photometric: str = "RGB"
    fragments: int = 1


def _encode(frame: RgbArray, kind: DicomKind) -> bytes:
    frame = np.ascontiguousarray(frame)
    if kind.syntax == "jpeg":
        space = "RGB" if kind.photometric == "RGB" else "YCbCr"
        return bytes(
            imagecodecs.jpeg8_encode(
                frame,
                level=95,
                colorspace="RGB",
                outcolorspace=space,
                subsampling="444",
            )
        )
    if kind.syntax == "jpeg-lossless":
        return bytes(imagecodecs.jpeg8_encode(frame, lossless=True))
    if kind.syntax == "jpeg-ls":
        return bytes(imagecodecs.jpegls_encode(frame))
    if kind.syntax == "jpeg2000":
        return bytes(
            imagecodecs.jpeg2k_encode(
                frame, codecformat="j2k", reversible=True, level=0
            )
        )
    if kind.syntax == "htj2k":
        return bytes(imagecodecs.htj2k_encode(frame, reversible=True))
    if kind.syntax == "jpeg-xl":
        return bytes(imagecodecs.jpegxl_encode(frame, lossless=True))
    if kind.syntax == "rle":
        return _rle(frame)
    plain = frame.transpose(2, 0, 1) if kind.planar else frame
    data = np.ascontiguousarray(plain).tobytes()
    if kind.syntax == "deflated-frames":
        deflater = zlib.compressobj(wbits=-zlib.MAX_WBITS)
        data = deflater.compress(data) + deflater.flush()
    return data + b"\0" * (len(data) % 2)


def _rle(frame: RgbArray) -> bytes:
    height, width, samples = frame.shape
    return bytes(
        RLELosslessEncoder.encode(
            frame,
            encoding_plugin="pydicom",
            rows=height,
            columns=width,
            samples_per_pixel=samples,
            bits_allocated=8,
            bits_stored=8,
            pixel_representation=0,
            photometric_interpretation="RGB",
            planar_configuration=0,
            number_of_frames=1,
        )
    )


def _frames(pixels: RgbArray, tile: tuple[int, int]) -> list[tuple[int, int, RgbArray]]:
    """Returns x, y and pixels of the frames, white beyond the border."""
    width, height = tile
    frames = []
    for y in range(0, pixels.shape[0], height):
        for x in range(0, pixels.shape[1], width):
            inside = pixels[y : y + height, x : x + width]
            frame = np.full((height, width, 3), 255, np.uint8)
            frame[: inside.shape[0], : inside.shape[1]] = inside
            frames.append((x, y, frame))
    return frames


def write_dicom(
    path: Path,
    layers: Sequence[Sequence[RgbArray]],
    kind: DicomKind,
    *,
    series: str,
    mpp: float = 0.5,
    flavor: str = "VOLUME",
    patient: str = "P1",
    container: str = "G1",
    **more: Any,
) -> list[Path]:
    """Writes one image; `layers` are pixels by optical path and focal plane. Returns its files."""
    pixels = layers[0][0]
    height, width = pixels.shape[:2]
    places = []  # path, plane, x, y, encoded
    for path_number, planes in enumerate(layers):
        for plane, each in enumerate(planes):
            for x, y, frame in _frames(each, kind.tile):
                places.append((path_number, plane, x, y, _encode(frame, kind)))
    files = []
    concatenation = generate_uid()
    step = -(-len(places) // kind.parts)
    for part in range(kind.parts):
        own = places[part * step : (part + 1) * step]
        name = path if kind.parts == 1 else path.with_name(f"{path.stem}-{part}.dcm")
        dataset = Dataset()
        dataset.SOPClassUID = _CLASS
        dataset.SOPInstanceUID = generate_uid()
        dataset.StudyInstanceUID = "1.2.3"
        dataset.SeriesInstanceUID = series
        dataset.Modality = "SM"
        dataset.PatientID = patient
        dataset.PatientName = ""
        dataset.ContainerIdentifier = container
        dataset.ImageType = ["ORIGINAL", "PRIMARY", flavor, "NONE"]
        dataset.Rows = kind.tile[1]
        dataset.Columns = kind.tile[0]
        dataset.TotalPixelMatrixRows = height
        dataset.TotalPixelMatrixColumns = width
        dataset.TotalPixelMatrixFocalPlanes = len(layers[0])
        dataset.NumberOfOpticalPaths = len(layers)
        dataset.NumberOfFrames = len(own)
        dataset.SamplesPerPixel = 3
        dataset.PhotometricInterpretation = kind.photometric
        dataset.PlanarConfiguration = int(kind.planar)
        dataset.BitsAllocated = 8
        dataset.BitsStored = 8
        dataset.HighBit = 7
        dataset.PixelRepresentation = 0
        dataset.ImagedVolumeWidth = width * mpp / 1e3
        dataset.ImagedVolumeHeight = height * mpp / 1e3
        dataset.ImagedVolumeDepth = 0.001
        dataset.InstanceNumber = 1
        optical = []
        for number in range(len(layers)):
            item = Dataset()
            item.OpticalPathIdentifier = str(number + 1)
            optical.append(item)
        dataset.OpticalPathSequence = optical
        measures = Dataset()
        measures.PixelSpacing = [mpp / 1e3, mpp / 1e3]
        measures.SliceThickness = 0.001
        shared = Dataset()
        shared.PixelMeasuresSequence = [measures]
        dataset.SharedFunctionalGroupsSequence = [shared]
        dataset.DimensionOrganizationType = (
            "TILED_SPARSE" if kind.sparse else "TILED_FULL"
        )
        if kind.sparse:
            dataset.PerFrameFunctionalGroupsSequence = [
                _per_frame(number, plane, x, y) for number, plane, x, y, _ in own
            ]
        if kind.parts > 1:
            dataset.ConcatenationUID = concatenation
            dataset.InConcatenationNumber = part + 1
            dataset.ConcatenationFrameOffsetNumber = part * step
        for keyword, value in more.items():
            setattr(dataset, keyword, value)
        encoded = [data for *_, data in own]
        _set_pixels(dataset, encoded, kind)
        meta = FileMetaDataset()
        meta.TransferSyntaxUID = SYNTAXES[kind.syntax]
        meta.MediaStorageSOPClassUID = _CLASS
        meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID
        dataset.file_meta = meta
        name.parent.mkdir(parents=True, exist_ok=True)
        if kind.syntax in ("jpeg-xl", "deflated-frames"):  # pydicom does not know them
            meta.FileMetaInformationGroupLength = 0  # it is filled in
            dataset.preamble = bytes(128)
            pydicom.dcmwrite(
                name,
                dataset,
                implicit_vr=False,
                little_endian=True,
                force_encoding=True,
            )
        else:
            pydicom.dcmwrite(name, dataset, enforce_file_format=True)
        files.append(name)
    return files


def _per_frame(path: int, plane: int, x: int, y: int) -> Dataset:
    position = Dataset()
    position.ColumnPositionInTotalImagePixelMatrix = x + 1
    position.RowPositionInTotalImagePixelMatrix = y + 1
    position.XOffsetInSlideCoordinateSystem = 0
    position.YOffsetInSlideCoordinateSystem = 0
    position.ZOffsetInSlideCoordinateSystem = plane * 0.002
    identification = Dataset()
    identification.OpticalPathIdentifier = str(path + 1)
    group = Dataset()
    group.PlanePositionSlideSequence = [position]
    group.OpticalPathIdentificationSequence = [identification]
    return group


def _set_pixels(dataset: Dataset, encoded: list[bytes], kind: DicomKind) -> None:
    if kind.syntax in ("implicit", "explicit", "deflated"):
        dataset.PixelData = b"".join(encoded)
        dataset["PixelData"].VR = "OB" if kind.syntax != "implicit" else "OW"
        return
    if kind.offsets == "extended":
        data, offsets, lengths = encapsulate_extended(encoded)
        dataset.PixelData = data
        dataset.ExtendedOffsetTable = offsets
        dataset.ExtendedOffsetTableLengths = lengths
    else:
        has_table = kind.offsets == "basic"
        dataset.PixelData = encapsulate(
            encoded, fragments_per_frame=kind.fragments, has_bot=has_table
        )
    dataset["PixelData"].VR = "OB"
    dataset["PixelData"].is_undefined_length = True

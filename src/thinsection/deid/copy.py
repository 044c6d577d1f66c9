"""De-identified copies of slides, with reports of the data that were examined, removed and kept."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from thinsection.deid.dicom import (
    DicomInstance,
    is_dicom,
    read_instance,
    stored_image,
    write_copy,
)
from thinsection.deid.dicom_elements import UidMap
from thinsection.deid.likeness import StoredImage, find_unlikeness
from thinsection.deid.report import Report, write_sheet
from thinsection.deid.tiff import TiffSlide
from thinsection.errors import InvalidInputError, OutputError
from thinsection.files.atomic import atomic_path


def examine(slide_path: str | Path) -> Report:
    """Reports which data of a slide would be removed or kept, and which cannot be examined.

    Nothing is written. `removed` is empty if there is nothing to remove in the data that were
    examined.

    Memory: one stored segment, 64 MiB of decoded segments, and the file's tables of segments.

    Raises:
        InvalidInputError: a format that is not supported here, or a damaged file.
    """
    slide_path = Path(slide_path)
    if is_dicom(slide_path):
        return deidentify_dicom([slide_path], None)[slide_path]
    with slide_path.open("rb") as handle:
        return TiffSlide(slide_path, handle).copy(None)


def deidentify(
    slide_path: str | Path,
    out: str | Path,
    *,
    sheet: str | Path | None = None,
    overwrite: bool = False,
) -> Report:
    """Writes a copy of a TIFF or NDPI slide without data that may identify a patient.

    Pixels stay equal. The copy is a new file that gets only known structures, each after a check of
    its form. The finished copy is examined again before it gets its name. For DICOM see
    `deidentify_dicom`.

    Args:
        slide_path: the slide.
        out: path of the copy. The caller chooses its name, which may identify a patient too.
        sheet: path of a PNG with every image of the copy, for a person to look at.
        overwrite: True to replace existing files.

    Memory: one stored segment, 64 MiB of decoded segments, and the file's tables of segments.

    Raises:
        InvalidInputError: a format that is not supported here, or a damaged file.
        OutputError: a file exists and `overwrite` is False; or the copy still has data to remove.
    """
    slide_path = Path(slide_path)
    out = Path(out)
    if is_dicom(slide_path):
        read_instance(slide_path)  # raises if the file is damaged
        raise InvalidInputError(
            f"slide must be a TIFF, got the DICOM file {slide_path.name!r}; use deidentify_dicom"
        )
    _refuse_present(out, overwrite=overwrite)
    if sheet:
        _refuse_present(Path(sheet), overwrite=overwrite)
    with slide_path.open("rb") as handle, atomic_path(out) as unfinished:
        with unfinished.open("wb") as file:
            report = TiffSlide(slide_path, handle).copy(file)
        with unfinished.open("rb") as copied:
            copy = TiffSlide(unfinished, copied)
            _refuse_leftovers(copy.copy(None), out)
            if sheet is not None:
                write_sheet(Path(sheet), out.name, copy.images)
    return report


def deidentify_dicom(
    slide_paths: Sequence[str | Path],
    folder: str | Path | None,
    *,
    sheet: str | Path | None = None,
    overwrite: bool = False,
) -> dict[Path, Report]:
    """Writes copies of DICOM files without data that may identify a patient, under their names.

    Files of label, overview and localizer images are left out. Levels and thumbnails are left out
    if they do not show the same tissue as the largest level of their series. Pass all files of a
    study in one call: within a call, each UID is replaced by one random UID everywhere.

    Args:
        slide_paths: the files.
        folder: folder of the copies; None only examines the files.
        sheet: path of a PNG with every image of the copies.
        overwrite: True to replace existing files.

    Returns:
        A report for each file. A file whose report has 'the whole file' under `removed` has no
        copy.

    Memory: one frame, 64 MiB of decoded frames of each file, and the elements before the pixels.

    Raises:
        InvalidInputError: a file that is no whole-slide image, or a damaged file.
        OutputError: a file exists and `overwrite` is False; or a copy still has data to remove.
    """
    instances = [read_instance(path) for path in slide_paths]
    targets: dict[Path, Path] = {}
    for instance in instances if folder is not None else ():
        target = Path(folder or "", instance.path.name)
        if target in targets.values():
            raise InvalidInputError(
                f"DICOM files must have different names, got {instance.path.name!r} twice; "
                "rename one"
            )
        targets[instance.path] = target
    for target in targets.values():
        _refuse_present(target, overwrite=overwrite)
    if sheet:
        _refuse_present(Path(sheet), overwrite=overwrite)
    uids = UidMap()
    reports: dict[Path, Report] = {}
    by_series: dict[str, list[DicomInstance]] = {}
    for instance in instances:
        by_series.setdefault(instance.series, []).append(instance)
    for series in by_series.values():
        for instance, why in _judged(series):
            reports[instance.path] = instance.report
            if why:
                instance.report.looked_at.append("the type of the image and its pixels")
                instance.report.remove(f"the whole file: {why}")
                continue
            _copy_instance(instance, targets.get(instance.path), uids)
    if sheet is not None and targets:
        with ExitStack() as stack:
            images: list[StoredImage] = []
            for target in targets.values():
                if target.exists():
                    file = stack.enter_context(target.open("rb"))
                    images.append(stored_image(read_instance(target), file))
            if images:
                write_sheet(Path(sheet), f"{len(images)} DICOM files", images)
    return reports


def _judged(series: Sequence[DicomInstance]) -> list[tuple[DicomInstance, str]]:
    """Returns each file of a slide with the reason why it is left out; '' if it is copied."""
    judged: list[tuple[DicomInstance, str]] = []
    with ExitStack() as stack:
        shown: list[
            StoredImage
        ] = []  # images that are sure to show the slide, finest first
        largest_first = sorted(
            series, key=lambda file: (-file.num_pixels, not file.is_volume)
        )
        for instance in largest_first:
            file = stack.enter_context(instance.path.open("rb"))
            image = stored_image(instance, file)
            why = instance.why_dropped()
            if not why and not shown and not instance.is_volume:
                why = "this call has no level of the same series to compare it with"
            if not why and shown:
                why = find_unlikeness(image, shown[-1])
            if not why:
                relation = (
                    "it shows what the largest shows" if shown else "it is the largest"
                )
                instance.report.kept.append(f"{image.name}: {relation}")
                shown.append(image)
            judged.append((instance, why))
    return judged


def _copy_instance(instance: DicomInstance, target: Path | None, uids: UidMap) -> None:
    """Writes the copy of one file and examines it; without a target only examines the file."""
    with instance.path.open("rb") as source:
        if target is None:
            write_copy(instance, uids, source, None)
            return
        with atomic_path(target) as unfinished:
            with unfinished.open("wb") as file:
                write_copy(instance, uids, source, file)
            copy = read_instance(unfinished)
            with unfinished.open("rb") as copied:
                _refuse_leftovers(write_copy(copy, uids, copied, None), target)


def _refuse_present(out: Path, *, overwrite: bool) -> None:
    """Raises OutputError: the file exists."""
    if out.exists() and not overwrite:
        raise OutputError(
            f"out must not exist, got {str(out)!r}; pass overwrite=True, or another name"
        )


def _refuse_leftovers(report: Report, out: Path) -> None:
    """Raises OutputError: the report of a finished copy still has data to remove."""
    if report.removed:
        raise OutputError(
            f"copy must not contain anything that is removed, got {report.removed} in "
            f"{str(out)!r}; nothing was written; please report this"
        )

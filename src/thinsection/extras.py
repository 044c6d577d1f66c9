"""Packages that `pip install thinsection` leaves out: who has them, and whether they are there.

A rescue runs in another tool's environment, beside that tool's own versions. So the package alone
asks for little. What reads slides is in the extra `slides`, with newer versions, and the other
extras add what only some commands need. A command asks for its packages before it works.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import util
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from thinsection.errors import MissingDependencyError

# extra -> packages that it adds, by import name (tests/test_extras.py compares pyproject.toml)
EXTRAS = {
    "slides": (
        *("h5py", "PIL", "openslide", "openslide_bin", "tifffile", "imagecodecs"),
        *(
            "simplejpeg",
            "skimage",
            "sklearn",
            "shapely",
            "threadpoolctl",
            "safetensors",
        ),
        *("jinja2", "openpyxl", "pydicom"),
        "matplotlib",
    ),
    "hub": (
        *("timm", "transformers", "tokenizers", "huggingface_hub", "onnxruntime"),
        *("openvino", "segmentation_models_pytorch", "torchvision", "yaml"),
    ),
    "cluster": (
        *("dask", "distributed", "dask_jobqueue", "pynvml", "ray", "fsspec", "s3fs"),
    ),
    "view": (
        *("starlette", "uvicorn", "pandas", "pyarrow", "zarr", "anndata", "umap"),
    ),
}
# a purpose, as messages say it, and the packages that it takes, by import name
Need = tuple[str, tuple[str, ...]]
# package that fsspec takes for the protocol of a URL, beside itself
_PACKAGE_OF_PROTOCOL = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "adlfs"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
}
# name for pip of a package whose import name is another one
_PIP_NAMES = {
    "PIL": "pillow",
    "dask_cuda": "dask-cuda",
    "dask_jobqueue": "dask-jobqueue",
    "openslide": "openslide-python",
    "pynvml": "nvidia-ml-py",
    "segmentation_models_pytorch": "segmentation-models-pytorch",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "umap": "umap-learn",
    "yaml": "pyyaml",
}
SLIDES_PYTHON = (3, 11)
# package with the C library of OpenSlide, which may come from conda or the system instead
_LIBRARY_PACKAGE = "openslide-bin"
# missing packages that a message names; it counts the others
_SHOWN = 3
_REQUIREMENT_LINE = re.compile(
    r"^Requires-Dist: ([\w.-]+) *>= *([\d.]+) *; *extra *== *['\"]slides['\"]$",
    re.MULTILINE,
)
_VERSION_LINE = re.compile(r"^Version: *(\S+)", re.MULTILINE)
_RELEASE = re.compile(r"\d+(\.\d+)*")


def is_installed(package: str) -> bool:
    """Tells whether the package could be imported, without importing it."""
    return util.find_spec(package) is not None


def missing_of(packages: Iterable[str]) -> tuple[str, ...]:
    """Packages that are not installed, by import name; nothing is imported."""
    return tuple(package for package in packages if not is_installed(package))


def remedy_for(packages: Iterable[str]) -> str:
    """Command that installs packages: by the extras that have them, else by their own names.

    Every extra brings the packages that read slides. Where they are not wanted, in an environment
    of another tool, each package has its own name.
    """
    extras: dict[str, None] = {}
    names = []
    by_extra = not slides_problem()
    for package in packages:
        extra = _extra_of(package) if by_extra else None
        if extra is None:
            names.append(_PIP_NAMES.get(package, package))
        else:
            extras[extra] = None
    words = ["pip install"]
    if extras:
        words.append(f"'thinsection[{','.join(extras)}]'")
    return " ".join([*words, *names])


def require_packages(purpose: str, *packages: str) -> None:
    """Checks that packages are installed, before any work is done; nothing is imported.

    Args:
        purpose: what needs them, as the message says it: 'Parquet tables', '--executor ray'.
        packages: their import names.

    Raises:
        MissingDependencyError: one of them is missing.
    """
    check_needs([(purpose, packages)])


def check_needs(needs: Iterable[Need]) -> None:
    """Checks all needs of a piece of work at once; see `require_packages`."""
    lacking: dict[str, None] = {}
    rules: list[str] = []
    for purpose, packages in needs:
        missing = missing_of(packages)
        if missing:
            lacking |= dict.fromkeys(missing)
            verb = "" if rules else "must be installed "
            rules.append(f"{', '.join(packages)} {verb}for {purpose}")
    if rules:
        raise MissingDependencyError(
            f"{' and '.join(rules)}, got no {', '.join(lacking)}; {remedy_for(lacking)}"
        )


def needs_of_path(path: str) -> Iterator[Need]:
    """Packages that it takes to read or write at a path, by its form: a URL, a Parquet table."""
    protocol, mark, _ = path.partition("://")
    if mark and protocol in ("file", *_PACKAGE_OF_PROTOCOL):
        client = _PACKAGE_OF_PROTOCOL.get(protocol)
        yield f"{protocol}:// URLs", ("fsspec", *([client] if client else []))
    if path.lower().endswith(".parquet"):
        yield "Parquet tables", ("pyarrow",)


@contextmanager
def importing(purpose: str, *packages: str) -> Iterator[None]:
    """Checks that packages are installed, and names them if their import in the block fails.

    Raises:
        MissingDependencyError: one of them is missing, or cannot be imported.
    """
    require_packages(purpose, *packages)
    try:
        yield
    except ImportError as cause:
        raise MissingDependencyError(
            f"{', '.join(packages)} must be importable for {purpose}, got {cause}; "
            f"{remedy_for(packages)}"
        ) from cause


def _extra_of(package: str) -> str | None:
    """Extra that has a package, if one has it."""
    for extra, packages in EXTRAS.items():
        if package in packages:
            return extra
    return None


def check_slides() -> None:
    """Checks that Python and every package of the extra are there, in versions that will do.

    Raises:
        MissingDependencyError: one of them is missing or too old.
    """
    problem = slides_problem()
    if problem:
        raise MissingDependencyError(
            f"packages that read slides must be installed, got {problem}; "
            "pip install 'thinsection[slides]', best in an environment of its own with "
            f"Python {_dotted(SLIDES_PYTHON)} or newer"
        )


@cache
def slides_problem() -> str:
    """What keeps this environment from reading slides, in words; empty if it can.

    Empty too where the package runs from its sources and is not installed, as nothing says then
    what it needs.
    """
    problems = []
    python = sys.version_info[:3]
    if python < SLIDES_PYTHON:
        problems.append(f"Python {_dotted(python)} (needs >={_dotted(SLIDES_PYTHON)})")
    missing = []
    for name, least in _REQUIREMENT_LINE.findall(_metadata("thinsection")):
        version = _VERSION_LINE.search(_metadata(name))
        if version is None:
            if name != _LIBRARY_PACKAGE or not _has_openslide_library():
                missing.append(name)
        elif _release(version[1]) < _release(least):
            problems.append(f"{name} {version[1]} (needs >={least})")
    if missing:
        shown = ", ".join(missing[:_SHOWN])
        more = len(missing) - _SHOWN
        problems.append(f"no {shown}" + (f" and {more} more" if more > 0 else ""))
    return ", ".join(problems)


def _has_openslide_library() -> bool:
    """Tells whether OpenSlide's C library is in this environment or on this system."""
    from ctypes.util import find_library

    in_environment = Path(sys.prefix, "lib").glob("libopenslide.so*")
    return any(in_environment) or find_library("openslide") is not None


def _metadata(name: str) -> str:
    """Text of a distribution's METADATA; empty where it is not installed.

    Read by lines here: `importlib.metadata` parses it as an e-mail, in five times as long.
    """
    try:
        return distribution(name).read_text("METADATA") or ""
    except PackageNotFoundError:
        return ""


def _release(version: str) -> tuple[int, ...]:
    """Numbers of a version, without zeros at the end: 2.6.0+cpu is (2, 6)."""
    match = _RELEASE.match(version)
    numbers = [int(part) for part in match[0].split(".")] if match is not None else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))

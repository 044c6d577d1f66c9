"""The rule of trust for data files: what a table, a TOML, a JSON or a model file may make us do.

A data file names only what a registry declares. It runs no code, gives no permission and no path
to code, and sends no request to this machine. SECURITY.md says the rule for users, and
tests/test_trust.py holds a hostile example against each reader of data files.

- The architecture of a network is a class of torch modules. The class belongs to a package in
  `ARCHITECTURES`, to a package that declares segmenters by an entry point, or to a file that the
  user trusts by `--trust-code`. The name is checked before anything is imported, and the class
  before it is called.
- A model file may give only the settings in `MODEL_SETTINGS`, as names and numbers.
- A URL in a table has a scheme in `TABLE_SCHEMES`. Its host is no address of this machine, and no
  link-local address. files/sources.py refuses a host name that DNS resolves to such an address, and
  a redirect to one.
"""

import hashlib
import ipaddress
import os
import re
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from importlib import import_module, util
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from thinsection.errors import CohortError, ConfigError
from thinsection.extras import importing
from thinsection.files.urls import STORE_SCHEMES
from thinsection.types import Json

if TYPE_CHECKING:
    from torch import nn

# a data file may name classes of these modules and of modules below them
ARCHITECTURES = (
    "torch.nn",
    "torchvision.models",
    "segmentation_models_pytorch",
    "timm.models",
    "monai.networks.nets",
)
TABLE_SCHEMES = (*("file", "http", "https"), *STORE_SCHEMES)
# names of the settings, by section, in which a model file may state how its embeddings are made
MODEL_SETTINGS: Mapping[str, Collection[str]] = {
    "slides": (
        "reader",
        "fingerprint",
        "slide_mpp",
        "channels",
        "channel_range",
        "icc",
    ),
    "tissue": ("mask_mpp", "min_speck_um2", "min_hole_um2", "black_level"),
    "qc": ("qc", "qc_fail", "qc_remove", "qc_strict", "qc_device", "qc_pictures"),
    "segment": ("segment_mpp", "segment_memory"),
    "tiles": (
        "tile_px",
        "tile_mpp",
        "mpp_tolerance",
        "resample",
        "overlap",
        "region_px",
        "min_tissue_fraction",
        "tile_filter",
        "edge",
    ),
    "stain": ("stain_norm", "stain_mpp", "stain_places"),
    "encode": (
        "encoders",
        "tokens",
        "pretrained",
        "device",
        "precision",
        "engine",
        "batch_size",
        "seed",
    ),
    "aggregate": ("slide_encoders", "aggregate_memory", "patients"),
}
# a name with a prefix: 'hf:owner/repo', 'timm:vit'
_NAMED = re.compile(r"(hf|timm|own):[\w.-]+(/[\w.-]+)?(@[\w.-]+)?")
_FILE = re.compile(
    r"[/\\~\0]|\.(toml|py|json|onnx|pt|pth|ckpt|bin|safetensors|npz|npy)$"
)
_METADATA_HOSTS = ("metadata.google.internal", "instance-data")
# addresses at which clouds (AWS, Alibaba, Azure, Oracle) give a machine its credentials, besides
# link-local addresses
_METADATA_ADDRESSES = frozenset(
    map(
        ipaddress.ip_address,
        ("fd00:ec2::254", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
    )
)
# environment variable with the hosts that the user allowed, so that child processes know them too
LOCAL_HOSTS = "THINSECTION_LOCAL_HOSTS"


# code


def check_architecture(
    name: str, *, packages: Collection[str] = (), code: Path | None = None
) -> None:
    """Refuses an architecture by its name alone, before anything is imported.

    Args:
        name: 'module:class'.
        packages: other packages that declare segmenters by entry points.
        code: trusted file with the name of the module, if there is one.

    Raises:
        ConfigError: the module is not listed.
    """
    module_name, _, attribute = name.partition(":")
    package = module_name.partition(".")[0]
    is_listed = any(f"{module_name}.".startswith(f"{one}.") for one in ARCHITECTURES)
    if not attribute.isidentifier() or not (is_listed or package in packages or code):
        raise ConfigError(
            f"architecture must be 'module:class' of {', '.join(ARCHITECTURES)}, got {name!r}; "
            "install a package that declares it by an entry point, or pass trust_code=FILE "
            "with the file that has the class"
        )


def architecture(
    name: str, *, packages: Collection[str] = (), code: Path | None = None
) -> "type[nn.Module]":
    """Returns the class that a data file names; see `check_architecture`.

    One of torchvision's declared builders counts as a class.

    Raises:
        ConfigError: the name is not listed, or is no class of torch modules.
    """
    check_architecture(name, packages=packages, code=code)
    from torch import nn

    module_name, _, attribute = name.partition(":")
    if code is not None:
        module = _run_file(code)
    else:
        with importing(f"architecture {name!r}", module_name.partition(".")[0]):
            module = import_module(module_name)
    value: Any = getattr(module, attribute, None)
    if module_name.partition(".")[0] == "torchvision" and callable(value):
        models = import_module("torchvision.models")
        name_of_value = getattr(value, "__name__", "")
        is_declared = name_of_value in models.list_models()
        if is_declared and models.get_model_builder(name_of_value) is value:
            builder: type[nn.Module] = value
            return builder
    if not (isinstance(value, type) and issubclass(value, nn.Module)):
        raise ConfigError(
            f"architecture must be a PyTorch module class, got {name!r}, which "
            f"{'does not exist' if value is None else 'is something else'}"
        )
    # a module may hold classes of others
    check_architecture(f"{value.__module__}:{attribute}", packages=packages, code=code)
    return value


def trusted_file(name: str, files: Sequence[str | Path]) -> Path | None:
    """Returns the trusted file whose name is the module of an architecture, None if none is."""
    module_name = name.partition(":")[0]
    for file in map(Path, files):
        if file.suffix == ".py" and file.stem == module_name:
            return file
    return None


def _run_file(path: Path) -> object:
    """Runs a file that the user trusts; its module is made once for each content."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    name = f"thinsection_trusted_{digest}"
    if name not in sys.modules:
        spec = util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"trust_code must be a Python file, got {str(path)!r}")
        module = util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


# model files


def check_model_settings(
    settings: Mapping[str, Json], defaults: Json, model: str
) -> None:
    """Refuses settings of a model file that are not names and numbers for making embeddings.

    Args:
        settings: the settings by section, as the file has them.
        defaults: default values, by section; a setting with its default value is accepted.
        model: name of the model, for the message.

    Raises:
        ConfigError: names the setting.
    """
    for section, values in settings.items():
        if not isinstance(values, Mapping):
            continue  # another check refuses its type when it is read
        for name, value in values.items():
            default = defaults.get(section, {}).get(name)
            is_default = value == default
            is_allowed = name in MODEL_SETTINGS.get(section, ())
            if is_default or (is_allowed and not any(map(_is_path, _texts(value)))):
                continue
            raise ConfigError(
                f"a model file must not name files, code or permissions, got {section}.{name} = "
                f"{value!r:.60} in {model!r}; embed the slides by `thinsection run` with this "
                "setting if you trust it, then predict from that folder"
            )


def _texts(value: Json) -> list[str]:
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item)]
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _texts(item)]
    return [value] if isinstance(value, str) else []


def _is_path(text: str) -> bool:
    """Tells whether a text names a file or a URL, and not an entry of a registry or of the hub."""
    if _NAMED.fullmatch(text):
        return ".." in text
    return _FILE.search(text) is not None


# URLs


def check_table_url(url: str, where: str, *, allow_local: bool = False) -> None:
    """Refuses a URL in a table that names no store or web server, or that names this machine.

    The host is checked as it is written. A host name is resolved only when the URL is opened; then
    an address of this machine is refused unless it is allowed here.

    Args:
        url: the URL.
        where: line and file, for the message.
        allow_local: True allows addresses of this machine and link-local addresses, for a user who
            asked for them.

    Raises:
        CohortError: names the line.
    """
    scheme = url.partition("://")[0].lower()
    if scheme not in TABLE_SCHEMES:
        raise CohortError(
            f"a URL in a table or a ledger must begin with one of {', '.join(TABLE_SCHEMES)}, got "
            f"{scheme + '://'!r} in {where}"
        )
    if scheme not in ("http", "https"):
        return
    if allow_local:
        allow_local_host(url)
    elif is_local_host(url):
        raise CohortError(
            f"a URL in a table or a results folder must not name this machine or a link-local "
            "network, got "
            f"{urlsplit(url).hostname!r} in {where}; pass allow_local_urls=True if you trust it"
        )


def is_local_host(url: str) -> bool:
    """Tells whether the host of a URL, as written, is this machine or link-local, or is missing."""
    try:
        host = (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return True
    own_names = {"", "localhost", socket.gethostname().lower(), *_METADATA_HOSTS}
    if host in own_names or host.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        try:  # '127.1', '0x7f000001', '2130706433'
            host = socket.inet_ntoa(socket.inet_aton(host))
        except OSError:
            return False
    return is_local_address(host)


def is_local_address(text: str) -> bool:
    """Tells whether an address is this machine's, link-local, or of a cloud's metadata service."""
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    if mapped is not None:
        address = mapped
    return (
        address.is_loopback
        or address.is_link_local
        or address.is_unspecified
        or address.is_multicast
        or address in _METADATA_ADDRESSES
    )


def allow_local_host(url: str) -> None:
    """Allows that the host of a URL is this machine, in this command and its processes."""
    with suppress(ValueError):
        host = urlsplit(url).hostname or ""
        hosts = {*os.environ.get(LOCAL_HOSTS, "").split(), host}
        os.environ[LOCAL_HOSTS] = " ".join(sorted(hosts))


def may_be_local(url: str) -> bool:
    """Tells whether the user allowed the host of a URL, or the URL itself names this machine."""
    if is_local_host(url):
        return True
    return urlsplit(url).hostname in os.environ.get(LOCAL_HOSTS, "").split()

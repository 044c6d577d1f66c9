"""What an earlier invocation knew of the encoders: enough to see that nothing is left to do.

A run notes beside each encoder's identity which files it was read from, as they were, and in what
surroundings. While none of that has changed, a finished folder is recognised without torch and
without reading weights; anything else (other files, a moving branch of the hub, code of others)
loads them, as always.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from thinsection.jobs.contract import Report
from thinsection.machine import cpu_model
from thinsection.pipeline.process import skipped_result
from thinsection.pipeline.records import Record, same_settings
from thinsection.pipeline.results import SlideResult
from thinsection.pool.encoder import SlideEncoder
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.graph import Models
from thinsection.stages.spec import EncodingSpec, RunSpec
from thinsection.tiles.transforms import stain_target
from thinsection.weights.origin import Origin

Stamps = tuple[tuple[str, int, int, int], ...]  # name, size and times of files
_PACKAGES = ("thinsection", "torch", "openvino", "timm", "transformers")


class KnownSlideEncoder(SlideEncoder):
    """A slide encoder without weights, by what is recorded of it."""

    def __init__(self, name: str, identity: Mapping[str, Any]) -> None:
        self.name, self.precision, self.origin = name, identity["precision"], Origin()

    def encode(self, *_: Any, **__: Any) -> Any:
        """Never asked for: `known_report` only looks."""
        raise NotImplementedError


def recorded(models: Models, encoding: EncodingSpec) -> dict[str, Any]:
    """`Models.identities`, with what `known_report` compares later."""
    found = models.identities
    for encoder in models.encoders:
        if encoder.origin.files is not None:
            stamped, tokens = stamps(encoder.origin.files), encoder.spec.supports_tokens
            told = {"stamps": stamped, "where": _where(encoding), "tokens": tokens}
            found[encoder.label] = found[encoder.label] | {"read": told}
    return found


def known_report(
    out: Path,
    record: Record,
    entries: Sequence[SlideEntry],
    spec: RunSpec,
) -> Report[SlideResult] | None:
    """The report of a run that has nothing to do; None where there is something, or may be.

    Asks what a worker asks: whether each stage has its result, by the same keys.
    """
    if not spec.encoding.encoders or spec.output.overwrite:
        return None
    for earlier in same_settings(out, record):
        told = earlier.document.get("models", {})
        models = None
        with suppress(
            AttributeError, KeyError, TypeError
        ):  # it was changed, or is of before
            models = _models(told, spec.encoding)
        if models is not None:
            ends = (
                skipped_result(entry, out=out, spec=spec, models=models)
                for entry in entries
            )
            found = takewhile(bool, ends)
            results = tuple(result for result in found if result)
            return (
                Report(results=results, facts=told)
                if len(results) == len(entries)
                else None
            )
    return None


def _models(told: Mapping[str, Any], encoding: EncodingSpec) -> Models | None:
    """The encoders of a record, as far as stages ask; None where they may be others by now."""
    count, where = len(encoding.encoders), _where(encoding)
    encoders, slide_encoders = [], []
    for label, said in list(told.items())[:count]:
        read = said.get("read")
        if read is None or read["where"] != where:
            return None
        there = stamps([stamp[0] for stamp in read["stamps"]])
        if there is None or read["stamps"] != list(map(list, there)):
            return None
        spec = SimpleNamespace(name=said["name"], supports_tokens=read["tokens"])
        known = {name: value for name, value in said.items() if name != "read"}
        encoders.append(SimpleNamespace(label=label, provenance=known, spec=spec))
    for name, said in list(told.items())[count:]:
        if said.get("weights_hash") or name not in ("mean", "max"):
            return None
        slide_encoders.append(KnownSlideEncoder(name, said))
    named = tuple(encoder.name for encoder in slide_encoders)
    if len(encoders) < count or named != encoding.slide_encoders:
        return None
    target = (
        None if encoding.stain.stain_norm == "none" else stain_target(encoding.stain)
    )
    ours = cast(Any, tuple(encoders))
    return Models(
        encoders=ours, slide_encoders=tuple(slide_encoders), stain_target=target
    )


def stamps(files: Sequence[str]) -> Stamps | None:
    """Name, size and times of each; None where one is gone."""
    try:
        stats = [(path, Path(path).stat()) for path in files]
    except OSError:
        return None
    return tuple((path, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for path, s in stats)


def _where(encoding: EncodingSpec) -> str:
    """A hash of what decides, beside files, which encoder a name and 'auto' mean."""
    named = (*encoding.encoders, encoding.weights)
    parts: list[Any] = [
        cpu_model(),
        sorted(map(str, Path("/dev").glob("nvidia*"))),
        sys.platform,
    ]
    parts += [
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        [_version(name) for name in _PACKAGES],
    ]
    parts += [
        str(Path(name).resolve()) for name in named if name and Path(name).exists()
    ]
    return sha256(json.dumps(parts).encode()).hexdigest()


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return ""

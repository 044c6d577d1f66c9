"""Account of a results folder, from the ledgers of its slides and the records of its commands.

Ledgers say what is there and what it was made of; records say with which settings. What neither
says is listed as unknown, never guessed.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from thinsection.citation.methods import Account, Method, citation_of, joined
from thinsection.encode.registry import declared_encoders
from thinsection.errors import StoreError
from thinsection.report.stored import QC_FILE, read_qc
from thinsection.results.choice import newest_of
from thinsection.results.folder import Results
from thinsection.results.records import Record, versions_of
from thinsection.segment.spec import SEGMENTERS
from thinsection.slide.readers import AUTO
from thinsection.stages.labels import slug
from thinsection.store.hdf5 import open_h5
from thinsection.store.ledger import SLIDES, StageRecord
from thinsection.store.outcome import KnownSlide, known_slides
from thinsection.store.tile_tables import MEASURED, TILES
from thinsection.tiles.filters import MASK_FILTER
from thinsection.types import Document, counted, shortened

_STAIN = re.compile(r"_(macenko|reinhard)(?:_|$)")
_SEED = re.compile(r"_seed(\d+)(?:_|$)")
_SHOWN_HASH = 12  # hexadecimal digits of a checksum in a sentence
_POOLED_BY_RULE = ("mean", "max")  # slide encoders without weights


@dataclass(frozen=True)
class Stored:
    """Complete results of one address, by slide."""

    address: str
    records: dict[str, StageRecord]

    @property
    def grid(self) -> str:
        """Tile grid of the address."""
        return self.address.partition("/")[0]

    @property
    def name(self) -> str:
        """Last part of the address."""
        return self.address.rpartition("/")[2]

    def values(self, fact: str) -> list[object]:
        """Different values of a fact, the most frequent first."""
        found = (record.facts.get(fact) for record in self.records.values())
        return [value for value, _ in Counter(found).most_common() if value is not None]

    def value(self, fact: str) -> str:
        """Values of a fact in words; '' if no slide has it."""
        return " or ".join(map(str, self.values(fact)))


class FolderAccount:
    """Reads a results folder once, and says what was done there."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.slides: list[KnownSlide] = known_slides(results.folder, results.ledgers)
        self.records: list[Record] = results.records

    @cached_property
    def stored(self) -> dict[str, Stored]:
        """Complete results by address; a file that was deleted does not count."""
        found: dict[str, dict[str, StageRecord]] = {}
        for slide_id, ledger in self.results.ledgers.items():
            for address, record in ledger.stages.items():
                if ledger.complete(record):
                    found.setdefault(address, {})[slide_id] = record
        return {address: Stored(address, found[address]) for address in sorted(found)}

    def account(self) -> Account:
        """The whole account of the folder."""
        parts = [self._commands(), self._cohort(), self._segmentation()]
        for grid in self.results.grids:
            parts.append(self._tiles(grid))
            parts += [self._embeddings(one) for one in self._of(grid, "features_")]
            parts += [self._pooled(one) for one in self._of(grid, "slide_features_")]
        parts += [self._patients(), self._analyses()]
        return sum(parts, Account())

    def _of(self, grid: str, start: str) -> Iterator[Stored]:
        for one in self.stored.values():
            if one.grid == grid and one.name.startswith(start):
                yield one

    def _settings(self, address: str) -> Document:
        """Settings of the newest command that made an address; {} if no record says."""
        for record in reversed(self.records):
            if newest_of([address], [record]):
                return dict(record.document.get("config", {}))
        return {}

    def _commands(self) -> Account:
        """Versions, and commands that did not end."""
        unknown = []
        for record in self.records:
            document = record.document
            if "counts" not in document:
                why = document.get("ended_by") or "killed, or still running"
                unknown.append(
                    f"the outcome of `{document.get('command')}` of "
                    f"{str(document.get('started'))[:16]}, which did not end ({why}): only "
                    "results that are complete are counted here"
                )
        if not self.records:
            unknown.append(
                "versions and settings: the folder has no records of commands"
            )
        return Account(versions=versions_of(self.records), unknown=tuple(unknown))

    def _cohort(self) -> Account:
        """Numbers of slides and patients; slides without a result, and why."""
        slides = self.slides
        damaged = [one.slide_id for one in slides if one.ledger.damage]
        failed = [one for one in slides if one.failure is not None]
        begun = set(self.results.slides) | {one.slide_id for one in slides}
        home = self.results.folder / SLIDES
        waiting = sorted(
            path.name
            for path in home.iterdir()
            if path.is_dir() and path.name not in begun
        )
        number = counted(len(slides) + len(waiting), "whole-slide image")
        patients = {one.cohort.get("patient_id") for one in slides} - {None, ""}
        of_patients = f" of {counted(len(patients), 'patient')}" if patients else ""
        sentences = [f"The cohort has {number}{of_patients}."]
        by_reason: dict[tuple[str, str], list[str]] = {}
        for one in failed:
            assert one.failure is not None
            reason = (one.failure.status, one.failure.error)
            by_reason.setdefault(reason, []).append(one.slide_id)
        for (status, error), names in by_reason.items():
            what = "excluded by quality control" if status == "excluded" else "left out"
            verb = "was" if len(names) == 1 else "were"
            sentences.append(
                f"{counted(len(names), 'slide')} ({shortened(names)}) {verb} {what}: {error}."
            )
        unknown = []
        if damaged:
            unknown.append(f"results of {shortened(damaged)}: their ledger is damaged")
        if waiting:
            unknown.append(
                f"results of {counted(len(waiting), 'slide')} that no command has finished: "
                f"{shortened(waiting)}"
            )
        return Account(sentences=tuple(sentences), unknown=tuple(unknown))

    def _segmentation(self) -> Account:
        """Networks that labelled the pixels of slides."""
        account = Account()
        for one in self.stored.values():
            if one.grid != SLIDES or not one.name.startswith("segment_"):
                continue
            label = one.name.removeprefix("segment_")
            declared = [
                name for name in SEGMENTERS.names() if label.startswith(slug(name))
            ]
            name = max(declared, key=len, default=label)
            method = Method("segmenter", name, counted(len(one.records), "slide"))
            sentence = (
                f"The pixels of {counted(len(one.records), 'slide')} were labelled by the network "
                f"{name}{method.cited}."
            )
            account += Account(sentences=(sentence,), methods=(method,))
        return account

    def _tiles(self, grid: str) -> Account:
        """Reader, tissue and tiles of one grid."""
        tiles = self.stored.get(f"{grid}/{TILES}")
        if tiles is None:
            return Account(
                unknown=(f"tiles of the grid {grid}: their files are missing",)
            )
        tools = tiles.values("imported_from")
        if tools:
            return self._imported(tiles, str(tools[0]))
        numbers = [
            record.facts.get("num_tiles") or 0 for record in tiles.records.values()
        ]
        with_tiles = sum(number > 0 for number in numbers)
        plan: Document = dict(
            next(iter(tiles.records.values())).facts.get("plan") or {}
        )
        readers = self._readers(tiles)
        tissue = self._tissue(tiles)
        settings = self._settings(grid).get("tiles", {})
        mpps = [value for value in tiles.values("tile_mpp") if isinstance(value, float)]
        resolution = "native resolution"
        if mpps:
            resolution = f"{_range(mpps)} µm/px"
        px = plan.get("tile_px")
        words = [f"{px} x {px} px at {resolution}"]
        stride = plan.get("stride_l0", [0])[0]
        size = plan.get("size_l0", [0])[0]
        if stride and size:
            share = 1 - stride / size
            words.append(f"{_percent(share)} overlap" if share > 0 else "no overlap")
        for rule in settings.get("tile_filter", ()):
            if rule == MASK_FILTER:
                words.append(
                    f"at least {_percent(settings['min_tissue_fraction'])} tissue"
                )
            else:
                words.append(f"the filter {rule}")
        sentences = [
            f"The grid {grid} has {sum(numbers):,} tiles of {counted(with_tiles, 'slide')}: "
            f"{', '.join(words)}."
        ]
        empty = len(numbers) - with_tiles
        if empty:
            sentences.append(
                f"{counted(empty, 'slide')} had no tile with enough tissue."
            )
        unknown: tuple[str, ...] = ()
        if not settings:
            unknown = (
                f"tissue fraction and filters of the grid {grid}: no record has them",
            )
        own = Account(sentences=tuple(sentences), unknown=unknown)
        return readers + tissue + own

    def _readers(self, tiles: Stored) -> Account:
        """Which reader opened the slides of a grid, and their resolution."""
        requested = self._settings(tiles.grid).get("slides", {}).get("reader")
        counts: Counter[str] = Counter()
        reopened = []
        mpps = []
        for slide_id in tiles.records:
            facts = self.results.ledgers[slide_id].slide
            if facts.get("mpp_x"):
                mpps.append(float(facts["mpp_x"]))
            if requested not in (AUTO, None):
                counts[str(requested)] += 1
            elif self._was_reopened(slide_id, tiles.grid):
                reopened.append(slide_id)
            elif facts.get("reader"):
                counts[str(facts["reader"])] += 1
        methods = tuple(
            Method("reader", name, counted(number, "slide"))
            for name, number in counts.most_common()
        )
        unknown = []
        if reopened:
            unknown.append(
                f"the reader that opened {shortened(reopened)} for the grid {tiles.grid}: a later "
                "command opened them with another one"
            )
        if not methods:
            return Account(unknown=tuple(unknown))
        named = joined(f"{one.name} ({one.facts}){one.cited}" for one in methods)
        scan = f", at {_range(mpps)} µm/px on level 0" if mpps else ""
        several = "s" if len(methods) > 1 else ""
        where = f"For the grid {tiles.grid}"
        sentence = f"{where}, slides were read by the reader{several} {named}{scan}."
        return Account(sentences=(sentence,), methods=methods, unknown=tuple(unknown))

    def _was_reopened(self, slide_id: str, grid: str) -> bool:
        """True if a command with a reader of its own opened the slide for another grid."""
        for other in self.results.grids:
            tiles = self.stored.get(f"{other}/{TILES}")
            if other == grid or tiles is None or slide_id not in tiles.records:
                continue
            if self._settings(other).get("slides", {}).get("reader", AUTO) != AUTO:
                return True
        return False

    def _tissue(self, tiles: Stored) -> Account:
        """The mask on which the tiles of a grid lie."""
        masks: dict[str, list[str]] = {}
        for slide_id, record in tiles.records.items():
            for need in record.needs:
                if need.startswith((f"{SLIDES}/tissue", f"{SLIDES}/qc_")):
                    masks.setdefault(need, []).append(slide_id)
        account = Account()
        for address, slides in masks.items():
            account += self._mask(address, slides)
        if not masks:
            account += Account(
                unknown=(f"how the tissue of the grid {tiles.grid} was found",)
            )
        return account

    def _mask(self, address: str, slides: list[str]) -> Account:
        """One kind of mask."""
        name = address.rpartition("/")[2]
        if name.startswith("qc_"):
            return self._quality_control(address, slides)
        if "tissue-" in name:
            words = "Tissue was outlined in annotations that were read from files"
        elif "segment" in name:
            words = "Tissue was taken from the classes of the segmentation network"
        else:
            words = "Tissue was found by Thinsection's detector"
        mask_mpps = {
            round(float(value), 2)
            for slide_id in slides
            for value in self._facts(slide_id, address).get("mask_mpp") or ()
        }
        at = f" at {_range(mask_mpps)} µm/px" if mask_mpps else ""
        sentence = f"{words}{at} ({counted(len(slides), 'slide')})."
        return Account(sentences=(sentence,))

    def _facts(self, slide_id: str, address: str) -> Document:
        record = self.results.ledgers[slide_id].stages.get(address)
        return {} if record is None else record.facts

    def _quality_control(self, address: str, slides: list[str]) -> Account:
        """Checks of a pipeline, from the stored result of a slide."""
        stored = self.stored.get(address)
        name = address.rpartition("/")[2].removeprefix("qc_")
        kinds: list[str] = []
        for record in stored.records.values() if stored is not None else ():
            files = [file for file in record.files if file.endswith(f"/{QC_FILE}")]
            if files and not kinds:
                folder = (self.results.folder / files[0]).parent
                try:
                    pipeline = read_qc(folder).document["pipeline"]
                except (StoreError, KeyError):
                    continue
                kinds = [
                    str(check.get("kind", "")) for check in pipeline.get("check", ())
                ]
        if not kinds:
            return Account(
                sentences=(f"Tissue and artefacts were found by the pipeline {name}.",),
                unknown=(
                    f"the checks of the quality control {name}: no stored result has them",
                ),
            )
        methods = tuple(Method("qc_check", kind) for kind in dict.fromkeys(kinds))
        keys = [key for method in methods for key in method.keys]
        sentence = (
            f"Tissue and artefacts were found by quality control with the pipeline {name} "
            f"({counted(len(slides), 'slide')}): {joined(one.name for one in methods)}"
            f"{citation_of(keys)}."
        )
        return Account(sentences=(sentence,), methods=methods)

    def _imported(self, tiles: Stored, tool: str) -> Account:
        """Coordinates that another tool made."""
        method = Method("tool", tool, counted(len(tiles.records), "slide"))
        numbers = [
            record.facts.get("num_tiles") or 0 for record in tiles.records.values()
        ]
        sentence = (
            f"The grid {tiles.grid} has {sum(numbers):,} tiles of "
            f"{counted(len(numbers), 'slide')}, which were imported from {tool}{method.cited}."
        )
        unknown = (
            f"version and settings of {tool}, and how it found the tissue of the grid "
            f"{tiles.grid}: its files do not say",
        )
        return Account(sentences=(sentence,), methods=(method,), unknown=unknown)

    def _embeddings(self, one: Stored) -> Account:
        """Tile embeddings of one encoder."""
        name = one.value("encoder")
        tools = one.values("imported_from")
        sentences = []
        facts = [f"{one.value('dim')} dimensions"]
        unknown = []
        seed = _SEED.search(one.name)
        weights = self._settings(one.address).get("encode", {}).get("weights")
        if seed is not None:
            facts.append(f"random weights (seed {seed[1]}), not the published ones")
        elif weights:
            facts.append("weights of the user's own file")
        for fact, words in (
            ("revision", "commit"),
            ("weights_hash", "SHA-256 of the weights"),
        ):
            if one.value(fact):
                facts.append(f"{words} {one.value(fact)[:_SHOWN_HASH]}")
        for fact in ("precision", "engine"):
            if one.value(fact):
                facts.append(one.value(fact))
        fingerprint = one.value("fingerprint")
        if fingerprint.startswith("none"):
            fingerprint = "not compared with the authors' code"
        if fingerprint:
            facts.append(fingerprint)
        facts.append(counted(len(one.records), "slide"))
        method = Method("tile_encoder", name, ", ".join(facts))
        stain = _STAIN.search(one.name)
        methods = [method]
        normalised = ""
        if stain is not None:
            methods.append(
                Method("stain", stain[1], counted(len(one.records), "slide"))
            )
            normalised = (
                f"; the stain of the tiles was normalised before by {stain[1].capitalize()}'s "
                f"method{methods[-1].cited}"
            )
        if tools:
            unknown.append(
                f"weights, precision and preprocessing of {name}, whose embeddings {tools[0]} made"
            )
        tiles = self.stored.get(f"{one.grid}/{TILES}")
        waiting = sorted(tiles.records.keys() - one.records.keys()) if tiles else []
        if waiting:
            unknown.append(
                f"embeddings of {shortened(waiting)} by {name} on the grid {one.grid}: no command "
                "has finished them"
            )
        if not method.is_known:
            source = f"the reference of the tile encoder {name}"
            if name in map(str, tools):
                source = f"which tile encoder {name} used: its files do not name it"
            unknown.append(source)
        licence = declared_encoders().get(name)
        sentences.append(
            f"Tiles of the grid {one.grid} were embedded by {name}{method.cited} ({method.facts})"
            f"{normalised}."
        )
        if licence is not None and seed is None and not tools:
            sentences[-1] = sentences[-1].replace(
                f"({method.facts})", f"({method.facts}; licence {licence.licence})"
            )
        return Account(
            sentences=tuple(sentences), methods=tuple(methods), unknown=tuple(unknown)
        )

    def _pooled(self, one: Stored) -> Account:
        """Slide embeddings of one slide encoder."""
        label = one.value("slide_encoder")
        name = label.partition(":")[0]
        records = one.records
        facts = [f"{one.value('slide_dim')} dimensions"]
        unknown = []
        if name not in _POOLED_BY_RULE:
            digest = self._weights_of(one)
            if digest:
                facts.append(f"SHA-256 of the weights {digest[:_SHOWN_HASH]}")
            else:
                unknown.append(f"weights of the slide encoder {label}")
        facts.append(counted(len(records), "slide"))
        method = Method("slide_encoder", name, ", ".join(facts))
        if not method.is_known:
            unknown.append(f"the reference of the slide encoder {name}")
        needs = next(iter(records.values())).needs
        tiles = (
            needs[0].rpartition("/")[2].removeprefix("features_")
            if needs
            else "the grid"
        )
        sentence = (
            f"The embeddings of {tiles} on the grid {one.grid} were pooled to slide embeddings by "
            f"{label}{method.cited} ({method.facts})."
        )
        return Account(sentences=(sentence,), methods=(method,), unknown=tuple(unknown))

    def _weights_of(self, one: Stored) -> str:
        """Checksum of a slide encoder's weights, from the file of a slide; '' if it has none."""
        for record in one.records.values():
            for file in record.files:
                path = self.results.folder / file
                if path.is_file():
                    try:
                        with open_h5(path) as opened:
                            return str(opened.attrs.get("weights_hash", ""))
                    except StoreError:
                        continue
        return ""

    def _patients(self) -> Account:
        """Embeddings of patients, which no ledger has."""
        sentences = []
        for folder in sorted(self.results.folder.glob("*/patient_features_*")):
            number = len(list(folder.glob("*.h5")))
            if number:
                name = folder.name.removeprefix("patient_features_")
                how = "all their tiles" if name.endswith("_early") else "their slides"
                sentences.append(
                    f"Embeddings of {counted(number, 'patient')} on the grid {folder.parent.name} "
                    f"were made from {how} ({name})."
                )
        return Account(sentences=tuple(sentences))

    def _analyses(self) -> Account:
        """Measures, heatmaps and zero-shot scores."""
        account = Account()
        for one in self.stored.values():
            if one.name == MEASURED:
                method = Method("stain", "measures", counted(len(one.records), "slide"))
                account += Account(
                    sentences=(
                        f"Colours, focus and stains of the tiles of the grid {one.grid} were "
                        f"measured; stain vectors are those of Macenko's method{method.cited}.",
                    ),
                    methods=(method,),
                )
        for command in ("zeroshot", "heatmap"):
            ended = [
                record
                for record in self.records
                if record.document.get("command") == command
                and record.document.get("counts", {}).get("predicted")
            ]
            if ended:
                method = Method("analysis", command, counted(len(ended), "command"))
                words = "Heatmaps of a trained model were drawn"
                if command == "zeroshot":
                    words = (
                        "Tiles and slides were scored for classes that texts describe"
                    )
                account += Account(
                    sentences=(f"{words}{method.cited}.",), methods=(method,)
                )
        return account


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"


def _range(values: Iterable[float]) -> str:
    """'0.25', or '0.25 to 0.5'."""
    numbers = sorted(values)
    low = f"{numbers[0]:.4g}"
    high = f"{numbers[-1]:.4g}"
    return low if low == high else f"{low} to {high}"

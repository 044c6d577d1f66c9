"""Audit of a cohort before training: causes of a too good score, and facts that cannot be known.

A finding is a warning if it would be very unlikely in a clean cohort, else a note. The audit also
lists what the embeddings and the table cannot show.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from thinsection.config import Settings, section
from thinsection.evaluation.cases import listed_names, patient_of
from thinsection.evaluation.copies import CopyPair, ReadRows, copied_slides
from thinsection.evaluation.embeddings import open_embeddings
from thinsection.evaluation.label_values import LabelsConfig
from thinsection.evaluation.labels import Cohort
from thinsection.evaluation.leaks import Contents, read_labelled
from thinsection.evaluation.metrics import Counts, IndexArray
from thinsection.evaluation.tables import read_rows
from thinsection.files.missing_cells import is_missing
from thinsection.slide.ids import plain_id
from thinsection.types import Reals, counted

PERMUTATIONS = (
    1999  # number of permutations of classes between patients, for the test of sites
)
MAX_P = 1e-3  # p value below which the site is said to be associated with the class
MAX_P_DETERMINED = 0.05  # the same limit if the site determines the class
# largest number of values of a column that may be the target under another name
MAX_VALUES = 10
# rows of embeddings that are kept for the search of copies, which compares a slide several times
KEPT_BYTES = 64 << 20
_PARTS = re.compile(r"[^\W\d_]+|\d+")


@dataclass(frozen=True, kw_only=True, repr=False)
class AuditConfig(Settings):
    """Settings of `thinsection audit`."""

    labels: LabelsConfig = section(LabelsConfig)


@dataclass(frozen=True, kw_only=True)
class SiteTable:
    """Patients by site and class, and a test of their association."""

    sites: tuple[str, ...]
    classes: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]  # number of patients of each site and class
    p_value: float  # for no association
    test: str  # name of the test
    cramers_v: float  # 1 if the site determines the class


@dataclass(frozen=True, kw_only=True, repr=False)
class Audit:
    """Findings as sentences, and the figures behind them."""

    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    unknown: tuple[str, ...]  # facts that cannot be known
    copies: tuple[CopyPair, ...]  # pairs of slides, as indices in the cohort
    copied_slides: tuple[tuple[str, str], ...]  # names of the slides of each pair
    sites: SiteTable | None
    # why a slide of the folder cannot be used, by slide id
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        counts = [
            counted(len(self.warnings), "warning"),
            counted(len(self.notes), "note"),
            f"{len(self.unknown)} unknown",
        ]
        return f"Audit({', '.join(counts)}; print it for the sentences)"

    def __str__(self) -> str:
        return "\n".join(self.lines)

    @property
    def lines(self) -> Iterator[str]:
        """Lines for the user, warnings first."""
        for line in self.warnings:
            yield f"warning: {line}"
        yield from self.notes
        for line in self.unknown:
            yield f"cannot be known: {line}"
        for slide, reason in self.left_out.items():
            yield f"{slide}: left out: {reason}"


def audit_features(data: Path, config: LabelsConfig) -> Audit:
    """Audits labels and embeddings; nothing is trained.

    Memory: as `read_labelled`. Raises DatasetError, ConfigError: as `read_labelled`.
    """
    cohort, contents, left_out = read_labelled(data, config)
    return replace(audit(cohort, contents, config), left_out=left_out)


def audit(
    cohort: Cohort, contents: Contents, config: LabelsConfig, splits: Path | None = None
) -> Audit:
    """Audits a cohort whose embeddings were read.

    Args:
        cohort: cases with labels.
        contents: their embeddings.
        config: the table of labels.
        splits: file of splits, if the folds are not drawn.
    """
    found = audit_rows(
        cohort,
        contents,
        read=reader_of(cohort),
        splits="" if splits is None else splits.name,
    )
    column_warnings, column_notes = _column_findings(cohort, config)
    return replace(
        found,
        warnings=(*found.warnings, *column_warnings),
        notes=(*found.notes, *column_notes),
    )


def audit_rows(
    cohort: Cohort,
    contents: Contents | None,
    *,
    read: ReadRows,
    leaks: Sequence[str] = (),
    splits: str = "",
) -> Audit:
    """Audits cases, their patients and sites, and their embeddings.

    Args:
        cohort: cases with labels.
        contents: their embeddings; None if they are not known.
        read: reads some tiles' embeddings of the slide with this index.
        leaks: warnings on what training and test sets share.
        splits: name of the file of splits, if the folds are not drawn.
    """
    warnings = [*leaks, *_id_warnings(cohort)]
    notes = []
    unknown = [
        "whether two ids are one person with tissue from two places, such as a biopsy and a "
        "resection: embeddings do not show it"
    ]
    copies: list[CopyPair] = []
    if contents is None:
        unknown.append("which slides are copies of others: there are no embeddings")
    else:
        copies, copy_words = copies_between_patients(cohort, contents, read)
        if copies:
            warnings.append(copy_words)
        else:
            notes.append("no copies of slides under other names were found")
    sites = site_by_class(cohort)
    if sites is not None:
        words = _site_words(cohort, sites)
        (warnings if _follows(sites) else notes).append(words)
    else:
        unknown.append(
            "whether the site is associated with the target: no site is known; name its "
            "column with --site"
        )
    if cohort.unit != "patients":
        unknown.append(
            "which slides are of one patient: patients unknown, so each slide counts as one"
        )
        if splits:
            warnings.append(
                f"no patient id supports the split in {splits}: whether a patient is on two "
                "sides cannot be checked; add a column patient_id"
            )
    names = [slide for slides in cohort.slides for slide in slides]
    return Audit(
        warnings=tuple(warnings),
        notes=tuple(notes),
        unknown=tuple(unknown),
        copies=tuple(copies),
        copied_slides=tuple((names[one.first], names[one.second]) for one in copies),
        sites=sites,
    )


def copies_between_patients(
    cohort: Cohort, contents: Contents, read: ReadRows
) -> tuple[list[CopyPair], str]:
    """Pairs of slides of different patients that look like copies, and a sentence on them.

    `read` reads some tiles' embeddings of the slide with this index.
    """
    names = [slide for slides in cohort.slides for slide in slides]
    counts = [len(slides) for slides in cohort.slides]
    cases_of_slides = np.repeat(cohort.groups.codes, counts)
    copies = copied_slides(
        contents.directions,
        contents.sampled_tiles,
        cases_of_slides,
        read,
        digests=contents.digests,
        num_tiles=contents.num_tiles,
    )
    pairs = [f"{names[one.first]!r} and {names[one.second]!r}" for one in copies]
    words = (
        f"{counted(len(copies), 'pair')} of slides of different patients look like copies "
        f"({listed_names(pairs)}): rescans, other tiles or another scale of one slide; remove "
        "one of each, or give both one patient_id"
    )
    return copies, words


def reader_of(cohort: Cohort) -> ReadRows:
    """Reads rows of the embeddings of the slide with an index from its file.

    The file was checked when its contents were read (`read_contents`).

    Memory: the rows, and KEPT_BYTES of rows that are read once.
    """
    files = [path for paths in cohort.paths for path in paths]
    kept: dict[tuple[int, int], Reals] = {}

    def read(slide: int, rows: IndexArray) -> Reals:
        key = (slide, len(rows))
        if key in kept:
            return kept[key]
        tiles = open_embeddings(files[slide], verify=False)[rows]
        if sum(own.nbytes for own in kept.values()) + tiles.nbytes <= KEPT_BYTES:
            kept[key] = tiles
        return tiles

    return read


def id_key(text: str) -> tuple[str, ...]:
    """Letters and numbers of an id: PAT-001, PAT_001 and pat1 have the same key."""
    parts = _PARTS.findall(plain_id(text).casefold())
    return tuple(part.lstrip("0") or "0" if part.isdigit() else part for part in parts)


def _id_warnings(cohort: Cohort) -> Iterator[str]:
    """A warning if ids of different patients differ only in their spelling."""
    by_key: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for patient in cohort.patients:
        # a slide's name is no id of a patient, unless a barcode names one
        by_key[id_key(patient_of(patient))].add(patient)
    alike = [sorted(names) for names in by_key.values() if len(names) > 1]
    if alike:
        pairs = [" and ".join(map(repr, names[:2])) for names in alike]
        yield (
            f"ids of {counted(len(alike), 'patient')} are written in two ways "
            f"({listed_names(pairs)}): if they are one person, training and test set share "
            "patients; write both ids in the same way"
        )


def site_by_class(cohort: Cohort) -> SiteTable | None:
    """Patients by site and class (event, quarter of the values); None if sites are unknown."""
    if not cohort.sites or len(set(cohort.sites)) < 2:
        return None
    first = np.unique(cohort.groups.codes, return_index=True)[1]
    strata = cohort.strata[first]
    site_names, site = np.unique(np.array(cohort.sites)[first], return_inverse=True)
    kinds, kind = np.unique(strata, return_inverse=True)
    if len(kinds) < 2 or len(site_names) < 2:
        return None
    counts = _crossed(site, kind)
    p_value, test = association(site, kind)
    return SiteTable(
        sites=tuple(site_names.tolist()),
        classes=tuple(_stratum_name(cohort, int(one)) for one in kinds),
        counts=tuple(tuple(row) for row in counts.tolist()),
        p_value=p_value,
        test=test,
        cramers_v=float(
            (_chi2(counts) / counts.sum() / (min(counts.shape) - 1)) ** 0.5
        ),
    )


def _stratum_name(cohort: Cohort, stratum: int) -> str:
    target = cohort.target
    if target.exclusive:
        return target.names[stratum]
    if target.kind == "multilabel":
        return "rarest value of a label" if stratum else "other values"
    if target.kind == "regression":
        return f"quarter {stratum + 1}"
    return "event" if stratum else "censored"


def _crossed(site: IndexArray, kind: IndexArray) -> Counts:
    columns = int(kind.max()) + 1
    cells = np.bincount(
        site * columns + kind, minlength=(int(site.max()) + 1) * columns
    )
    return cells.reshape(-1, columns)


def _chi2(counts: Counts) -> float:
    expected = counts.sum(axis=1, keepdims=True) * counts.sum(axis=0) / counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def association(
    site: IndexArray, kind: IndexArray, *, permutations: int = PERMUTATIONS
) -> tuple[float, str]:
    """p value for no association: Fisher's exact test, or chi-square by permutations.

    `site` and `kind` are numbers of the site and class of each patient, (n,).
    """
    from scipy.stats import fisher_exact

    counts = _crossed(site, kind)
    if counts.shape == (2, 2):
        return float(fisher_exact(counts).pvalue), "Fisher's exact test"
    rng = np.random.default_rng(0)
    observed = _chi2(counts) - 1e-9
    as_far = sum(
        _chi2(_crossed(site, rng.permutation(kind))) >= observed
        for _ in range(permutations)
    )
    words = f"chi-square, {permutations} permutations of patients"
    return (1 + as_far) / (1 + permutations), words


def _follows(sites: SiteTable) -> bool:
    """True if the site is associated with the class more than chance explains."""
    is_determined = sites.cramers_v > 1 - 1e-9
    return sites.p_value < MAX_P or (is_determined and sites.p_value < MAX_P_DETERMINED)


def _site_words(cohort: Cohort, sites: SiteTable) -> str:
    target = ", ".join(cohort.target.columns)
    if cohort.target.time_words:
        target = f"{cohort.target.columns[0]} (event or censored)"
    if sites.cramers_v > 1 - 1e-9:
        relation = f"the site alone determines {target}"
    elif _follows(sites):
        relation = f"the site is associated with {target}"
    else:
        relation = f"no sign that the site is associated with {target}"
    figures = (
        f"{counted(len(sites.sites), 'site')}, {cohort.groups.words}, "
        f"p {sites.p_value:.3g} ({sites.test}), Cramér's V {sites.cramers_v:.2f}"
    )
    if not _follows(sites):
        return f"{relation}: {figures}"
    return (
        f"{relation}: {figures}; a model that knows only the site gets a good score; see the score "
        "within sites, or test with --fold-unit each-site"
    )


def _column_findings(
    cohort: Cohort, config: LabelsConfig
) -> tuple[list[str], list[str]]:
    """Warnings and notes on columns that are the target with other names of its values."""
    assert config.labels is not None
    rows = read_rows(Path(config.labels), ())
    target = cohort.target.columns[0]
    if target not in rows[0]:
        return [], []
    warnings = []
    notes = []
    for column in rows[0]:
        if column == target or not _is_renamed(rows, column, target):
            continue
        words = f"column {column} equals {target}, in other words"
        if column in (config.site, *config.subgroup):
            warnings.append(f"{words}: scores within its groups mean nothing")
        else:
            notes.append(f"{words}; it is not used")
    return warnings, notes


def _is_renamed(rows: Sequence[dict[str, str]], column: str, target: str) -> bool:
    """True if each value of one column always goes with the same value of the other."""
    pairs = {
        (row[column], row[target])
        for row in rows
        if not is_missing(row[column]) and not is_missing(row[target])
    }
    values = {value for value, _ in pairs}
    targets = {value for _, value in pairs}
    return 2 <= len(pairs) == len(values) == len(targets) <= MAX_VALUES

"""Inventory of a TIFF: its pictures, and the pages that hold their levels. No pixel is read.

A page is a level of a larger page if the file says so: by the flag "reduced image", as a SubIFD,
or in OME-XML. In a file that flags no page (SVS), tiled pages with the same shape are levels. The
pixels of a level are compared once they can be read (`slide/level_check.py`); the results of that
comparison come back as `verdicts`.

Source: TIFF 6.0, tags 254 and 330; OME-TIFF 6.0, TiffData; Aperio's SVS, as OpenSlide reads it.
"""

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from tifffile import TiffFile, TiffPage

from thinsection.slide.formats.tiff_pages import (
    OmeImage,
    aperio_mpp,
    aperio_words,
    parse_ome_images,
    segment_size,
    tag_mpp,
)
from thinsection.slide.level_check import OTHER, Verdicts
from thinsection.slide.pictures import (
    Picture,
    PictureLevel,
    Role,
    role_of_name,
)
from thinsection.types import Mpp, Size

# SubIFDs of each page, by the offset of the page
SubIfds = Mapping[int, list[TiffPage]]
_ASPECT_TOLERANCE = 0.02
# tolerance between a level's stored size and the size that its scale implies
ROUNDED_PX = 1.5
# a smaller difference in resolution: the page copied the value of its base
_SAME_SCALE = 1e-3
_REDUCED = 1  # bits of NewSubfileType
_MASK = 4
_APERIO_MACRO = 9  # NewSubfileType of an Aperio macro; an Aperio label has 1
_PAGE_NAME_TAG = 285
_NDPI_LENS_TAG = 65421
# lens -2 is a map of the glass
_NDPI_ROLES: Mapping[float, Role] = {-1.0: "macro", -2.0: "other"}
_QPI_TYPE = re.compile(r"<ImageType>\s*(\w+)\s*</ImageType>")
_QPI_ROLES: Mapping[str, Role] = {
    "thumbnail": "thumbnail",
    "overview": "macro",
    "label": "label",
}
_MAX_NAME = 80  # longest page name or description, in characters, that can be a name


@dataclass(kw_only=True)
class TiffPicture:
    """A picture of a TIFF while the inventory is made.

    Attributes:
        base: page of its finest level.
        role: slide, label, macro, thumbnail, plane or other.
        rule: reason for the role.
        name: name in the file.
        mpp: resolution that the file states.
        levels: pages of the levels below the base, finest first.
        possible: pages that could be its levels, but were given to another picture.
        plane: number or position of its focal plane; its levels are pages of the same plane.
        has_own_levels: True if its SubIFDs are its levels; then no other page is added as a level.
        ome: OME-XML metadata of the picture.
        has_failed: True if the file calls it a level of another picture, but it is not one.
    """

    base: TiffPage
    role: Role
    rule: str
    name: str = ""
    mpp: Mpp | None = None
    levels: list[TiffPage] = field(default_factory=list)
    possible: list[TiffPage] = field(default_factory=list)
    plane: str = ""
    has_own_levels: bool = False
    ome: OmeImage | None = None
    has_failed: bool = False

    @property
    def pages(self) -> list[TiffPage]:
        """Pages of all levels, finest first."""
        return [self.base, *self.levels]

    def described(self, number: int) -> Picture:
        """Returns the entry of the picture for the list that the user sees."""
        levels = []
        for page in self.pages:
            levels.append(
                PictureLevel(
                    size=page_size(page),
                    downsample=stated_downsample(page, self.base),
                    mpp=tag_mpp(page),
                )
            )
        return Picture(
            number=number,
            name=self.name,
            role=self.role,
            rule=self.rule,
            size=page_size(self.base),
            mpp=self.mpp,
            levels=tuple(levels),
        )


def find_pictures(
    file: TiffFile,
    chain: Sequence[TiffPage],
    sound: Container[int],
    verdicts: Verdicts,
) -> list[TiffPicture]:
    """Returns the pictures of a file, in the order of their pages or of their OME images.

    Args:
        file: the file.
        chain: the top-level pages.
        sound: offsets of the pages with sound sizes, SubIFDs included; other pages are left out.
        verdicts: results of the pixel comparison, for pages that were taken for levels.
    """
    images = parse_ome_images(file.ome_metadata or "", file.filename)
    pages = [page for page in chain if page.offset in sound]
    below = {
        page.offset: [each for each in page.pages or () if each.offset in sound]
        for page in pages
    }
    if images and all(image.fits(len(chain)) for image in images):
        return _ome_pictures(pages, below, images, verdicts)
    return _page_pictures(pages, below, verdicts)


def page_size(page: TiffPage) -> Size:
    """Returns (width, height) of a page."""
    return (int(page.imagewidth), int(page.imagelength))


def stated_downsample(page: TiffPage, base: TiffPage) -> float | None:
    """Returns how many pixels of `base` one pixel of `page` spans, by their resolution tags.

    Returns None if a tag is missing, or if the page only copied the resolution of the base.
    """
    if page is base:
        return 1.0
    page_mpp = tag_mpp(page)
    base_mpp = tag_mpp(base)
    if page_mpp is None or base_mpp is None:
        return None
    x_ratio = page_mpp[0] / base_mpp[0]
    y_ratio = page_mpp[1] / base_mpp[1]
    if min(x_ratio, y_ratio) <= 1 + _SAME_SCALE:
        return None
    if abs(x_ratio / y_ratio - 1) > _ASPECT_TOLERANCE:
        return None
    return (x_ratio + y_ratio) / 2


def padded_downsample(page: TiffPage, base: TiffPage) -> float | None:
    """Returns the downsample that a page states if its size is over 1.5 px off, else None."""
    downsample = stated_downsample(page, base)
    if downsample is None:
        return None
    sides = zip(page_size(base), page_size(page))
    if all(abs(whole / downsample - side) <= ROUNDED_PX for whole, side in sides):
        return None
    return downsample


# pages that state their own role


def _stated_picture(page: TiffPage, *, aperio: bool) -> TiffPicture | None:
    """Returns the picture of a page that states another role than slide; None for other pages."""
    flag = int(page.subfiletype)
    if flag & _MASK:
        return TiffPicture(base=page, role="other", rule="flagged as a mask")
    if page.bitspersample == 1:
        return TiffPicture(base=page, role="other", rule="has 1 bit per pixel")
    lens = page.tags.valueof(_NDPI_LENS_TAG)
    if isinstance(lens, float) and lens in _NDPI_ROLES:
        return TiffPicture(
            base=page, role=_NDPI_ROLES[lens], rule=f"lens {lens:g} in tag 65421"
        )
    description = str(page.description or "")
    kind = _QPI_TYPE.search(description[:4000])
    if kind is not None:
        role = _QPI_ROLES.get(kind[1].lower())
        rule = f"ImageType {kind[1]}"
    else:
        role, rule = _role_by_words(page, description)
    if role is None and aperio and not page.is_tiled and page.index > 1:
        role = "macro" if flag == _APERIO_MACRO else "label" if flag == 1 else None
        rule = f"Aperio's flag {flag}"
    if role is None:
        return None
    return TiffPicture(base=page, role=role, rule=rule, name=role)


def _role_by_words(page: TiffPage, description: str) -> tuple[Role | None, str]:
    """Returns the role in a page's name or description, and the words that name the role."""
    lines = description.splitlines()[:2]
    for line in lines:
        role = role_of_name(line.split(" ", 1)[0]) if line else None
        if role is not None:
            return role, f"its description begins with {line.split(' ', 1)[0]!r}"
    name = str(page.tags.valueof(_PAGE_NAME_TAG) or "")
    for text in (name, description):
        is_name = 0 < len(text) <= _MAX_NAME and "|" not in text
        role = role_of_name(text) if is_name else None
        if role is not None:
            return role, f"named {text.strip()!r}"
    return None, ""


# files without OME-XML


def _page_pictures(
    pages: Sequence[TiffPage], below: SubIfds, verdicts: Verdicts
) -> list[TiffPicture]:
    """Returns the pictures of a file's top-level pages and of their SubIFDs."""
    aperio = any(str(page.description).startswith("Aperio") for page in pages)
    pictures: list[TiffPicture] = []
    free: list[TiffPage] = []
    for page in _without_further_channels(pages):
        stated = _stated_picture(page, aperio=aperio)
        if stated is not None:
            pictures.append(stated)
        elif below[page.offset]:
            pictures += _family(page, below[page.offset], verdicts)
        else:
            free.append(page)
    pictures += _group(free, pictures, verdicts, aperio=aperio)
    # refused levels come last, so that the numbers of the other pictures do not change
    return sorted(pictures, key=lambda each: (each.has_failed, each.base.offset))


def _without_further_channels(pages: Sequence[TiffPage]) -> list[TiffPage]:
    """Returns the pages without further channels: later gray pages of the same size and type."""
    seen = set()
    kept = []
    for page in pages:
        key = (page_size(page), page.dtype, int(page.subfiletype), page.is_tiled)
        if page.samplesperpixel == 1 and not str(page.description).startswith("Aperio"):
            if key in seen and not _role_by_words(page, str(page.description))[0]:
                continue
            seen.add(key)
        kept.append(page)
    return kept


def _family(
    page: TiffPage, below: Sequence[TiffPage], verdicts: Verdicts
) -> list[TiffPicture]:
    """Returns the picture of a page with SubIFDs, and pictures of SubIFDs that are not its levels.

    The largest of these pages is the finest level, wherever it stands in the file.
    """
    family = sorted([page, *below], key=_area, reverse=True)
    base = family[0]
    rule = "a page with SubIFDs" if base is page else f"SubIFD of page {page.index}"
    picture = TiffPicture(
        base=base, role="slide", rule=rule, mpp=tag_mpp(base), has_own_levels=True
    )
    others = []
    for member in family[1:]:
        if _may_be_level(member, base) and _accepted(base, member, verdicts):
            picture.levels.append(member)
        else:
            others.append(_failed(member, base, "a SubIFD"))
    return [picture, *others]


def _group(
    pages: Sequence[TiffPage],
    pictures: Sequence[TiffPicture],
    verdicts: Verdicts,
    *,
    aperio: bool,
) -> list[TiffPicture]:
    """Returns the pictures of pages without SubIFDs; a page that is a level joins a larger page.

    Args:
        pages: the pages.
        pictures: known pictures; they get no further level.
        verdicts: results of the pixel comparison.
        aperio: True for an Aperio file, which flags its labels but not its levels.
    """
    tiled = [page for page in pages if page.is_tiled]
    flags = not aperio and any(_is_flagged(page) for page in tiled)
    striped = [page for page in pages if not page.is_tiled]
    full = _full_pages_in_strips(striped, tiled) if flags else []
    found: list[TiffPicture] = []
    for page in sorted([*tiled, *full], key=lambda page: (-_area(page), page.index)):
        plane = aperio_words(page).get("OffsetZ", "")
        claims = "flagged as reduced" if flags else "a tiled page of its shape"
        if not flags or _is_flagged(page):
            of_plane = [picture for picture in found if picture.plane == plane]
            parents = _possible_parents(page, of_plane, verdicts)
            if _add_level(page, parents, verdicts):
                continue
            if parents:
                found.append(_failed(page, parents[0].base, claims, plane=plane))
                continue
        found.append(_base_picture(page, found, plane))
    rest = [page for page in striped if page not in full]
    known = [*pictures, *found]
    for page in sorted(rest, key=lambda page: (-_area(page), page.index)):
        picture = _striped_picture(page, known, aperio=aperio)
        found.append(picture)
        known.append(picture)
    return found


def _full_pages_in_strips(
    striped: Sequence[TiffPage], tiled: Sequence[TiffPage]
) -> list[TiffPage]:
    """Returns the striped pages that can be the full slide above tiled pages flagged as reduced.

    Some programs (GDAL) add tiled, reduced pages to a file whose slide is stored in strips. A
    striped page that has the shape of a larger striped page is the thumbnail of that page.
    """
    bases = [page for page in tiled if not _is_flagged(page)]
    orphans = [
        page
        for page in tiled
        if _is_flagged(page) and not any(_may_be_level(page, base) for base in bases)
    ]
    return [
        page
        for page in striped
        if not _is_flagged(page)
        and any(_may_be_level(orphan, page) for orphan in orphans)
        and not any(_has_shape_of(page, other) for other in striped)
    ]


def _possible_parents(
    page: TiffPage, pictures: Sequence[TiffPicture], verdicts: Verdicts
) -> list[TiffPicture]:
    """Returns the pictures that a page can be a level of.

    Pictures that accept the page's pixels go before those that refuse them. Among these, the best
    match counts: the shape fits at the scale that the page states; else it fits apart from padding;
    else only the aspect ratio fits.
    """
    fitting = [each for each in pictures if _may_be_level(page, each.base)]
    accepting = [each for each in fitting if _accepted(each.base, page, verdicts)]
    fitting = accepting or fitting
    exact = [
        each
        for each in fitting
        if _has_shape_of(page, each.base) and padded_downsample(page, each.base) is None
    ]
    padded = [each for each in fitting if _is_padded_level(page, each.base)]
    return exact or padded or fitting


def _add_level(
    page: TiffPage, parents: Sequence[TiffPicture], verdicts: Verdicts
) -> bool:
    """Makes a page a level of one of the pictures; returns False if all of them refuse the page.

    First choice is a picture whose pixels agree, then the nearest earlier page, then any. The other
    pictures remember the page as possible, so that its pixels are compared with theirs too.
    """
    willing = [
        picture
        for picture in parents
        if _accepted(picture.base, page, verdicts)
        and page_size(page) not in [page_size(level) for level in picture.levels]
    ]
    if not willing:
        return False
    agreed = [p for p in willing if (p.base.offset, page.offset) in verdicts]
    before = [picture for picture in willing if picture.base.index < page.index]
    nearest = sorted(before, key=lambda picture: -picture.base.index)
    parent = (agreed or nearest or willing)[0]
    for picture in parents:
        if picture is not parent and (picture.base.offset, page.offset) not in verdicts:
            picture.possible.append(page)
    parent.levels.append(page)
    return True


def _base_picture(
    page: TiffPage, found: Sequence[TiffPicture], plane: str
) -> TiffPicture:
    """Returns the picture of a page that is no level: a slide, or a further focal plane."""
    words = aperio_words(page)
    picture = TiffPicture(
        base=page,
        role="slide",
        rule="a page of its own",
        mpp=aperio_mpp(words) or tag_mpp(page),
        plane=plane,
    )
    if not plane:
        return picture
    picture.name = f"OffsetZ {plane}"
    picture.rule = f"focal plane {plane}, the nearest to 0"
    for other in found:
        if page_size(other.base) != page_size(page) or other.role != "slide":
            continue
        further = picture
        if abs(_position(plane)) < abs(_position(other.plane)):
            further = other
        further.role = "plane"
        further.rule = f"focal plane {further.plane}"
        break
    return picture


def _striped_picture(
    page: TiffPage, known: Sequence[TiffPicture], *, aperio: bool
) -> TiffPicture:
    """Returns the picture of a striped page: a thumbnail if a larger slide has the same shape."""
    picture = TiffPicture(
        base=page, role="slide", rule="a page of its own", mpp=tag_mpp(page)
    )
    slides = [each.base for each in known if each.role == "slide"]
    if aperio and page.index == 1:
        picture.role = "thumbnail"
        picture.rule = "second page of an Aperio file, in strips"
        picture.name = "thumbnail"
        picture.mpp = None
    elif any(_has_shape_of(page, base) for base in slides):
        picture.role = "thumbnail"
        picture.rule = "smaller, in strips, and of the slide's shape"
    elif slides and _is_flagged(page):
        picture.role = "other"
        picture.rule = "flagged as reduced, of another shape than any slide"
    return picture


def _failed(
    page: TiffPage, base: TiffPage, claim: str, *, plane: str = ""
) -> TiffPicture:
    """Returns the picture of a page that the file calls a level, but that is not one."""
    if _may_be_level(page, base):
        rule = f"{claim}, but its pixels are not those of the larger page"
    else:
        rule = f"{claim}, but of another shape or kind than the larger page"
    return TiffPicture(
        base=page,
        role="other",
        rule=rule,
        mpp=tag_mpp(page),
        plane=plane,
        has_failed=True,
    )


# OME-TIFF


def _ome_pictures(
    pages: Sequence[TiffPage],
    below: SubIfds,
    images: Sequence[OmeImage],
    verdicts: Verdicts,
) -> list[TiffPicture]:
    """Returns the pictures of an OME-TIFF in the order of its images."""
    by_index = {page.index: page for page in pages}
    pictures: list[TiffPicture] = []
    listed = set()
    for image in images:
        listed |= set(image.planes.values())
        pictures += _image_pictures(image, by_index, below, verdicts)
    pictures = _without_flattened_levels(pictures, verdicts)
    free = [page for page in pages if page.index not in listed]
    for page in free:
        picture = _stated_picture(page, aperio=False)
        if picture is None:
            parents = []
            if page.is_tiled:
                open_pictures = [each for each in pictures if not each.has_own_levels]
                parents = _possible_parents(page, open_pictures, verdicts)
            if _add_level(page, parents, verdicts):
                continue
            if parents:
                picture = _failed(page, parents[0].base, "a page beside the images")
            else:
                picture = _striped_picture(page, pictures, aperio=False)
        pictures.append(picture)
    for picture in pictures:
        picture.levels.sort(key=_area, reverse=True)
    return pictures


def _image_pictures(
    image: OmeImage,
    by_index: Mapping[int, TiffPage],
    below: SubIfds,
    verdicts: Verdicts,
) -> list[TiffPicture]:
    """Returns the pictures of one OME image: its first plane, and further planes with 8 bits."""
    pictures: list[TiffPicture] = []
    for number, ((z, t), index) in enumerate(image.first_channels()):
        page = by_index.get(index)
        if page is None:
            continue
        family = _family(page, below[page.offset], verdicts)
        picture = family[0]
        picture.has_own_levels = bool(below[page.offset])
        picture.mpp = image.mpp
        picture.ome = image
        picture.name = image.name
        role = role_of_name(image.name)
        picture.role = role or "slide"
        picture.rule = f"OME image {image.number}"
        if role:
            picture.rule += f", named {image.name!r}"
        pictures += family
        is_deep = page.samplesperpixel == 1 and page.bitspersample != 8
        if number == 0 and (image.num_channel_planes > 1 or is_deep):
            break  # these are channels; a person picks some of them
        if number:
            picture.role = "plane" if role is None else role
            picture.name = f"{image.name or f'image {image.number}'} z {z} t {t}"
            picture.rule += f", plane z {z}, t {t}"
    return pictures


def _without_flattened_levels(
    pictures: Sequence[TiffPicture], verdicts: Verdicts
) -> list[TiffPicture]:
    """Returns the pictures without those that are a level of another picture.

    Some programs write each level as its own OME image, which covers the same µm as the full image.
    """
    kept: list[TiffPicture] = []
    by_area = sorted(pictures, key=lambda picture: -_area(picture.base))
    for picture in by_area:
        parents = [
            other
            for other in kept
            if not other.has_own_levels
            and not picture.has_own_levels
            and picture.role == other.role == "slide"
            and picture.base.is_tiled
            and _may_be_level(picture.base, other.base)
            and _has_same_extent(picture, other)
        ]
        if not _add_level(picture.base, parents, verdicts):
            kept.append(picture)
    return [picture for picture in pictures if picture in kept]


def _has_same_extent(picture: TiffPicture, larger: TiffPicture) -> bool:
    """Tells whether two pictures cover the same µm, within 1.5 px of the smaller one."""
    if picture.mpp is None or larger.mpp is None:
        return False
    for side in (0, 1):
        extent_um = page_size(picture.base)[side] * picture.mpp[side]
        larger_um = page_size(larger.base)[side] * larger.mpp[side]
        if abs(extent_um - larger_um) > 1.5 * picture.mpp[side]:
            return False
    return True


# rules for pairs of pages


def _is_flagged(page: TiffPage) -> bool:
    return bool(int(page.subfiletype) & _REDUCED)


def _area(page: TiffPage) -> int:
    return int(page.imagewidth) * int(page.imagelength)


def _position(plane: str) -> float:
    try:
        return float(plane)
    except ValueError:
        return 0.0


def _accepted(base: TiffPage, page: TiffPage, verdicts: Verdicts) -> bool:
    """Tells whether the pixel comparison did not refuse this page as a level of `base`."""
    return verdicts.get((base.offset, page.offset)) != OTHER


def _may_be_level(page: TiffPage, base: TiffPage) -> bool:
    """Tells whether type and size of a page allow that it shows `base` at a lower resolution."""
    if page.samplesperpixel != base.samplesperpixel or page.dtype != base.dtype:
        return False
    if page.imagewidth >= base.imagewidth:
        return False
    return _has_shape_of(page, base) or _is_padded_level(page, base)


def _has_shape_of(page: TiffPage, base: TiffPage) -> bool:
    """Tells whether a page is smaller than `base` and has the same aspect ratio."""
    x_ratio = base.imagewidth / page.imagewidth
    y_ratio = base.imagelength / page.imagelength
    tolerance = _ASPECT_TOLERANCE + 2 / page.imagelength
    return bool(x_ratio > 1 and abs(x_ratio / y_ratio - 1) < tolerance)


def _is_padded_level(page: TiffPage, base: TiffPage) -> bool:
    """Tells whether a page, at the scale that it states, is as large as `base` apart from padding.

    The padding may fill the last segment of the page, or the last segment of `base`.
    """
    downsample = stated_downsample(page, base)
    if downsample is None:
        return False
    sides = zip(
        page_size(page), page_size(base), segment_size(page), segment_size(base)
    )
    return all(
        -base_segment < side * downsample - base_side < segment * downsample
        for side, base_side, segment, base_segment in sides
    )

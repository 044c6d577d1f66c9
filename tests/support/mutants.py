"""Damaged slides: a seeded mutator of any file, which knows the tags and chains of a TIFF.

    for number in range(2000):
        data, how = mutate(good, np.random.default_rng((seed, number)))

What a reader makes of a mutant is to be px or one of our errors, never another exception, a dead
process, or minutes and gigabytes. The same seed gives the same mutants.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

Random = np.random.Generator
Change = Callable[
    [bytearray, Random], str
]  # changes the bytes in place, and says what it did
_TYPE_BYTES = dict(
    zip(range(1, 19), (1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8, 8, 8))
)
_VALUES = (0, 1, 2, 3, 7, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_BELOW = 330  # pages below a page: levels of an OME-TIFF
_OFFSETS, _COUNTS = (
    (273, 324, _BELOW, 347),
    (279, 325),
)  # of segments, pages and tables; bytes
_HEAD = 4096  # bytes at either end of a file where its structure usually lies
_MOST_PAGES = 64


@dataclass(frozen=True)
class _Tag:
    """One entry of a page, by where its parts stand in the file."""

    page: int
    at: int  # of the entry: code, type
    code: int
    kind: int
    count: int
    value_at: int  # of its first value


@dataclass(frozen=True)
class _Form:
    """How numbers stand in this TIFF."""

    order: str
    big: bool

    def size(self, wide: str, small: str) -> tuple[str, int]:
        form = self.order + (wide if self.big else small)
        return form, struct.calcsize(form)

    @property
    def offset(self) -> tuple[str, int]:
        return self.size("Q", "I")


def mutate(data: bytes, rng: Random) -> tuple[bytes, str]:
    """A damaged copy of a file, and in words what was done to it: one to three changes.

    Memory: two copies of the file.
    """
    changed, done = bytearray(data), []
    kinds = (*_ANY, *_TIFF * 3) if data[:2] in (b"II", b"MM") else _ANY
    for _ in range(int(rng.choice((1, 1, 1, 2, 3)))):
        change = kinds[int(rng.integers(len(kinds)))]
        if len(changed) > 16:
            done.append(change(changed, rng))
    return bytes(changed), ", ".join(done)


def _place(data: bytearray, rng: Random) -> int:
    """An offset: anywhere, or where the structure usually lies."""
    near = min(len(data), _HEAD)
    where = int(rng.integers(3))
    return int(
        rng.integers(len(data))
        if where == 0
        else rng.integers(near) - near * (where - 1)
    )


def _flip(data: bytearray, rng: Random) -> str:
    places = [_place(data, rng) for _ in range(int(2 ** rng.integers(6)))]
    for place in places:
        data[place] ^= 1 << int(rng.integers(8))
    return f"{len(places)} bits flipped"


def _overwrite(data: bytearray, rng: Random) -> str:
    form = str(rng.choice(("<H", ">H", "<I", ">I", "<Q")))
    number = _number(rng) & (256 ** struct.calcsize(form) - 1)
    place = max(0, _place(data, rng) % len(data) - 8)
    struct.pack_into(form, data, place, number)
    return f"{number} written at {place}"


def _cut(data: bytearray, rng: Random) -> str:
    kept = int(rng.integers(len(data)))
    del data[kept:]
    return f"cut to {kept} bytes"


def _hole(data: bytearray, rng: Random) -> str:
    start, length = _place(data, rng) % len(data), int(2 ** rng.integers(14))
    fill = int(rng.choice((0, 255)))
    data[start : start + length] = bytes([fill]) * len(data[start : start + length])
    return f"{length} bytes of {fill} at {start}"


def _shift(data: bytearray, rng: Random) -> str:
    start, length = _place(data, rng) % len(data), int(rng.integers(1, 64))
    if rng.random() < 0.5:
        del data[start : start + length]
        return f"{length} bytes taken out at {start}"
    data[start:start] = rng.bytes(length)
    return f"{length} bytes put in at {start}"


def _swap(data: bytearray, rng: Random) -> str:
    """Two ranges of one length, each in the place of the other."""
    length = min(int(2 ** rng.integers(2, 14)), len(data) // 2)
    first = _place(data, rng) % (len(data) - length)
    second = _place(data, rng) % (len(data) - length)
    if abs(first - second) < length:
        second = (first + length) % (len(data) - length)
    head = bytes(data[first : first + length])
    data[first : first + length] = data[second : second + length]
    data[second : second + length] = head
    return f"{length} bytes at {first} and {second} swapped"


def _number(rng: Random) -> int:
    """An extreme one, one beside it, or any."""
    value = int(rng.choice(np.array(_VALUES, dtype=object))) + int(rng.integers(-1, 2))
    return value if rng.random() < 0.8 else int(rng.integers(2**32))


def _write(data: bytearray, form: str, place: int, number: int) -> None:
    size = struct.calcsize(form)
    if 0 <= place <= len(data) - size:
        struct.pack_into(form, data, place, number & (256**size - 1))


def _with_tag(change: Callable[[bytearray, Random, _Form, _Tag], str]) -> Change:
    """A change of one tag of a TIFF; a damaged one without tags gets flips."""

    def changed(data: bytearray, rng: Random) -> str:
        form, tags = _tags(data)
        if not tags:
            return _flip(data, rng)
        tag = tags[int(rng.integers(len(tags)))]
        return f"page {tag.page} tag {tag.code}: {change(data, rng, form, tag)}"

    return changed


@_with_tag
def _tag_value(data: bytearray, rng: Random, form: _Form, tag: _Tag) -> str:
    """One of its values, or all."""
    size, number = _TYPE_BYTES.get(tag.kind, 1), _number(rng)
    if size not in (1, 2, 4, 8):
        return "left as it is"
    one = form.order + {1: "B", 2: "H", 4: "I", 8: "Q"}[size]
    many = tag.count > 1 and rng.random() < 0.5
    chosen = (
        range(min(tag.count, 4096)) if many else [int(rng.integers(max(tag.count, 1)))]
    )
    for index in chosen:
        _write(data, one, tag.value_at + index * size, number)
    return f"{'all values' if many else 'a value'} {number}"


@_with_tag
def _tag_type(data: bytearray, rng: Random, form: _Form, tag: _Tag) -> str:
    kind = int(rng.choice((*range(20), 65535)))
    _write(data, form.order + "H", tag.at + 2, kind)
    return f"type {kind}"


@_with_tag
def _tag_count(data: bytearray, rng: Random, form: _Form, tag: _Tag) -> str:
    number = (
        int(rng.choice((tag.count - 1, tag.count + 1, tag.count * 2))),
        _number(rng),
    )
    count = number[int(rng.integers(2))]
    _write(data, form.offset[0], tag.at + 4, count)
    return f"count {count}"


@_with_tag
def _tag_code(data: bytearray, rng: Random, form: _Form, tag: _Tag) -> str:
    code = int(
        rng.choice(
            (256, 257, 258, 259, 262, 273, 277, 278, 284, 317, 322, 324, 330, 65000)
        )
    )
    _write(data, form.order + "H", tag.at, code)
    return f"becomes tag {code}"


def _segments(data: bytearray, rng: Random) -> str:
    """Offsets that overlap or lead astray, sizes of nothing or of everything."""
    form, tags = _tags(data)
    tags = [tag for tag in tags if tag.code in (*_OFFSETS, *_COUNTS)]
    if not tags:
        return _flip(data, rng)
    tag = tags[int(rng.integers(len(tags)))]
    size = _TYPE_BYTES.get(tag.kind, 4) or 4
    number = int(
        rng.choice((0, 8, len(data) // 2, len(data) - 1, len(data) + 1, 2**31 - 1))
    )
    one = form.order + {1: "B", 2: "H", 4: "I", 8: "Q"}[size]
    for index in range(min(tag.count, 4096)):
        _write(data, one, tag.value_at + index * size, number)
    return f"page {tag.page}: all of tag {tag.code} are {number}"


def _chain(data: bytearray, rng: Random) -> str:
    """The way from page to page: a loop, a leap, an early end."""
    form = _form(data)
    links = [] if form is None else [link for link, _ in _pages(data, form)]
    if form is None or not links:
        return _flip(data, rng)
    ends = [8, 0, len(data) - 2, len(data) + 64, _number(rng)]
    for offset, size in [form.offset]:
        ends += [struct.unpack_from(offset, data, link)[0] for link in links]
        link = links[int(rng.integers(len(links)))]
        target = int(ends[int(rng.integers(len(ends)))])
        assert size
        _write(data, offset, link, target)
    return f"the link at {link} leads to {target}"


def _form(data: bytearray) -> _Form | None:
    order = {b"II": "<", b"MM": ">"}.get(bytes(data[:2]))
    if order is None or len(data) < 16:
        return None
    version = struct.unpack_from(order + "H", data, 2)[0]
    return _Form(order, version == 43) if version in (42, 43) else None


def _pages(data: bytearray, form: _Form) -> Iterator[tuple[int, int]]:
    """(where the link to a page stands, where the page stands), along the chain."""
    (offset, size), (number, _) = form.offset, form.size("Q", "H")
    link = 8 if form.big else 4
    for _ in range(_MOST_PAGES):
        (page,) = struct.unpack_from(offset, data, link)
        if not 8 <= page <= len(data) - 8:
            return
        yield link, page
        (count,) = struct.unpack_from(number, data, page)
        link = page + struct.calcsize(number) + count * (20 if form.big else 12)
        if link > len(data) - size:
            return


def _tags(data: bytearray) -> tuple[_Form, list[_Tag]]:
    """Every tag of every page that can be found, also of pages below pages."""
    form = _form(data)
    if form is None:
        return _Form("<", False), []
    (offset, inline), (number, first) = form.offset, form.size("Q", "H")
    entry, found = 20 if form.big else 12, list[_Tag]()
    pages = [page for _, page in _pages(data, form)]
    for index, page in enumerate(pages[:_MOST_PAGES]):
        (count,) = struct.unpack_from(number, data, page)
        for at in range(page + first, page + first + min(count, 200) * entry, entry):
            if at + entry > len(data):
                break
            code, kind = struct.unpack_from(form.order + "HH", data, at)
            (values,) = struct.unpack_from(offset, data, at + 4)
            value_at = at + 4 + inline
            if values * _TYPE_BYTES.get(kind, 1) > inline:
                (value_at,) = struct.unpack_from(offset, data, value_at)
            if code == _BELOW and 8 <= value_at < len(data) - inline:
                (below,) = struct.unpack_from(offset, data, value_at)
                pages += [below] * (8 <= below < len(data) - 8)
            found.append(_Tag(index, at, code, kind, values, value_at))
    return form, found


_ANY: tuple[Change, ...] = (_flip, _overwrite, _cut, _hole, _shift, _swap)
_TIFF: tuple[Change, ...] = (
    _tag_value,
    _tag_value,
    _tag_type,
    _tag_count,
    _tag_code,
    _segments,
)
_TIFF = (*_TIFF, _chain)

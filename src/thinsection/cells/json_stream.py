"""Reads a JSON text piece by piece: the items of long lists and tables, one at a time."""

import codecs
import gzip
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from thinsection.types import MIB, Json

# a value that is read as a whole, such as one cell
MAX_VALUE_CHARS = 4 * MIB
_READ_BYTES = MIB
_SPACE = re.compile(r"[ \t\r\n]*")
_SHOWN_CHARS = 20


class LongItemError(ValueError):
    """An item is too long to be read as a whole. The stream still stands at its beginning."""


class JsonStream:
    """Position in a JSON text that is read from a file.

    Memory: some 20 times the longest value that is read as a whole, at most 80 MiB.

    Args:
        file: the open file.
        max_value_chars: longest value that `value` reads.
    """

    def __init__(
        self, file: BinaryIO, *, max_value_chars: int = MAX_VALUE_CHARS
    ) -> None:
        self._file = file
        self._max_value_chars = max_value_chars
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._parse = json.JSONDecoder().raw_decode
        self._text = ""
        self._position = 0
        self._num_before = 0  # characters of the file before `_text`
        self._is_ended = False

    def _read_more(self, num_bytes: int = _READ_BYTES) -> None:
        """Drops what was consumed and reads more text."""
        data = self._file.read(num_bytes)
        self._is_ended = not data
        self._num_before += self._position
        self._text = self._text[self._position :] + self._decode(
            data, final=self._is_ended
        )
        self._position = 0

    def peek(self) -> str:
        """Next character that is no space; '' at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._position)
            self._position = match.end() if match else self._position
            if self._position < len(self._text) or self._is_ended:
                return self._text[self._position : self._position + 1]
            self._read_more()

    def error(self, rule: str) -> ValueError:
        """Error about the text at this position."""
        place = self._num_before + self._position
        shown = self._text[self._position : self._position + _SHOWN_CHARS]
        if not shown:
            return ValueError(f"{rule} at character {place:,}, got the end of the file")
        return ValueError(f"{rule} at character {place:,}, got {shown!r}")

    def _take(self, character: str) -> None:
        if self.peek() != character:
            raise self.error(f"JSON must have {character!r}")
        self._position += 1

    def value(self) -> Json:
        """Reads the next value as a whole.

        Raises:
            LongItemError: its text is longer than `max_value_chars`.
            ValueError: it is not JSON.
        """
        if not self.peek():
            raise self.error("JSON must have a value")
        while True:
            fault: ValueError | None = None
            try:
                value, end = self._parse(self._text, self._position)
            except json.JSONDecodeError as error:
                fault = ValueError(f"{error.msg} at character {self._place(error.pos)}")
            except RecursionError:
                raise self.error("JSON must not be nested so deep") from None
            else:
                if end - self._position > self._max_value_chars:
                    raise self._long_item()
                # a number may go on behind the end of the text
                if end < len(self._text) or self._is_ended:
                    self._position = end
                    return value
            if self._is_ended:
                if fault is not None:
                    raise fault
                continue
            num_chars = len(self._text) - self._position
            if num_chars > self._max_value_chars:
                if fault is not None and not self._is_cut(fault):
                    raise fault
                raise self._long_item()
            self._read_more(max(_READ_BYTES, num_chars))

    def _long_item(self) -> LongItemError:
        limit_mib = self._max_value_chars >> 20
        return LongItemError(
            *self.error(f"one item must have at most {limit_mib} MiB of text").args
        )

    def _place(self, position: int) -> str:
        return f"{self._num_before + position:,}"

    def _is_cut(self, fault: ValueError) -> bool:
        """True if an error may come from the end of the text that was read so far."""
        words = re.search(r"character ([\d,]+)$", str(fault))
        place = int(words[1].replace(",", "")) if words else 0
        near_end = self._num_before + len(self._text) - 64
        return "Unterminated string" in str(fault) or place >= near_end

    def skip(self) -> None:
        """Passes over the next value; a long list or table is not held."""
        match self.peek():
            case "[":
                for _ in self.items():
                    self.skip()
            case "{":
                for _ in self.members():
                    self.skip()
            case _:
                self.value()

    def items(self) -> Iterator[None]:
        """Enters a list and yields before each item, which the caller reads."""
        self._take("[")
        if self.peek() == "]":
            self._position += 1
            return
        while True:
            yield
            if self.peek() == "]":
                self._position += 1
                return
            self._take(",")

    def members(self) -> Iterator[str]:
        """Enters a table and yields the name of each value, which the caller reads."""
        self._take("{")
        if self.peek() == "}":
            self._position += 1
            return
        while True:
            if self.peek() != '"':
                raise self.error("JSON must have a name in quotes")
            name = str(self.value())
            self._take(":")
            yield name
            if self.peek() == "}":
                self._position += 1
                return
            self._take(",")


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Opens a file to read its bytes; `.gz` is unpacked while it is read."""
    if path.suffix.lower() == ".gz":
        with gzip.open(path, "rb") as packed:
            yield cast("BinaryIO", packed)
    else:
        with path.open("rb") as file:
            yield file


@contextmanager
def open_json(path: Path) -> Iterator[JsonStream]:
    """Opens a JSON file, packed by gzip or not."""
    with open_bytes(path) as file:
        yield JsonStream(file)

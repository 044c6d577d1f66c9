"""Every exception class of the package, and what raises and rewords them.

A message reads `<name> must <rule>, got <value>[ in <slide>]; <remedy>`: lower case, no full stop.
An error names a setting in Python's words (`memory=...`, `out="..."`, `overwrite=True`). The
command line, and the tables and pages that keep errors of slides, show the option in its place: see
`with_options`.
Each class also inherits the builtin that a caller would expect to catch.
"""

import logging
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from traceback import walk_stack
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # Python 3.10 has no Self
    from typing import Self

# file name of the calls that import
_IMPORT = "<frozen importlib._bootstrap>"
_ASK_AGAIN_S = 0.05
# begins the words of an error for want of memory, by which a retry asks for more
OUT_OF_MEMORY = "out of memory"
_LOG = logging.getLogger("thinsection")
# a setting in Python's words: grid="256px", labels="...", weights=FILE, batch_size=..., folds=3,
# overwrite=True
_PYTHON_SETTING = re.compile(
    r'\b([a-z]\w*)=(?:"([^"]*)"|(\.\.\.|True\b|False\b|[A-Z]+\b|\d+(?:\.\d+)?))'
)
_SINGULAR = {
    "encoders": "encoder",
    "slide_encoders": "slide_encoder",
    "segmenters": "segmenter",
}
# begins the line of `naming_part`
_IN_PART = "raised in "


class ThinsectionError(Exception):
    """Base of every error that this package raises on purpose."""


class InvalidInputError(ThinsectionError, ValueError):
    """An argument has the wrong type, shape, range or value."""


class ChoiceError(InvalidInputError):
    """A name means none of the things that are there, or nothing decides between several."""


class ConfigError(ThinsectionError, ValueError):
    """A configuration key is unknown or its value is not allowed."""


class BudgetError(ThinsectionError, MemoryError):
    """A memory budget cannot hold the least that a stage needs."""


class CohortError(ThinsectionError, ValueError):
    """A cohort table or the list of slides cannot be used."""

    @classmethod
    def no_such_slide(cls, path: str) -> "Self":
        """Error about an argument that names no file, folder or URL."""
        return cls(f"slide must be an existing file, folder or URL, got {path!r}")


class SlideOpenError(ThinsectionError, OSError):
    """No reader opens the file; the message says what each one answered."""


class DamagedTiffError(SlideOpenError):
    """A TIFF whose structure cannot be as it is told; not one of a kind that is left out here."""


class ProvedDamageError(DamagedTiffError):
    """A TIFF of which parts are missing by its own words, so that no reader can show it whole."""


class ChannelsError(SlideOpenError):
    """The file is no RGB or gray picture of 8 bits, and nobody said what of it to show."""


class ImageError(SlideOpenError):
    """The file has no such picture, or none that could be a slide."""


class SlideReadError(ThinsectionError, OSError):
    """A region of an opened slide cannot be decoded."""


class MissingMppError(ThinsectionError, ValueError):
    """The slide does not say how many µm a pixel covers and nobody else did."""


class UpsamplingError(ThinsectionError, ValueError):
    """The wanted resolution is finer than the slide's."""


class MissingDependencyError(ThinsectionError, ImportError):
    """An optional package is needed; the message says how to install it."""


class DeviceError(ThinsectionError, RuntimeError):
    """The wanted device is not there."""


class UnknownEncoderError(ThinsectionError, KeyError):
    """No encoder of that name is declared."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class WeightsError(ThinsectionError, RuntimeError):
    """Weights are missing, not allowed, or do not fit the architecture."""


class QcExclusion(ThinsectionError, ValueError):
    """A slide fails a quality rule that the user gave: left out on purpose, not a failure."""


class StoreError(ThinsectionError, OSError):
    """A result file is missing, damaged, or of another kind than expected."""


class DiskSpaceError(StoreError):
    """The disk has not the room that the next step needs."""


class OutputError(StoreError):
    """Nothing more can be written: full, read-only, lost; it ends a run, not a slide."""


class OverwriteError(StoreError):
    """Another file stands where a result must go; it ends a command, not a slide."""


class Stopped(BaseException):
    """The process was asked to end: by SIGTERM, Ctrl-C or a terminal that went away."""

    def __init__(self, name: str, exit_code: int) -> None:
        super().__init__(f"stopped by {name}")
        self.exit_code = exit_code


class LockedError(ThinsectionError, RuntimeError):
    """Another live process holds the output folder or the slide."""


class StructureError(ThinsectionError, ValueError):
    """A structure file or a batch of atoms and tokens cannot be used."""


class DatasetError(ThinsectionError, ValueError):
    """A dataset folder or manifest does not look as expected."""


class RescueError(ThinsectionError, RuntimeError):
    """Foreign code is not of the version and form that a rescue recognises."""


class NothingRescuedError(RescueError):
    """The block of a rescue ended well, and our attention was never called."""


class ClusterError(ThinsectionError, RuntimeError):
    """A scheduler refused, lost or cannot run a task."""


class CopyError(ThinsectionError, TypeError):
    """An object that owns an open file, a thread or a lock was to be copied or pickled."""


class StaleResultError(StoreError):
    """A result under this name was made from another file or with other settings."""


def with_options(text: str) -> str:
    """A text with options in place of Python's settings: `grid="..."` becomes `--grid`.

    Only in the remedy, which follows the first `; `: what comes before may quote the user.
    """
    problem, semicolon, remedy = text.partition("; ")
    return problem + semicolon + _PYTHON_SETTING.sub(_option, remedy)


def _option(setting: re.Match[str]) -> str:
    """Option of the command line with the value of a setting."""
    name, text, word = setting.groups()
    # options that are repeated have the singular
    name = _SINGULAR.get(name, name).replace("_", "-")
    if word == "False":
        return f"--no-{name}"
    if text in (None, "...") and word in (None, "...", "True"):
        return f"--{name}"
    return f"--{name} {shlex.quote(text) if word is None else word}"


def error_words(error: BaseException) -> str:
    """An error in words for a user, on one line; the names of classes are for the log.

    An error of this package says what is to be done. Of another error that nobody foresaw, the
    words say so; a traceback beside it has its class. An error of a part of another package names
    the part.
    """
    notes = getattr(error, "__notes__", ())
    parts = [note for note in notes if note.startswith(_IN_PART)]
    words = _words_alone(error)
    return f"{words} ({'; '.join(parts)})" if parts else words


def _words_alone(error: BaseException) -> str:
    """Words of an error without its notes, see `error_words`."""
    text = " ".join(str(error).split())
    if isinstance(error, ThinsectionError):
        return with_options(text)
    if isinstance(error, MemoryError):
        return f"{OUT_OF_MEMORY}: {text}" if text else OUT_OF_MEMORY
    if isinstance(error, OSError) and error.strerror:
        named = f" in {str(error.filename)!r}" if error.filename else ""
        return f"the system says {error.strerror!r}{named}"
    if isinstance(error, KeyError):
        text = f"there is no {text}"
    if not text:
        # the words of the class: 'assertion error' of AssertionError
        text = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).lower()
    return f"unexpected error: {text}"


def named_error_words(name: str, message: str) -> str:
    """`error_words` of an error of another process, of which only the class's name is known."""
    own_class = globals().get(name)
    is_own = isinstance(own_class, type) and issubclass(own_class, ThinsectionError)
    return error_words((ThinsectionError if is_own else RuntimeError)(message or name))


@contextmanager
def rewording(
    rule: str,
    path: object,
    *caught: type[Exception],
    error: type[ThinsectionError],
    more: str = "",
) -> Iterator[None]:
    """Turns exceptions in the block into `<rule>, got '<path>': <exception><more>`.

    Args:
        rule: beginning of the message.
        path: value that broke the rule.
        caught: classes of exceptions that are turned; our own errors pass.
        error: class that is raised in their place.
        more: end of the message.
    """
    try:
        yield
    except ThinsectionError:
        raise
    except caught as cause:
        raise error(f"{rule}, got {str(path)!r}: {cause}{more}") from cause


class slide_boundary:
    """The boundary of one slide: whatever is wrong with it stops no other slide.

    Every command that goes through slides one by one reads each of them in such a block.

    Args:
        slide_id: the slide.
        leave_out: receives the slide and the reason; the traceback goes to the log `thinsection`.
            None raises the error.
    """

    def __init__(
        self, slide_id: str, leave_out: Callable[[str, str], None] | None
    ) -> None:
        self._slide_id = slide_id
        self._leave_out = leave_out

    def __enter__(self) -> None:
        """Begins the block."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Ends the block; True for an error that only this slide has."""
        if self._leave_out is None or not isinstance(error, Exception):
            return False
        if isinstance(error, OutputError | OverwriteError):  # not the fault of a slide
            return False
        _LOG.debug("%s is left out", self._slide_id, exc_info=error)
        self._leave_out(self._slide_id, error_words(error))
        return True


def add_note(error: BaseException, note: str) -> None:
    """Adds a line to the error, as `BaseException.add_note` of Python 3.11 does."""
    error.__notes__ = [*getattr(error, "__notes__", []), note]


class naming_part:
    """Adds to an error of the block which part of another package raised it.

    Wherever a reader, encoder, check, head or another part is called that another package may
    bring, the call stands in such a block. Parts of this package add no line.

    Args:
        kind: what the part is: 'reader', 'encoder'.
        name: its name, as a person types it.
        part: the class, function or object that is called.
        given: what it was called with, such as 'tiles (8, 256, 256, 3)'; '' says nothing.
    """

    __slots__ = ("_given", "_kind", "_name", "_part")

    def __init__(self, kind: str, name: str, part: object, given: str = "") -> None:
        self._kind = kind
        self._name = name
        self._part = part
        self._given = given

    def __enter__(self) -> None:
        """Begins the block."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the block; an error goes on."""
        if not isinstance(error, Exception):
            return
        part = getattr(self._part, "func", self._part)  # the function of a partial
        package = str(getattr(part, "__module__", "")).partition(".")[0]
        if package in ("", "thinsection"):
            return
        note = f"{_IN_PART}{self._kind} {self._name!r} of package {package!r}"
        if self._given:
            note += f", called with {self._given}"
        if note not in getattr(error, "__notes__", ()):
            add_note(error, note)


@contextmanager
def naming_file(*paths: str | Path) -> Iterator[None]:
    """Adds a line with the file to an error of the block whose words do not name it."""
    try:
        yield
    except ThinsectionError as error:
        names = [str(path) for path in paths]
        if names and not any(Path(name).name in str(error) for name in names):
            add_note(error, f"in {', '.join(map(repr, names))}")
        raise


@contextmanager
def errors_of_others(rule: str, name: str, remedy: str) -> Iterator[None]:
    """Raises WeightsError in place of any error of another package's code, with its first line.

    Models of other packages raise what they like at a name or a config that they cannot build.

    Args:
        rule: beginning of the message, such as "encoder must be one that can be read".
        name: what was asked for.
        remedy: what to do.
    """
    try:
        yield
    except (ThinsectionError, MemoryError):
        raise
    except Exception as error:
        lines = str(error).splitlines()
        reason = lines[0].rstrip(".") if lines else "no message"
        raise WeightsError(
            f"{rule}, got {name!r}: {type(error).__name__}: {reason}; {remedy}"
        ) from error


@contextmanager
def stopping() -> Iterator[None]:
    """Raises `Stopped` in the main thread when a signal asks the process to end.

    So locks are released, unfinished files removed and tables written. An import is not disturbed.
    A second Ctrl-C ends it at once; a signal that is ignored on purpose (nohup) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    raised: list[Stopped] = []
    handler = partial(_raise_stopped, raised, _num_imports(sys._getframe()))
    earlier_handlers = {}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        current = signal.getsignal(number)
        if current in (signal.SIG_DFL, signal.default_int_handler):
            earlier_handlers[number] = signal.signal(number, handler)
    alarm = signal.getsignal(signal.SIGALRM)
    try:
        yield
    except Exception as error:
        if not raised:
            raise
        # compiled code, Ray's for one, made an error of its own of it
        stopped = raised[0]
        stopped.__notes__ = getattr(error, "__notes__", [])
        raise stopped from error
    finally:
        if signal.getsignal(signal.SIGALRM) is not alarm:
            # a signal came during an import and would be asked about again: the block has ended
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, alarm)
        for number, earlier in earlier_handlers.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, earlier)


@contextmanager
def signals_given_back() -> Iterator[None]:
    """Lets signals do what they do without `stopping`, for a block of somebody else's program."""
    ours = {}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        handler = signal.getsignal(number)
        if isinstance(handler, partial) and handler.func is _raise_stopped:
            ours[number] = handler
            is_ctrl_c = number == signal.SIGINT
            default = signal.default_int_handler if is_ctrl_c else signal.SIG_DFL
            signal.signal(number, default)
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)


def _raise_stopped(
    raised: list[Stopped], num_imports: int, number: int, frame: FrameType | None
) -> None:
    """Handles a signal; during an import it asks again a little later.

    Args:
        raised: gets the exception.
        num_imports: imports that were under way when the block began.
        number: the signal.
        frame: the call that it interrupts.
    """
    if _num_imports(frame) > num_imports:
        # C extensions make an ImportError of whatever is raised while they are imported
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(number))
        signal.setitimer(signal.ITIMER_REAL, _ASK_AGAIN_S)
        return
    # schedulers may send SIGTERM more than once, and have SIGKILL for who does not listen
    signal.signal(number, signal.SIG_DFL if number == signal.SIGINT else signal.SIG_IGN)
    raised.append(Stopped(signal.Signals(number).name, 128 + number))
    raise raised[0]


def _num_imports(frame: FrameType | None) -> int:
    """Number of imports under way in the calls that led to `frame`."""
    return sum(caller.f_code.co_filename == _IMPORT for caller, _ in walk_stack(frame))

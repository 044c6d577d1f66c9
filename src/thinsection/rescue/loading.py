"""Models that another program loads, or calls, while a block runs; and checks of their modules."""

import functools
import inspect
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from thinsection.errors import NothingRescuedError, RescueError
from thinsection.types import ignore_message
from thinsection.weights.placement import optional_package

_METHOD = "from_pretrained"
_TOLERANCE_LOW_PRECISION = 0.03


@dataclass(frozen=True, kw_only=True)
class Conduct:
    """What a rescue does with a model that does not match, and where its lines go.

    Attributes:
        strict: True raises RescueError for a model that does not match. False leaves the model its
            own attention, and a line says so.
        tell: takes the lines about models, one for each that was rescued or left alone.
    """

    strict: bool = True
    tell: Callable[[str], None] = ignore_message

    def refuse(self, error: RescueError) -> None:
        """Raises the error, or tells that the model keeps its own attention."""
        if self.strict:
            raise error
        self.tell(f"not rescued, so the model runs as it is: {error}")


RAISING = Conduct()


@dataclass(kw_only=True)
class FirstCall:
    """Comparison of a module with ours at its first call.

    Attributes:
        conduct: what happens if they differ.
        is_equal: the answer; None before the first call.
    """

    conduct: Conduct
    is_equal: bool | None = None

    def agrees(self, check: Callable[[], None]) -> bool:
        """Tells whether ours may take the module's place; `check` raises RescueError if not."""
        if self.is_equal is None:
            try:
                check()
                self.is_equal = True
            except RescueError as error:
                self.conduct.refuse(error)
                self.is_equal = False
        return self.is_equal


@contextmanager
def loaded_models(receive: Callable[[Any], None]) -> Iterator[None]:
    """Give `receive` each model that transformers loads in the block, before its caller has it.

    `AutoModel.from_pretrained` and every model class end in the one method that is replaced here.
    Process-wide, not for concurrent use by threads.
    """
    base = optional_package("transformers").PreTrainedModel
    original = base.__dict__[_METHOD]

    @functools.wraps(original.__func__)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        result = original.__func__(cls, *args, **kwargs)
        # with output_loading_info=True the model is the first of two values
        receive(result[0] if isinstance(result, tuple) else result)
        return result

    setattr(base, _METHOD, classmethod(from_pretrained))
    try:
        yield
    finally:
        setattr(base, _METHOD, original)


@contextmanager
def called_modules(
    receive: Callable[[nn.Module, Sequence[nn.Module]], None],
) -> Iterator[None]:
    """Give `receive` each module and its new parts, before the module's first call in the block.

    The module itself is among its parts. Each part is given once.

    So it does not matter which package built it, and when. Every call of a module in this process
    asks a set for it. Not for concurrent use by threads.
    """
    known: WeakSet[nn.Module] = WeakSet()

    def hook(module: nn.Module, _: object) -> None:
        if module in known:
            return
        parts = [part for part in module.modules() if part not in known]
        known.update(parts)
        receive(module, parts)

    handle = register_module_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


Forward = Callable[..., Any]


@contextmanager
def replaced_forward(
    class_name: str,
    make_forward: Callable[[Any, list[int]], Forward],
    conduct: Conduct,
) -> Iterator[None]:
    """Give each called module of this class the forward that `make_forward` makes for it.

    The class is known by its name, so that it does not matter where its package keeps it. Modules
    have their own forward again when the block ends. A module that is called by itself, and not as
    a part of another one, gets ours from its second call on.

    Args:
        class_name: name of the modules' class.
        make_forward: takes the module and a list, to which our forward adds an item when it runs.
        conduct: what happens with modules that `make_forward` refuses.

    Raises RescueError: the block ended without a call of ours.
    """
    calls: list[int] = []
    placed: WeakSet[nn.Module] = WeakSet()

    def place(model: nn.Module, parts: Sequence[nn.Module]) -> None:
        of_class = [part for part in parts if type(part).__name__ == class_name]
        for module in of_class:
            try:
                module.__dict__["forward"] = make_forward(module, calls)
                placed.add(module)
            except RescueError as error:
                conduct.refuse(error)
        num_placed = sum(module in placed for module in of_class)
        if num_placed:
            name = type(model).__name__
            conduct.tell(f"rescued {name}: {num_placed} attention layers")

    try:
        with called_modules(place):
            yield
    finally:
        for module in list(placed):
            del module.__dict__["forward"]
    if not calls:
        raise NothingRescuedError(
            "the attention of thinsection must be called during the command or block, got no "
            f"call, so nothing was rescued; looked for {class_name} in the modules that are "
            "called in this process in evaluation mode and without gradients"
        )


@contextmanager
def replaced_entry(
    names: MutableMapping[str, Any], name: str, value: object
) -> Iterator[None]:
    """Let a namespace have another value under a name, until the block ends."""
    missing = object()
    previous = names.get(name, missing)
    names[name] = value
    try:
        yield
    finally:
        if previous is missing:
            names.pop(name, None)
        else:
            names[name] = previous


def check_signature(function: Callable[..., Any], expected: str, name: str) -> None:
    """Raise RescueError where the parameters of `function` are not these."""
    parameters = ", ".join(inspect.signature(function).parameters)
    if parameters != expected:
        raise RescueError(
            f"{name} must have the parameters ({expected}), got ({parameters})"
        )


def check_attributes(owner: object, names: tuple[str, ...], what: str) -> None:
    """Raise RescueError where `owner` does not have all these attributes."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise RescueError(f"{what} must have {', '.join(missing)}, got {type(owner)}")


def check_equal(
    theirs: Tensor, ours: Tensor, *, tolerance_fp32: float, what: str
) -> None:
    """Raise RescueError where two results differ by more than rounding, or are not numbers."""
    scale = float(theirs.abs().max())
    worst = float((theirs - ours).abs().max())
    is_fp32 = theirs.dtype == torch.float32
    tolerance = tolerance_fp32 if is_fp32 else _TOLERANCE_LOW_PRECISION
    # a difference that is NaN has to be refused too
    is_close = worst <= tolerance * max(scale, 1e-6)
    if not is_close:
        raise RescueError(
            f"{what}, got a difference of {worst:.2g} at values of {scale:.2g}; "
            "it may be another revision"
        )

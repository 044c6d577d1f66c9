"""Models that another program loads, or calls, while a block runs."""

import functools
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from thinsection.errors import RescueError
from thinsection.weights.placement import optional_package

_METHOD = "from_pretrained"


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
def called_modules(receive: Callable[[nn.Module], None]) -> Iterator[None]:
    """Give `receive` each module and its parts once, before the module's first call in the block.

    So it does not matter which package built it, and when. Every call of a module in this process
    asks a set for it. Not for concurrent use by threads.
    """
    known: WeakSet[nn.Module] = WeakSet()

    def hook(module: nn.Module, _: object) -> None:
        if module in known:
            return
        for part in module.modules():
            if part not in known:
                known.add(part)
                receive(part)

    handle = register_module_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


Forward = Callable[..., Any]


@contextmanager
def replaced_forward(
    class_name: str, make_forward: Callable[[Any, list[int]], Forward]
) -> Iterator[None]:
    """Give each called module of this class the forward that `make_forward` makes for it.

    The class is known by its name, so that it does not matter where its package keeps it. Modules
    have their own forward again when the block ends. A module that is called by itself, and not as
    a part of another one, gets ours from its second call on.

    Args:
        class_name: name of the modules' class.
        make_forward: takes the module and a list, to which our forward adds an item when it runs.

    Raises RescueError: the block ended without a call of ours.
    """
    calls: list[int] = []
    placed: WeakSet[nn.Module] = WeakSet()

    def place(module: nn.Module) -> None:
        if type(module).__name__ == class_name:
            module.__dict__["forward"] = make_forward(module, calls)
            placed.add(module)

    try:
        with called_modules(place):
            yield
    finally:
        for module in list(placed):
            del module.__dict__["forward"]
    if not calls:
        raise RescueError(
            "the attention of thinsection must be called within the block, got no call, so "
            f"nothing was rescued; looked for {class_name} in the modules that are called in this "
            "process in evaluation mode and without gradients"
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

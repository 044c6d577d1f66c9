"""Other projects' TITAN encoders from their own wheels, around the stand-in instead of the hub."""

import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.rescue.stand_in import Titan

# what the modules import at their top and TITAN's part of them does not need
_HEAVY = (
    *(
        "timm",
        "timm.data",
        "timm.data.transforms_factory",
        "timm.layers",
        "torchvision",
    ),
    "torchvision.transforms",
    *("huggingface_hub", "transformers"),
)


def module_of(
    monkeypatch: pytest.MonkeyPatch, name: str, also_bare: tuple[str, ...] = ()
) -> Any:
    """The peer's module, its packages bare (no `__init__` runs), heavy imports stood in for."""
    parts = name.split(".")
    root = _root(parts[0])
    for other in [n for n in sys.modules if n.partition(".")[0] == parts[0]]:
        monkeypatch.delitem(sys.modules, other)
    for heavy in _HEAVY:
        monkeypatch.setitem(sys.modules, heavy, mock.MagicMock())
    for package in (
        *(".".join(parts[:depth]) for depth in range(1, len(parts))),
        *also_bare,
    ):
        bare = types.ModuleType(package)
        bare.__path__ = [str(root.joinpath(*package.split(".")))]
        monkeypatch.setitem(sys.modules, package, bare)
    before = set(sys.modules)
    module = importlib.import_module(name)
    for new in set(sys.modules) - before:  # goes again with the test
        monkeypatch.setitem(sys.modules, new, sys.modules[new])
    return module


def _root(package: str) -> Path:
    """The folder that holds the package: installed, or unpacked in THINSECTION_TEST_PEERS."""
    folder = os.environ.get("THINSECTION_TEST_PEERS")
    for place in Path(folder).rglob(f"{package}/__init__.py") if folder else ():
        return place.parent.parent
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(
            f"needs {package}: set THINSECTION_TEST_PEERS to a folder of unpacked wheels"
        )
    return Path(spec.origin).parent.parent


def slide2vec_encoder(monkeypatch: pytest.MonkeyPatch, hub: Titan) -> Any:
    """slide2vec's TitanSlideEncoder; its patches of the remote code are undone with the test."""
    module = module_of(monkeypatch, "slide2vec.encoders.models.titan")
    monkeypatch.setattr(module.AutoModel, "from_pretrained", lambda *_, **__: hub)
    _restore_later(monkeypatch, hub)
    encoder = module.TitanSlideEncoder().to("cpu")
    assert encoder._remote_code_patched
    return encoder


def mussel_encoder(
    monkeypatch: pytest.MonkeyPatch, hub: Titan, *, patch_oom: bool
) -> Any:
    """Mussel's TitanSlideEncoderModel."""
    module = module_of(monkeypatch, "mussel.models.conch", ("mussel.utils",))
    monkeypatch.setattr(module.AutoModel, "from_pretrained", lambda *_, **__: hub)
    return module.TitanSlideEncoderModel(
        "MahmoodLab/TITAN", use_gpu=False, patch_oom=patch_oom
    )


class Trident:
    """The shape of TRIDENT's TitanSlideEncoder, which is in no package index."""

    __module__ = "trident.slide_encoder_models.load"

    def __init__(self, hub: Titan) -> None:
        self.model = hub

    def forward(self, batch: dict[str, Any]) -> Any:
        size = batch["attributes"]["patch_size_level0"]
        return self.model.encode_slide_from_patch_features(
            batch["features"], batch["coords"], size
        )


def _restore_later(monkeypatch: pytest.MonkeyPatch, hub: Titan) -> None:
    """slide2vec patches classes and the module of the remote code; the test's end undoes it."""
    encoder = hub.vision_encoder
    remote = sys.modules[type(encoder).__module__]
    attention = type(encoder.blocks.modules_list[0].attn)
    for owner, name in (
        *((remote, "preprocess_features"), (type(encoder), "forward_features")),
        (attention, "forward"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(remote, "_slide2vec_titan_patched", False, raising=False)

"""A hostile example for each reader of data files: none runs code, and each is refused by name."""

import json
import pickle
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.predict.test_model_file import model

from thinsection.encode.specs import find_spec
from thinsection.errors import CohortError, ConfigError, ThinsectionError
from thinsection.evaluation.embeddings import read_embeddings
from thinsection.files.trust import ARCHITECTURES, is_local_host
from thinsection.predict.inputs import is_grid_of, run_config
from thinsection.predict.model_file import read_card, save_model
from thinsection.predict.zeroshot import read_prompts
from thinsection.qc.pipeline import load_pipeline
from thinsection.report.verdict import load_rules
from thinsection.segment import load_segmenter
from thinsection.slide.annotations import read_regions
from thinsection.slide.cohort import load_cohort
from thinsection.slide.cohort_table import SlidesConfig
from thinsection.stages.config import RunConfig
from thinsection.store.ledger import FORMAT, load_ledgers
from thinsection.tiles import load_filters
from thinsection.weights.files import read_state_dict

SEGMENTER = """
[segmenter]
name = "colours"
outputs = ["glass", "tumour"]
background = "glass"
mpp = 1.0
architecture = "{architecture}"
options = {options}
weights = "w.safetensors"
"""


def segmenter_file(folder: Path, architecture: str, options: str = "{}") -> Path:
    save_file({"weight": torch.zeros(1)}, folder / "w.safetensors")
    path = folder / "evil.toml"
    path.write_text(SEGMENTER.format(architecture=architecture, options=options))
    return path


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("os:system", '{{ command = "touch {marker}" }}'),
        ("subprocess:run", '{{ args = ["touch", "{marker}"] }}'),
        ("builtins:exec", '{{ source = "open({marker!r}, chr(119))" }}'),
        ("torch.hub:load", '{{ repo_or_dir = "evil", model = "m", source = "local" }}'),
        ("torch:load", '{{ f = "{marker}", weights_only = false }}'),
        ("torch.nn.modules.module:os.system", '{{ command = "touch {marker}" }}'),
        ("torch.nn.modules.module:inspect", "{{}}"),
        ("torch.nn.functional:relu", "{{}}"),
        ("torch.nnx:Conv2d", "{{}}"),
        ("torchvision.models.segmentation.deeplabv3:handle_legacy_interface", "{{}}"),
        ("timm.models:create_model", '{{ model_name = "hf-hub:evil/m" }}'),
        ("evil:Net", "{{}}"),
        ("", "{{}}"),
        ("torch.nn:", "{{}}"),
    ],
)
def test_a_segmenter_names_classes_of_listed_packages_alone(
    tmp_path: Path,
    architecture: str,
    options: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    options = options.format(marker=marker)
    path = segmenter_file(tmp_path, architecture, options)
    with pytest.raises(ConfigError, match="architecture must be"):
        _ = load_segmenter(path).network
    assert not marker.exists()


NET = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
import torch
def system(command): raise AssertionError
"""


def test_code_runs_from_a_file_that_the_user_trusts_and_its_content_counts(
    tmp_path: Path,
) -> None:
    for name in ("my_net", "other"):
        (tmp_path / f"{name}.py").write_text(NET)
    path = segmenter_file(tmp_path, "my_net:Net")
    trusted = [tmp_path / "other.py", tmp_path / "my_net.py"]
    with pytest.raises(ConfigError, match="trust_code=FILE"):
        load_segmenter(path, trust_code=trusted[:1])
    segmenter = load_segmenter(path, trust_code=trusted, device="cpu")
    assert callable(segmenter.network)
    first = segmenter.identity
    (tmp_path / "my_net.py").write_text(NET + "# another\n")
    assert load_segmenter(path, trust_code=trusted).identity != first
    path = segmenter_file(tmp_path, "my_net:system")
    with pytest.raises(ConfigError, match="PyTorch module class"):
        _ = load_segmenter(path, trust_code=trusted).network


def test_declared_architectures_are_of_listed_packages() -> None:
    from thinsection.segment.spec import declared_segmenters

    names = [entry.target.architecture for entry in declared_segmenters()]  # type: ignore[attr-defined]
    listed = tuple(f"{name}." for name in ARCHITECTURES)
    declared = [name for name in names if name is not None]
    assert len(declared) >= 2
    assert all(f"{name.partition(':')[0]}.".startswith(listed) for name in declared)


EVIL_SETTINGS: list[tuple[str, str, Any]] = [
    ("segment", "segmenters", ["evil.toml"]),
    ("segment", "segmenters", ["lavlab-shell"]),
    ("segment", "segment_weights", "w.onnx"),
    ("segment", "tissue_segmenter", True),
    ("segment", "trust_code", ["evil.py"]),
    ("encode", "allow_remote_code", True),
    ("encode", "weights", "/etc/passwd"),
    ("encode", "encoders", ["/tmp/evil/config.json"]),
    ("encode", "encoders", ["../evil"]),
    ("encode", "encoders", ["evil.pth"]),
    ("encode", "encoders", ["hf:../../evil"]),
    ("aggregate", "slide_weights", "w.pt"),
    ("aggregate", "slide_encoders", ["model.safetensors"]),
    ("qc", "qc", "evil.toml"),
    ("qc", "qc_rules", "rules.toml"),
    ("stain", "stain_reference", "http://169.254.169.254/x.png"),
    ("tiles", "tile_filter", ["tissue", "/tmp/evil.py"]),
    ("slides", "reader", "~/evil"),
]


@pytest.mark.parametrize(("section", "name", "value"), EVIL_SETTINGS)
def test_a_model_file_names_no_files_no_code_and_no_permissions(
    tmp_path: Path, section: str, name: str, value: Any
) -> None:
    trained = model()
    inputs = replace(trained.card.inputs, run={section: {name: value}})
    card = replace(trained.card, inputs=inputs)
    path = tmp_path / "model.safetensors"
    save_model(path, replace(trained, card=card))
    read = read_card(path)
    with pytest.raises(ConfigError, match=rf"{section}\.{name} = "):
        run_config(read.inputs, read.name)
    assert not is_grid_of(read.inputs, "256px_0.5mpp")


def test_a_model_file_gives_tiles_encoder_tissue_and_thresholds() -> None:
    settings = {
        "slides": {"slide_mpp": "0.25", "name_pattern": "(?P<case_id>x)"},
        "tissue": {"mask_mpp": 4.0},
        "qc": {"qc": "histoqc-v2.1", "qc_fail": ["pixels_to_use<1000"]},
        "tiles": {"tile_mpp": [0.5, 1.0], "tile_filter": ["tissue", "class_T>0.5"]},
        "stain": {"stain_norm": "macenko"},
        "encode": {"encoders": ["hf:owner/repo", "timm:vit_tiny", "uni2_h"]},
        "aggregate": {"slide_encoders": ["mean"]},
    }
    inputs = replace(model().card.inputs, run=settings)
    config = run_config(inputs, "m")
    assert config.encode.encoders == ("hf:owner/repo", "timm:vit_tiny", "uni2_h")
    assert config.slides.name_pattern is None
    assert config.qc.qc == "histoqc-v2.1"


class Bomb:
    """Unpickling it would run a command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return subprocess.call, (["touch", str(self.marker)],)


def write_pickle(path: Path, marker: Path) -> None:
    if path.suffix == ".npy":
        np.save(path, np.array([Bomb(marker)], dtype=object), allow_pickle=True)
    elif path.suffix == ".pkl":
        path.write_bytes(pickle.dumps(Bomb(marker)))
    else:
        torch.save({"weight": Bomb(marker)}, path)


def regions(path: Path) -> Any:
    return read_regions(path, (1000, 700))


READERS: list[tuple[str, str | None, Callable[[Path], Any]]] = [
    ("weights.pth", None, read_state_dict),
    ("weights.ckpt", None, read_state_dict),
    ("features.pt", None, read_embeddings),
    ("features.npy", None, read_embeddings),
    ("checks.toml", '[[check]]\nkind = "os:system"\nname = "a"\n', load_pipeline),
    (
        "checks.toml",
        '[segmenter]\nname = "os:system"\n[segmenter.classes]\npen = "x"\n',
        load_pipeline,
    ),
    ("checks.toml", '[[check]]\nkind = "__import__"\n', load_pipeline),
    ("verdicts.toml", "[[verdict]]\ncolumn = \"__import__('os')\"\n", load_rules),
    ("prompts.toml", 'labels = "!!python/object:os.system"\n', read_prompts),
    ("boxes.csv", "x,y,width,height\n=cmd|'/C calc'!A0,1,2,3\n", regions),
    (
        "roi.xml",
        '<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><Annotations>&e;</Annotations>',
        regions,
    ),
    ("roi.geojson", '[{"geometry": {"type": "os.system"}}]', regions),
    (
        "roi.geojson",
        '[{"__class__": "os.system", "geometry": 7}]',
        regions,
    ),
    (
        "config.json",
        '{"architecture": "os:system"}',
        lambda p: find_spec(str(p.parent)),
    ),
    (
        "config.json",
        '{"model_type": "evil", "auto_map": {"AutoModel": "evil.Net"}}',
        lambda p: find_spec(str(p.parent)),
    ),
    (
        "cohort.csv",
        "slide_path,slide_id\na.svs,../../evil\n",
        lambda p: load_cohort([p]),
    ),
    ("cohort.csv", "slide_path\nzip://a.svs::evil.zip\n", lambda p: load_cohort([p])),
    (
        "cohort.csv",
        "slide_path\nsimplecache::http://h/a.svs\n",
        lambda p: load_cohort([p]),
    ),
    ("cohort.csv", "slide_path\nssh://h/a.svs\n", lambda p: load_cohort([p])),
    ("cohort.csv", "slide_path\ngithub://a:b@main/a.svs\n", lambda p: load_cohort([p])),
]


@pytest.mark.parametrize(
    ("name", "text", "read"),
    READERS,
    ids=[f"{i}-{r[0]}" for i, r in enumerate(READERS)],
)
def test_a_hostile_file_runs_nothing_and_is_refused(
    tmp_path: Path, name: str, text: str | None, read: Callable[[Path], Any]
) -> None:
    marker = tmp_path / "ran"
    path = tmp_path / "data" / name
    path.parent.mkdir()
    (path.parent / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    if text is None:
        write_pickle(path, marker)
    else:
        path.write_text(text)
    with pytest.raises(ThinsectionError):
        read(path)
    assert not marker.exists()


def test_the_bomb_would_go_off(tmp_path: Path) -> None:
    write_pickle(tmp_path / "a.pkl", tmp_path / "ran")
    pickle.loads((tmp_path / "a.pkl").read_bytes())  # noqa: S301
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "rule",
    ["__import__('os').system('true')>0", "os:system", "tissue;true", "/tmp/x.py"],
)
def test_a_tile_filter_is_a_name_or_a_comparison(rule: str) -> None:
    with pytest.raises(ThinsectionError):
        load_filters([rule])


def test_a_results_folder_of_others_is_read_as_values(tmp_path: Path) -> None:
    folder = tmp_path / "slides" / "a"
    folder.mkdir(parents=True)
    document: dict[str, Any] = {"format": FORMAT, "slide": {}, "source": {}}
    for file in ("/etc/passwd", "../../evil", "256px/../../x"):
        document["stages"] = {"os:system": {"key": "k", "files": {file: 1}}}
        (folder / "slide.json").write_text(json.dumps(document))
        (ledger,) = load_ledgers(tmp_path)
        assert "must lie in the results folder" in (ledger.damage or "")
        assert not ledger.stages
    document["stages"] = {"a": {"key": "k", "files": {"256px/tiles/a.h5": 1}}}
    (folder / "slide.json").write_text(json.dumps(document))
    (ledger,) = load_ledgers(tmp_path)
    assert list(ledger.stages) == ["a"]


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST.",
        "x.localhost",
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "0.0.0.0",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[fe80::1%25eth0]",
        "169.254.169.254",
        "metadata.google.internal",
        "user:word@127.0.0.1",
        "example.org@localhost",
    ],
)
def test_a_table_sends_no_request_to_this_machine_unless_asked(
    tmp_path: Path, host: str
) -> None:
    path = tmp_path / "cohort.csv"
    path.write_text(f"slide_path\na.svs\nhttp://{host}:8000/a.svs\n")
    with pytest.raises(CohortError, match=r"line 3 of .*allow_local_urls=True"):
        load_cohort([path])
    assert len(load_cohort([path], SlidesConfig(allow_local_urls=True))) == 2
    assert RunConfig().slides.allow_local_urls is False


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org/a.svs",
        "http://10.0.0.7/a.svs",
        "http://[2001:db8::1]/a.svs",
    ],
)
def test_other_hosts_are_no_address_of_this_machine(url: str) -> None:
    assert not is_local_host(url)

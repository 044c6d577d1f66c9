"""`thinsection models` lists what is declared, and `check` says why one would not load."""

import json
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from thinsection.cli.app import build_app
from thinsection.encode import check as check_module
from thinsection.encode import declared_encoders, encoder_spec
from thinsection.errors import UnknownEncoderError
from thinsection.weights import hub as hub_module
from thinsection.weights.hub import hub_library


def invoke(*arguments: str):
    return CliRunner().invoke(
        build_app(["models"]), ["models", *arguments], env={"COLUMNS": "160"}
    )


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    hub = hub_library()
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    return hub


def test_the_table_and_the_json_have_every_declared_encoder() -> None:
    table = invoke()
    assert table.exit_code == 0
    listed = json.loads(invoke("--json").stdout)["encoders"]
    assert [e["name"] for e in listed] == list(declared_encoders())
    for spec in declared_encoders().values():
        assert spec.name in table.stdout and str(spec.dim) in table.stdout
    assert "pinned, gated" in table.stdout and "timm:<name>" in table.stdout


def test_into_a_pipe_a_line_is_an_encoder_and_no_name_is_broken() -> None:
    heading, *lines = (
        CliRunner()
        .invoke(build_app(["models"]), ["models"], env={"COLUMNS": "20"})
        .stdout.splitlines()
    )
    columns = heading.split("\t")
    rows = {
        line.split("\t")[0]: dict(zip(columns, line.split("\t"), strict=False))
        for line in lines
    }
    for spec in declared_encoders().values():
        row = rows[spec.name]
        assert row["from"] == (spec.repo or spec.source.split(";")[0])
        assert row["revision"] == (spec.revision[:7] if spec.revision else "")
        gated = ", gated" if spec.gated else ""
        assert row["weights"] == f"{spec.pin}{gated}"
    assert rows["efficientnet_lite0"]["weights"] == "packaged"
    assert rows["uni"]["weights"] == "pinned, gated"
    assert rows["hibou_l"]["weights"] == "unpinned, gated"
    assert rows["phikon"]["weights"] == "pinned"
    assert rows["efficientnet_lite0"]["fingerprint"].startswith("by a port, timm")
    assert rows["uni"]["fingerprint"] == "none"
    assert [
        line.split("\t")[1] for line in lines if line.startswith("slide encoder")
    ] == [
        *("mean", "max", "abmil", "titan", "gigapath", "gigapath_flash"),
        *("feather", "feather_uni", "feather_uni2_h", "chief", "madeleine"),
        *("cobra", "moozy", "prism", "tangle"),
    ]


def test_the_default_would_load(empty_cache) -> None:
    result = invoke("check", "efficientnet_lite0", "--device", "cpu")
    assert result.exit_code == 0, result.stdout
    assert "efficientnet_lite0 would load here" in result.stdout


def test_a_gated_model_without_a_token_says_where_to_accept_its_terms(
    empty_cache, monkeypatch
) -> None:
    monkeypatch.setattr(hub_module, "has_token", lambda: False)
    result = invoke("check", "uni", "--json", "--device", "cpu")
    answer = json.loads(result.stdout)
    assert result.exit_code == 1 and not answer["loads"]
    weights = next(c for c in answer["checks"] if c["name"] == "weights")
    assert not weights["ok"] and "accept the terms at" in weights["detail"]
    assert "set HF_TOKEN" in weights["detail"]


def test_with_a_token_but_no_network_it_names_the_command_for_another_machine(
    empty_cache, monkeypatch
) -> None:
    monkeypatch.setattr(hub_module, "has_token", lambda: True)
    result = invoke("check", "virchow2", "--device", "cpu")
    assert result.exit_code == 1
    command = "hf download paige-ai/Virchow2 model.safetensors --revision 3158645804b69e3f3bc4439d"
    assert command in result.stdout.replace("\n", " ")


def test_an_unpinned_encoder_would_not_load_unless_its_name_states_a_commit(
    empty_cache, monkeypatch
) -> None:
    monkeypatch.setattr(hub_module, "is_reachable", lambda _endpoint: True)
    result = invoke("check", "keep", "--device", "cpu")
    assert result.exit_code == 1 and "'keep@main'" in result.stdout
    assert invoke("check", "keep@main", "--device", "cpu").exit_code == 0


def test_cached_weights_are_found(empty_cache) -> None:
    revision = encoder_spec("phikon").revision
    assert revision is not None
    root = Path(empty_cache.constants.HF_HUB_CACHE)
    repo = root / "models--owkin--phikon"
    (repo / "snapshots" / revision).mkdir(parents=True)
    (repo / "snapshots" / revision / "model.safetensors").write_bytes(b"")
    checks = {c.name: c for c in check_module.check_encoder("phikon", device="cpu")}
    assert checks["weights"].ok and checks["weights"].detail.startswith("cached at")


def test_missing_packages_and_devices_are_named(monkeypatch) -> None:
    monkeypatch.setattr("thinsection.extras.is_installed", lambda _package: False)
    *_, last = check_module.check_encoder("uni", device="cpu")
    assert last.name == "packages" and not last.ok
    assert (
        last.detail
        == "not installed: timm, huggingface_hub; pip install 'thinsection[hub]'"
    )
    monkeypatch.undo()
    *_, last = check_module.check_encoder("efficientnet_lite0", device="cuda:99")
    assert last.name == "device" and not last.ok and "cuda:99" in last.detail


def test_too_little_memory_is_said_in_bytes(monkeypatch) -> None:
    class Little:
        available = 1 << 20

    monkeypatch.setattr(psutil, "virtual_memory", lambda: Little)
    *_, last = check_module.check_encoder("efficientnet_lite0", device="cpu")
    assert last.name == "memory" and not last.ok
    assert last.detail == "the weights need 12.9 MiB, and 1.0 MiB are free on cpu"


def test_an_unknown_name_raises_with_the_nearest() -> None:
    with pytest.raises(UnknownEncoderError, match="did you mean 'uni2_h'"):
        check_module.check_encoder("uni2-h2")

"""A bag in its files gives what the same bag gives in memory, whatever the budget."""

import numpy as np
import pytest
import torch
from tests.predict.planted import write_embeddings
from tests.predict.test_model_file import DIM, model

from thinsection.errors import BudgetError
from thinsection.evaluation.embeddings import open_embeddings
from thinsection.predict.answering import through
from thinsection.predict.bags import StoredBag
from thinsection.predict.heads.config import BLOCK_ROWS, HEADS

# heads whose tiles see each other; the others read blocks
WHOLE_HEADS = ("transmil", "transformer")
# more than a block, with the border of the slides within a block
NUM_TILES = (BLOCK_ROWS - 300, 900)


@pytest.fixture(scope="module")
def bag(tmp_path_factory: pytest.TempPathFactory) -> StoredBag:
    folder = tmp_path_factory.mktemp("bag")
    rng = np.random.default_rng(5)
    paths = []
    for number, count in enumerate(NUM_TILES):
        paths.append(folder / f"s{number}.h5")
        write_embeddings(paths[-1], rng.normal(0.3, 1, size=(count, DIM)))
    return StoredBag([open_embeddings(path) for path in paths], paths)


@pytest.mark.parametrize("name", HEADS.names())
@pytest.mark.parametrize("budget_bytes", [1, 4 * DIM * sum(NUM_TILES)])
def test_a_head_reads_blocks_or_refuses_a_bag_above_the_budget(
    name: str, budget_bytes: int, bag: StoredBag
) -> None:
    trained = model(name)
    draws_tiles = name != "mlp"
    if name in WHOLE_HEADS and budget_bytes < bag.num_bytes:
        with pytest.raises(BudgetError) as refused:
            through(trained, [0], bag, "cpu", tiles=True, budget_bytes=budget_bytes)
        text = str(refused.value)
        assert text.startswith(f"memory must be >= {bag.num_bytes / 1024:.1f} KiB for")
        assert f"head '{name}' reads at once, got 1 B" in text and "abmil" in text
        return
    logits, columns = through(
        trained, [0, 1], bag, "cpu", tiles=draws_tiles, budget_bytes=budget_bytes
    )
    whole = bag.read(cells=True)
    features, cells, _ = whole.tensors(torch.device("cpu"))
    with torch.inference_mode():
        outputs = [head(features, cells) for head in trained.heads]
    expected = torch.stack([output.logits for output in outputs]).numpy()
    # only the mean of mlp is summed in another order
    tolerance = 2e-6 if name == "mlp" else 0
    np.testing.assert_allclose(logits, expected, rtol=tolerance, atol=tolerance)
    if draws_tiles:
        attention = torch.stack([output.attention.mean(1) for output in outputs])
        np.testing.assert_allclose(
            columns["attention"], attention.mean(0).numpy(), rtol=1e-6
        )


def test_a_head_in_blocks_is_the_formula_over_the_whole_bag(bag: StoredBag) -> None:
    """The formulas of docs/validation/predictions.md, in float64 over all tiles at once."""
    x = bag.read(cells=False).features.astype(np.float64)
    for name in ("linear", "dsmil"):
        trained = model(name)
        logits, _ = through(trained, [0], bag, "cpu", tiles=True, budget_bytes=1)
        state = {
            k: v.double().numpy() for k, v in trained.heads[0].state_dict().items()
        }
        if name == "linear":
            expected = state["classifier.weight"] @ x.mean(0) + state["classifier.bias"]
        else:
            scores = x @ state["instance_classifier.weight"].T
            hidden = np.maximum(
                x @ state["query.0.weight"].T + state["query.0.bias"], 0
            )
            queries = np.tanh(
                hidden @ state["query.2.weight"].T + state["query.2.bias"]
            )
            likeness = queries @ queries[scores.argmax(0)].T / 128**0.5
            attention = np.exp(likeness) / np.exp(likeness).sum(0)
            pooled = attention.T @ x
            weight = state["classifier.weight"]
            expected = np.einsum("kjd,jd->k", weight, pooled) + state["classifier.bias"]
        np.testing.assert_allclose(logits[0], expected, rtol=2e-6, atol=2e-6)

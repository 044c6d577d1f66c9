"""`thinsection train`: a head on stored embeddings, with scores that hold."""

from pathlib import Path
from typing import Annotated, Any

import typer

from thinsection.cli.options import with_config
from thinsection.predict.experiment import TrainConfig, train
from thinsection.probe.result import METRIC_WORDS

app = typer.Typer()
_DATA = "Results folder, or features of TRIDENT, CLAM, STAMP, slide2vec."
Data = Annotated[Path, typer.Argument(metavar="RESULTS", help=_DATA)]
Out = Annotated[Path, typer.Option(help="Folder of the experiment: RESULTS/experiments/NAME.")]
Against = Annotated[Path | None, typer.Option(help="Experiment to compare with, case by case.")]


@app.command("train")
@with_config(TrainConfig)
def train_command(data: Data, out: Out, config: Any, against: Against = None) -> None:
    """Train a head on stored embeddings; test each case by a model that has not seen it.

    Writes experiment.json, index.html, predictions.csv and model.safetensors for `predict`.

    Examples:

      thinsection train results/ --labels labels.csv --target subtype --out results/experiments/a

      thinsection train results/ --labels labels.csv --target dead --time days --head clam_sb
      --grid lr=1e-4,5e-4 --out results/experiments/survival
    """
    told = train(data, out=out, config=config, against=against, on_message=typer.echo)
    words, (low, high) = METRIC_WORDS.get(told["metric"], told["metric"]), told["interval"]
    typer.echo(f"{words} {told['value']:.4f} [{low:.4f}, {high:.4f}], by {told['interval_by']}")
    if found := told.get("against"):
        span = f"[{found['low']:+.4f}, {found['high']:+.4f}]"
        than = f"{found['value']:+.4f} {span}, p {found['p_value']:.3g}"
        typer.echo(f"  against {found['name']}: {than}")
    typer.echo(out / "index.html")

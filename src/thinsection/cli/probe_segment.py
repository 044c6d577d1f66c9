"""`thinsection probe segment`: dense tokens, a segmentation head, Jaccard."""

from pathlib import Path
from typing import Annotated

import typer

from thinsection.cli.options import with_config
from thinsection.probe.segment_config import SegmentConfig

Data = Annotated[Path, typer.Argument(metavar="FOLDER", help="The dataset's folder.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for JSON, CSV, Markdown, HTML, PNG.")]


def add_to(app: typer.Typer) -> None:
    """Adds the subcommand `segment` to the group `probe`."""
    app.command("segment")(segment)


@with_config(SegmentConfig)
def segment(data: Data, out: Out, config: SegmentConfig) -> None:
    """A MaskTransformer head on frozen patch tokens, kept in the feature cache.

    Example:

      thinsection probe segment PanNuke/ --dataset pannuke --encoder uni --out probe/
    """
    from thinsection.probe.page import write_probe_report
    from thinsection.probe.segment_api import run_segment_probe
    from thinsection.probe.segment_plots import segment_pictures

    result, examples = run_segment_probe(data, config)
    pictures = segment_pictures(result, examples)
    files = write_probe_report(result, out, pictures=pictures)
    interval = result.interval
    span = "" if interval is None else f" [{interval.low:.4f}, {interval.high:.4f}]"
    baseline = result.details["all_background_score"]
    print(f"segment on {result.dataset}: weighted Jaccard {result.score:.4f}{span}")
    print(f"  background everywhere would score {baseline:.4f}")
    loss = result.facts["cache_loss"]
    if loss != "none":
        print(
            f"  lossy cache ({config.cache.cache_dtype}): largest error "
            f"{loss['max_abs_error']:.3g}, {loss['changed']} of {loss['values']} values changed"
        )
    print(f"  {files.html}")

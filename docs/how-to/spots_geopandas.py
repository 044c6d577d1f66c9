"""Joins spots to the tile that holds their centre, by geopandas."""

from pathlib import Path

import geopandas
import numpy as np
import pandas as pd

import thinsection as ts
from thinsection.testing.synthetic import write_he_slide

# two slides and their spots to try it on: put yours in their place
Path("slides").mkdir(exist_ok=True)
tables = []
for number, size in enumerate([(1400, 1000), (1000, 1300)]):
    write_he_slide(f"slides/s{number}.svs", size, seed=number, mpp=0.5)
    places = np.mgrid[100 : size[0] - 100 : 150, 100 : size[1] - 100 : 150]
    x, y = places.reshape(2, -1).astype(float)
    tables.append(pd.DataFrame({"slide_id": f"s{number}", "x": x, "y": y, "gene": x}))
spots = pd.concat(tables, ignore_index=True)
ts.run("slides", out="results", until="tiles", tile_px=128, tile_mpp=0.5)

# --8<-- [start:join]
results = ts.open_results("results")
tiles = results.to_geopandas()  # a row per tile of all slides, with its square in level-0 px
for slide_id, of_slide in spots.groupby("slide_id"):
    squares = tiles[tiles["slide_id"] == slide_id]
    points = geopandas.GeoDataFrame(
        of_slide[["gene"]], geometry=geopandas.points_from_xy(of_slide.x, of_slide.y)
    )
    joined = geopandas.sjoin(points, squares[["geometry"]], predicate="within")
    means = joined.groupby("index_right")["gene"].mean()
    results.write_column(slide_id, "gene", means.reindex(squares.index))
# --8<-- [end:join]

table = results.to_pandas()
known = table.dropna(subset=["gene"])
assert 0 < len(known) < len(table)
assert known["gene"].between(known["x"], known["x"] + 128).all()

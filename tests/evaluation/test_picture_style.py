"""Pictures of pages do not depend on the style that a user's process has."""

from matplotlib import pyplot
from matplotlib.axes import Axes

from thinsection.evaluation.plots import draw_picture


def draw(axes: Axes, values: list[float]) -> tuple[str, str]:
    axes.plot(values, label="values")
    axes.set_xlabel("number")
    return "Title", "Caption"


def test_a_style_of_the_user_leaves_pictures_as_they_are() -> None:
    before = draw_picture("a", [1.0, 2.0], draw)
    with pyplot.rc_context({"font.size": 7, "lines.linewidth": 5}):
        assert draw_picture("a", [1.0, 2.0], draw) == before
        assert pyplot.rcParams["font.size"] == 7

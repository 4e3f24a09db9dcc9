"""A plot of all layers of a model: dense bytes, sent bytes and the relative error of one step."""

import os

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.statistics import why_nothing

#: The height of one row and of the margins, in inches.
_ROW, _MARGIN = 0.22, 1.6


def draw(stats, path, ranks, unregistered=None):
    """Draw one row per parameter and write the plot to a file.

    Args:
        stats: the result of :meth:`Compressor.stats`.
        path: the path of the file; its extension selects the format.
        ranks: the number of ranks that the compressor exchanges with, including this one.
        unregistered: what :meth:`BaseAdapter.unregistered` returned.

    Raises:
        ImportError: matplotlib is not installed.
        InvalidArgumentError: nothing was exchanged, or matplotlib does not write such files.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidArgumentError(f"plot path: expected one such as 'layers.png', got {path!r}")
    why = why_nothing(stats, ranks, unregistered)
    if why is not None:
        raise InvalidArgumentError(
            f"plot: expected a step with exchanged gradients, got none. {why}"
        )
    figure = figure_of(stats)
    extension = os.path.splitext(os.fsdecode(path))[1].removeprefix(".")
    formats = figure.canvas.get_supported_filetypes()
    if extension and extension.lower() not in formats:
        raise InvalidArgumentError(
            f"plot path: expected an extension of {', '.join(sorted(formats))}, got {str(path)!r}"
        )
    figure.savefig(path, dpi=120)


def figure_of(stats):
    """Return the plot as a figure of matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(stats)
    places = range(len(names))
    dense = [stats[name]["dense_bytes"] for name in names]
    sent = [stats[name]["sent_bytes"] for name in names]
    errors = [stats[name]["relative_error"] for name in names]
    figure = Figure(figsize=(11, _MARGIN + _ROW * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    of_bytes, of_errors = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    of_bytes.barh([place - 0.2 for place in places], dense, 0.4, label="dense", color="#bbbbbb")
    of_bytes.barh([place + 0.2 for place in places], sent, 0.4, label="sent", color="#2b6cb0")
    if any(dense):
        of_bytes.set_xscale("log")
    of_bytes.set_yticks(list(places), names, fontsize=8)
    of_bytes.invert_yaxis()  # put the first layer at the top
    of_bytes.set_xlabel("bytes per step and rank")
    share = sum(sent) / sum(dense) if any(dense) else 0.0
    of_bytes.set_title(f"sent {sum(sent):,} of {sum(dense):,} bytes: {share:.2%}", fontsize=10)
    of_bytes.legend(loc="lower right", fontsize=8)
    known = [(place, error) for place, error in zip(places, errors) if error is not None]
    of_errors.plot(
        [error for _, error in known], [place for place, _ in known], "o", color="#c05621"
    )
    of_errors.set_xlim(-0.03, 1.03)
    of_errors.set_xlabel("relative error of one step;\n0.8 to 0.99 is normal at 1 %", fontsize=8)
    for axes in (of_bytes, of_errors):
        axes.grid(axis="x", alpha=0.3)
    return figure

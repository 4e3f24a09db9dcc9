"""Measure every index codec with every value codec on real gradients, and DeepReduce's Figure 8.

The figure shows our results beside the published ones.
"""

import numpy as np
from measure import every_codec, seconds, summarized
from real_gradients import load_gradients

import deepreduce_hvd as dr

RATIO = 0.01
INDEX = every_codec(
    dr.IndexCodec,
    {
        "Huffman": dr.Huffman(),
        "Huffman delta": dr.Huffman(delta=True),
        "Bloom P0": dr.Bloom(fpr="auto", policy="p0"),
        "Bloom P1": dr.Bloom(fpr=1e-3, policy="p1"),
        "Bloom leftmost": dr.Bloom(fpr=1e-3, policy="leftmost"),
        "Bloom P2": dr.Bloom(fpr=1e-3, policy="p2"),
    },
)
VALUE = every_codec(dr.ValueCodec, {"QSGD 4": dr.QSGD(bits=4), "QSGD 8": dr.QSGD(bits=8)})

#: DeepReduce, Figure 8: volume in % of dense for a convolution of 36,864 weights at 1 %, as read
#: from the paper; and our codec
FIGURE_8 = {
    "Top-r": (2.00, dr.Codec(dr.TopK(RATIO))),
    "Huffman": (1.62, dr.Codec(dr.TopK(RATIO), index=dr.Huffman())),
    "RLE": (1.59, dr.Codec(dr.TopK(RATIO), index=dr.RLE())),
    "Bloom P2": (1.45, dr.Codec(dr.TopK(RATIO), index=dr.Bloom(fpr=1e-3, policy="p2"))),
    "Rice": (None, dr.Codec(dr.TopK(RATIO), index=dr.Rice())),
    "Deflate": (1.90, dr.Codec(dr.TopK(RATIO), value=dr.Deflate())),
    "QSGD": (1.25, dr.Codec(dr.TopK(RATIO), value=dr.QSGD(bits=8))),
    "FitPoly": (1.17, dr.Codec(dr.TopK(RATIO), value=dr.FitPoly())),
    "FitDExp": (1.02, dr.Codec(dr.TopK(RATIO), value=dr.FitDExp())),
    "FitDExp + Bloom P2": (
        0.75,
        dr.Codec(dr.TopK(RATIO), index=dr.Bloom(fpr=1e-3, policy="p2"), value=dr.FitDExp()),
    ),
    "QSGD + Bloom P2": (
        0.70,
        dr.Codec(dr.TopK(RATIO), index=dr.Bloom(fpr=1e-3, policy="p2"), value=dr.QSGD(bits=8)),
    ),
    "SKCompress": (
        0.34,
        dr.Codec(dr.TopK(RATIO), index=dr.Huffman(delta=True), value=dr.Quantile()),
    ),
    "QSGD 4 + Rice": (None, dr.Codec(dr.TopK(RATIO), index=dr.Rice(), value=dr.QSGD(bits=4))),
}


def measure(codec, gradient, repeats=3):
    """Return bytes, sections, error and times of one codec on one gradient (d,)."""
    payload = codec.encode(gradient)
    info = dr.inspect(payload)
    decoded = dr.decode(payload)
    top = dr.decode(dr.Codec(codec.sparsifier).encode(gradient))
    return {
        "bytes": info["total_bytes"],
        "sections": {part: info[f"{part}_bytes"] for part in ("header", "index", "value", "order")},
        "share_of_dense": info["total_bytes"] / (4 * gradient.size),
        "error_to_gradient": float(np.linalg.norm(gradient - decoded) / np.linalg.norm(gradient)),
        "error_to_top_r": float(np.linalg.norm(top - decoded) / np.linalg.norm(top)),
        "encode_seconds": seconds(lambda: codec.encode(gradient), repeats),
        "decode_seconds": seconds(lambda: dr.decode(payload), repeats),
    }


def all_combinations():
    """Return a row for each index codec × value codec × gradient."""
    rows = []
    for name, gradient in load_gradients().items():
        for index_name, index in INDEX.items():
            for value_name, value in VALUE.items():
                codec = dr.Codec(dr.TopK(RATIO), index=index, value=value)
                rows.append(
                    {
                        "gradient": name,
                        "d": gradient.size,
                        "index": index_name,
                        "value": value_name,
                        **measure(codec, gradient),
                    }
                )
    return rows


def summary(rows):
    """Return a record for each index codec × value codec, over all gradients."""
    figures = ("share_of_dense", "error_to_top_r", "encode_seconds", "decode_seconds")
    return summarized(
        rows,
        ("index", "value"),
        "gradients",
        {name: lambda row, name=name: row[name] for name in figures},
    )


def combination_table(rows, gradient):
    """Return the combinations on one gradient as text, the smallest first."""
    chosen = sorted(
        (row for row in rows if row["gradient"] == gradient), key=lambda row: row["bytes"]
    )
    lines = [
        f"{'index':<15}{'value':<10}{'bytes':>8}{'of dense':>10}{'error to Top-r':>16}{'encode ms':>11}{'decode ms':>11}"
    ]
    for row in chosen:
        lines.append(
            f"{row['index']:<15}{row['value']:<10}{row['bytes']:>8,}{row['share_of_dense']:>10.4%}{row['error_to_top_r']:>16.4f}"
            f"{1e3 * row['encode_seconds']:>11.3f}{1e3 * row['decode_seconds']:>11.3f}"
        )
    return "\n".join(lines)


def figure_8():
    """Measure the published instances on a real gradient of 36,864 elements."""
    gradient = load_gradients()["convolution3.weight@100"]
    return [
        {"name": name, "published_percent": published, **measure(codec, gradient, 15)}
        for name, (published, codec) in FIGURE_8.items()
    ]


def draw_figure_8(rows, path):
    """Plot the volume by section beside the published volume, and the time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (volume, runtime) = pyplot.subplots(
        2, 1, figsize=(10, 8), sharex=True, layout="constrained"
    )
    places = np.arange(len(rows))
    bottom = np.zeros(len(rows))
    for part, color in (
        ("index", "tab:blue"),
        ("value", "tab:orange"),
        ("order", "tab:green"),
        ("header", "tab:gray"),
    ):
        height = np.array([100 * row["sections"][part] / (4 * 36_864) for row in rows])
        volume.bar(places, height, bottom=bottom, color=color, label=part)
        bottom += height
    published = [
        (place, row["published_percent"])
        for place, row in zip(places, rows)
        if row["published_percent"] is not None
    ]
    volume.plot(
        *zip(*published),
        "k_",
        markersize=22,
        markeredgewidth=2,
        label="published (DeepReduce, Figure 8)",
    )
    volume.set_ylabel("volume, % of dense float32")
    volume.set_title("A convolution's real gradient, d = 36,864, Top-r 1 %")
    volume.legend()
    for key, label, color, bottoms in (
        ("encode_seconds", "encode (with selection)", "tab:blue", np.zeros(len(rows))),
        (
            "decode_seconds",
            "decode",
            "tab:orange",
            np.array([1e6 * row["encode_seconds"] for row in rows]),
        ),
    ):
        runtime.bar(
            places, [1e6 * row[key] for row in rows], bottom=bottoms, label=label, color=color
        )
    runtime.set_ylabel("microseconds, one thread")
    runtime.set_xticks(places, [row["name"] for row in rows], rotation=30, ha="right")
    runtime.legend()
    for axes in (volume, runtime):
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=110)

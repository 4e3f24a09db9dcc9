"""Load the two data sets of the examples as NumPy arrays, from the cache that ``make data`` fills.

This module downloads nothing, and it never substitutes other data for a missing data set.
"""

import os
from pathlib import Path

import numpy as np


def cache_directory() -> Path:
    """Return the cache of ``make data``: $DEEPREDUCE_CACHE, or ~/.cache/deepreduce-hvd."""
    return (
        Path(os.environ.get("DEEPREDUCE_CACHE") or Path.home() / ".cache" / "deepreduce-hvd")
        .expanduser()
        .resolve()
    )


def _path(folder, name):
    path = cache_directory() / folder / name
    if not path.is_file():
        raise FileNotFoundError(
            f"expected the data file {path}, got none: run `make data` (DEEPREDUCE_CACHE "
            "names another cache)"
        )
    return path


def _idx(name, shape):
    """Read one file in the IDX format.

    The format is: two zero bytes, the type (8: uint8), the number of dimensions, each size as
    big-endian uint32, the data.
    """
    path = _path("fashion-mnist", name)
    content = np.fromfile(path, np.uint8)
    header = np.concatenate(
        [np.array([0, 0, 8, len(shape)], np.uint8), np.array(shape, ">u4").view(np.uint8)]
    )
    expected = header.size + int(np.prod(shape))
    if content.size != expected or not np.array_equal(content[: header.size], header):
        raise ValueError(
            f"{path}: expected {expected} bytes of uint8 data of shape {shape}, got "
            f"{content.size} bytes: run `make data`"
        )
    return content[header.size :].reshape(shape)


def fashion_mnist():
    """Load Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017).

    Returns:
        Train images, train labels, test images, test labels. Images are uint8 (60000, 28, 28) and
        (10000, 28, 28); labels are uint8 (60000,) and (10000,), in 0..9.

    Raises:
        FileNotFoundError: ``make data`` has not run.
        ValueError: a file has unexpected content.
    """
    return (
        _idx("train-images-idx3-ubyte", (60000, 28, 28)),
        _idx("train-labels-idx1-ubyte", (60000,)),
        _idx("t10k-images-idx3-ubyte", (10000, 28, 28)),
        _idx("t10k-labels-idx1-ubyte", (10000,)),
    )


def movielens_100k():
    """Load MovieLens-100k (Harper and Konstan, 2015).

    Returns:
        Users, int64 in 1..943; items, int64 in 1..1682; ratings, float32 in 1..5; timestamps, int64
        in seconds. Each is (100000,), one entry per rating, in the order of the file.

    Raises:
        FileNotFoundError: ``make data`` has not run.
        ValueError: the file has unexpected content.
    """
    path = _path("movielens-100k", "ml-100k.inter")
    columns = np.loadtxt(path, np.int64, delimiter="\t", skiprows=1, unpack=True)
    if columns.shape != (4, 100000):
        raise ValueError(
            f"{path}: expected 100000 rows of 4 columns, got {columns.shape[::-1]}: run `make data`"
        )
    users, items, ratings, timestamps = columns
    return users, items, ratings.astype(np.float32), timestamps

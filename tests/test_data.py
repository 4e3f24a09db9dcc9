"""Test fetching and reading the data sets: errors name damaged or missing files."""

import gzip
import os
import subprocess
import sys
from pathlib import Path

import console
import datasets
import fetch_data as data
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPREDUCE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(data.DIRECTORY_VARIABLE, raising=False)
    return tmp_path / "cache"


def test_both_sides_name_the_same_cache(empty_cache, monkeypatch):
    assert console.cache_directory() == datasets.cache_directory() == empty_cache
    monkeypatch.delenv("DEEPREDUCE_CACHE")
    assert console.cache_directory() == datasets.cache_directory()


def test_fashion_mnist():
    train, train_labels, test, test_labels = datasets.fashion_mnist()
    assert (train.shape, test.shape, train.dtype) == ((60000, 28, 28), (10000, 28, 28), np.uint8)
    assert (
        np.bincount(train_labels).tolist() == [6000] * 10
        and np.bincount(test_labels).tolist() == [1000] * 10
    )
    assert abs(train.mean() / 255 - 0.2860) < 1e-4  # the known mean of this data set


def test_movielens_100k():
    users, items, ratings, timestamps = datasets.movielens_100k()
    assert len(users) == len(items) == len(ratings) == len(timestamps) == 100000
    assert (len(np.unique(users)), len(np.unique(items))) == (943, 1682)
    assert set(np.unique(ratings)) == {1, 2, 3, 4, 5} and ratings.dtype == np.float32


@pytest.mark.parametrize("load", [datasets.fashion_mnist, datasets.movielens_100k])
def test_absent_data_is_an_error_that_names_the_command(empty_cache, load):
    with pytest.raises(FileNotFoundError, match="run `make data`"):
        load()


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-1], lambda content: b"\1" + content[1:]]
)
def test_damaged_images_are_refused(tmp_path, monkeypatch, damage):
    whole = (datasets.cache_directory() / "fashion-mnist" / "train-images-idx3-ubyte").read_bytes()
    monkeypatch.setenv("DEEPREDUCE_CACHE", str(tmp_path))
    data.store(tmp_path / "fashion-mnist", {"train-images-idx3-ubyte": damage(whole)})
    with pytest.raises(ValueError, match="expected 47040016 bytes"):
        datasets.fashion_mnist()


def test_a_named_directory_with_other_content_is_refused_and_nothing_is_kept(
    empty_cache, tmp_path, monkeypatch
):
    monkeypatch.setenv(data.DIRECTORY_VARIABLE, str(tmp_path))
    for name in data.FASHION_MNIST:
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(b"not images"))
    assert data.fashion_mnist_problems() == []
    with pytest.raises(
        console.SetUpError, match="expected 47040016 bytes with SHA-256 .*, got 10 bytes"
    ):
        data.fetch_fashion_mnist(empty_cache / "fashion-mnist")
    assert not (empty_cache / "fashion-mnist").exists()


def test_a_named_directory_with_the_right_content_is_taken(tmp_path, monkeypatch):
    source = datasets.cache_directory() / "fashion-mnist"
    for name in data.FASHION_MNIST:
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((source / name).read_bytes(), 1))
    monkeypatch.setenv(data.DIRECTORY_VARIABLE, str(tmp_path))
    data.fetch_fashion_mnist(tmp_path / "cache")
    assert data.is_cached(tmp_path / "cache", data.FASHION_MNIST)


def test_a_named_directory_without_the_files_is_known_before_anything_is_built(
    empty_cache, tmp_path, monkeypatch
):
    monkeypatch.setenv(data.DIRECTORY_VARIABLE, str(tmp_path))
    (problem,) = data.fashion_mnist_problems()
    assert "expected four .gz files, got no train-images-idx3-ubyte.gz" in problem


def test_no_apt_is_known_before_anything_is_built(empty_cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (problem,) = data.fashion_mnist_problems()
    assert "expected apt-get and dpkg" in problem and data.DIRECTORY_VARIABLE in problem


def test_a_damaged_cache_is_noticed(empty_cache, capsys):
    data.store(empty_cache, {"ml-100k.inter": b"short"})
    assert not data.is_cached(empty_cache, data.MOVIELENS)
    assert "the cache is damaged" in capsys.readouterr().out


def test_fetch_failure_names_what_to_do(empty_cache, tmp_path):
    """apt-get always fails.

    Both ways are tried, and the message names the variable to use instead.
    """
    tools = tmp_path / "tools"
    tools.mkdir()
    apt = tools / "apt-get"
    apt.write_text("#!/bin/sh\necho 'E: no network'\nexit 100\n")
    apt.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "DEEPREDUCE_CACHE": str(empty_cache),
    }
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "fetch_data.py"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode == 1
        and "E: no network" in done.stderr
        and "DEEPREDUCE_FASHION_MNIST" in done.stderr
    ), done.stderr
    assert "private ones" in done.stdout and not (empty_cache / "fashion-mnist").exists()

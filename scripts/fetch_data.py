"""Download the two public data sets of the demo and the tests into the cache, and verify them.

Fashion-MNIST (MIT license) is a Debian package. On other systems, DEEPREDUCE_FASHION_MNIST names a
directory with the same four .gz files. MovieLens-100k (its own terms forbid redistribution, so it
is not part of this repository) is an example file in the PyPI wheel of recbole. Only files with the
expected SHA-256 are kept.
"""

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from console import SetUpError, cache_directory, clean_environment, locked, run, say

#: file in the cache -> (size in bytes, SHA-256) of the unpacked content
FASHION_MNIST = {
    "train-images-idx3-ubyte": (
        47040016,
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    "train-labels-idx1-ubyte": (
        60008,
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    "t10k-images-idx3-ubyte": (
        7840016,
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    "t10k-labels-idx1-ubyte": (
        10008,
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
}
MOVIELENS = {
    "ml-100k.inter": (1979230, "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff")
}

DEBIAN_PACKAGE = "dataset-fashion-mnist"
DEBIAN_FOLDER = "usr/share/datasets/fashion-mnist"
MOVIELENS_WHEEL = "recbole==1.2.1"
MOVIELENS_MEMBER = "recbole/dataset_example/ml-100k/ml-100k.inter"
DIRECTORY_VARIABLE = "DEEPREDUCE_FASHION_MNIST"


def check(content, name, expected, source):
    """Raise SetUpError unless the content has the expected size and SHA-256."""
    size, digest = expected
    found = hashlib.sha256(content).hexdigest()
    if len(content) != size or found != digest:
        raise SetUpError(
            f"{name} from {source}: expected {size} bytes with SHA-256 {digest}, got "
            f"{len(content)} bytes with {found}"
        )


def is_cached(folder, files):
    """Return whether all files are cached and valid; report invalid ones."""
    for name, expected in files.items():
        path = folder / name
        if not path.exists():
            return False
        try:
            check(path.read_bytes(), name, expected, folder)
        except SetUpError as error:
            say(f"fetching again, the cache is damaged: {error}")
            return False
    return True


def store(folder, contents):
    """Put verified files into the cache; each one is moved there when it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(content)
        os.chmod(file.name, 0o644)
        os.replace(file.name, folder / name)


def fashion_mnist_problems():
    """Return what would prevent fetching Fashion-MNIST; called before anything is built."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named:
        missing = [
            f"{name}.gz" for name in FASHION_MNIST if not (Path(named) / f"{name}.gz").is_file()
        ]
        return (
            [
                (
                    f"data: {DIRECTORY_VARIABLE}={named}: expected four .gz files, got no "
                    f"{', '.join(missing)}"
                )
            ]
            if missing
            else []
        )
    cached = all((cache_directory() / "fashion-mnist" / name).exists() for name in FASHION_MNIST)
    if not cached and (shutil.which("apt-get") is None or shutil.which("dpkg") is None):
        return [
            f"data: expected apt-get and dpkg to fetch Debian's package {DEBIAN_PACKAGE}, "
            "got none on PATH; put the four files "
            f"{', '.join(f'{name}.gz' for name in FASHION_MNIST)} into a directory and "
            f"name it in {DIRECTORY_VARIABLE}"
        ]
    return []


def download_debian_package(scratch):
    """Download the .deb file and return its path.

    Needs no root. It uses the system's package lists, or private ones if those do not work.
    """
    options = ["-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []
    download = ["apt-get", *options, "download", DEBIAN_PACKAGE]
    try:
        run(
            download,
            "data: Debian's package of Fashion-MNIST, 31 MB",
            "5 s",
            cwd=scratch,
            log_name="fashion-mnist",
        )
    except SetUpError:
        say("the system's package lists are missing or out of date: fetching private ones")
        for folder in ("lists/partial", "cache/archives/partial"):
            (scratch / folder).mkdir(parents=True)
        private = [
            *options,
            "-o",
            f"Dir::State::Lists={scratch}/lists",
            "-o",
            f"Dir::Cache={scratch}/cache",
        ]
        try:
            run(
                ["apt-get", *private, "update"],
                "data: package lists",
                "10 s",
                cwd=scratch,
                log_name="apt-lists",
            )
            run(["apt-get", *private, "download", DEBIAN_PACKAGE], "data: Debian's package of Fashion-MNIST, 31 MB", "5 s",
                cwd=scratch, log_name="fashion-mnist")  # fmt: skip
        except SetUpError as error:
            raise SetUpError(
                f"{error}\nFashion-MNIST: expected Debian's package {DEBIAN_PACKAGE} from "
                "this machine's apt sources. Without them: put "
                f"the four files {', '.join(f'{name}.gz' for name in FASHION_MNIST)} into "
                f"a directory, name it in {DIRECTORY_VARIABLE}, "
                f"and run make data again."
            ) from None
    return next(scratch.glob("*.deb"))


def fetch_fashion_mnist(folder):
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        source = os.environ.get(DIRECTORY_VARIABLE)
        if not source:
            subprocess.run(
                ["dpkg", "-x", str(download_debian_package(scratch)), str(scratch / "unpacked")],
                check=True,
            )
            source = scratch / "unpacked" / DEBIAN_FOLDER
        contents = {}
        for file, expected in FASHION_MNIST.items():
            packed = Path(source) / f"{file}.gz"
            try:
                contents[file] = gzip.decompress(packed.read_bytes())
            except (OSError, EOFError) as error:
                raise SetUpError(
                    f"Fashion-MNIST: expected a gzip file at {packed}, got: {error}"
                ) from None
            check(contents[file], file, expected, source)
    store(folder, contents)


def fetch_movielens(folder, python):
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        command = [
            python,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--progress-bar",
            "off",
            "-d",
            scratch,
            MOVIELENS_WHEEL,
        ]
        try:
            run(
                command,
                f"data: MovieLens-100k inside the wheel {MOVIELENS_WHEEL}, 2 MB",
                "3 s",
                log_name="movielens",
                environment=clean_environment(),
            )
        except SetUpError as error:
            raise SetUpError(
                f"{error}\nMovieLens-100k: expected the wheel {MOVIELENS_WHEEL} from "
                "pip's index; check pip's index and the network."
            ) from None
        wheel = next(scratch.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            if MOVIELENS_MEMBER not in archive.namelist():
                raise SetUpError(
                    f"MovieLens-100k: expected {MOVIELENS_MEMBER} in {wheel.name}, got no such file"
                )
            content = archive.read(MOVIELENS_MEMBER)
        check(content, "ml-100k.inter", MOVIELENS["ml-100k.inter"], wheel.name)
    store(folder, {"ml-100k.inter": content})


def fetch(python):
    """Fetch both data sets into the cache; ``python`` is an interpreter that has pip."""
    cache = cache_directory()
    with locked(cache / "data.lock", "fetching data"):
        if not is_cached(cache / "fashion-mnist", FASHION_MNIST):
            fetch_fashion_mnist(cache / "fashion-mnist")
        if not is_cached(cache / "movielens-100k", MOVIELENS):
            fetch_movielens(cache / "movielens-100k", python)
    say(f"data: Fashion-MNIST and MovieLens-100k are in {cache}, checked")


if __name__ == "__main__":
    try:
        fetch(sys.argv[1] if len(sys.argv) > 1 else sys.executable)
    except SetUpError as error:
        sys.exit(f"make data: {error}")

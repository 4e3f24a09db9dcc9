"""Test what a program says that imports the sources of a clone, which are not built."""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_the_folder_of_a_clone(tmp_path):
    shutil.copytree(
        ROOT / "deepreduce_hvd",
        tmp_path / "deepreduce_hvd",
        ignore=shutil.ignore_patterns("*.so", "csrc"),
    )
    shutil.copy(ROOT / "setup.py", tmp_path)
    # -S leaves out .pth files, through which an editable installation would provide the core
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_paths()["purelib"]}
    for command in (["-m", "deepreduce_hvd", "--check"], ["-c", "import deepreduce_hvd"]):
        done = subprocess.run(
            [sys.executable, "-S", *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 1
        assert f"{tmp_path} contains the sources; if the package is installed, run Python in" in (
            done.stderr
        )

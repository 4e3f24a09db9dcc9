"""The CUDA sources compile: no GPU is needed, only nvcc."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts"))

import build_cuda

needs_nvcc = pytest.mark.skipif(build_cuda.find_nvcc() is None, reason="there is no nvcc: the CUDA sources were not compiled by it")


def test_architecture_options():
    assert build_cuda.architecture_options(["7.0", "9.0"]) == [
        "-gencode=arch=compute_70,code=sm_70", "-gencode=arch=compute_90,code=sm_90", "-gencode=arch=compute_90,code=compute_90",
    ]  # fmt: skip


@needs_nvcc
@pytest.mark.slow
def test_every_source_compiles(tmp_path):
    nvcc = build_cuda.find_nvcc()
    known = build_cuda.known_architectures(nvcc)
    architectures = [architecture for architecture in build_cuda.ARCHITECTURES if architecture in known]
    objects = build_cuda.build(nvcc, tmp_path, architectures)
    assert len(objects) == len(build_cuda.sources())


@needs_nvcc
def test_what_does_not_compile_is_told(tmp_path, monkeypatch):
    bad = tmp_path / "bad.cu"
    (tmp_path / "empty.h").touch()
    bad.write_text("__global__ void kernel() { this is not code; }\n")
    monkeypatch.setattr(build_cuda, "sources", lambda: [bad])
    monkeypatch.setattr(build_cuda, "CORE", tmp_path)
    monkeypatch.setattr(build_cuda, "ROOT", tmp_path)
    with pytest.raises(build_cuda.subprocess.CalledProcessError):
        build_cuda.build(build_cuda.find_nvcc(), tmp_path / "objects", ["9.0"])

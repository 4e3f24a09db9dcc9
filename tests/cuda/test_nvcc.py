"""Test the options and errors of nvcc. tests/test_gpu_check.py compiles every source."""

import build_cuda
import nvcc
import pytest

needs_nvcc = pytest.mark.skipif(
    nvcc.find() is None, reason="there is no nvcc: the CUDA sources were not compiled by it"
)


def test_architecture_options():
    assert nvcc.code_options("7.0") == ["-gencode=arch=compute_70,code=sm_70"]
    assert nvcc.code_options("9.0a", ptx=True) == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90a,code=compute_90a",
    ]


@needs_nvcc
def test_what_does_not_compile_is_told(tmp_path, monkeypatch, capfd):
    bad = tmp_path / "bad.cu"
    bad.write_text("__global__ void kernel() { this is not code; }\n")
    monkeypatch.setattr(build_cuda, "sources", lambda: [bad])
    monkeypatch.setattr(build_cuda, "ROOT", tmp_path)
    with pytest.raises(build_cuda.CommandError, match="expected exit status 0"):
        build_cuda.build(nvcc.find(), tmp_path / "objects", ["9.0"])
    assert "bad.cu" in capfd.readouterr().err

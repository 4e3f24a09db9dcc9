"""Test states in a job of one rank."""

import warnings

import pytest
from compressors_with_state import FRAMEWORKS


@FRAMEWORKS
def test_residuals_that_one_rank_of_horovod_does_not_apply(framework):
    """Horovod calls the compressor of one rank only in elastic training."""
    source, target = framework(), framework()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.compressor.load_state_dict(source.compressor.state_dict())  # of no step
    source.step(0)
    with pytest.warns(UserWarning, match="the loaded residuals are not applied"):
        target.compressor.load_state_dict(source.compressor.state_dict())

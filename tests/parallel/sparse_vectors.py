"""Test dr.sparse_allreduce on stock Horovod, in the same way for both frameworks."""

import numpy as np

import deepreduce_hvd as dr

D = 400
_COMMUNICATORS = [
    dr.Allgather(),
    dr.SplitAllgather(),
    dr.RecursiveDoubling(),
    dr.GTopK(),
    dr.GTopK(form="tree"),
    dr.Auto(),
]


def given(rank, seed=0):
    """Return (indices, values) of a rank; the indices are not sorted."""
    random = np.random.default_rng((rank, seed))
    indices = random.permutation(D)[: 30 + 10 * rank]
    return indices, random.standard_normal(indices.size, dtype=np.float32)


def dense_sum(size, seed=0):
    dense = np.zeros(D)
    for rank in range(size):
        indices, values = given(rank, seed)
        dense[indices] += values
    return dense


def check(hvd, tensor, to_numpy):
    """Check results and errors on all ranks.

    Args:
        hvd: the Horovod module of the framework.
        tensor, to_numpy: functions that convert arrays to tensors of the framework, and back.
    """
    rank, size = hvd.rank(), hvd.size()
    indices, values = given(rank)
    tensors = tensor(indices), tensor(values)
    expected = dense_sum(size)
    for communicator in _COMMUNICATORS:
        for value in (None, dr.QSGD(bits=4)):
            options = {"communicator": communicator, "value": value}
            summed = dr.sparse_allreduce(indices, values, D, hvd.Sum, **options)
            average = dr.sparse_allreduce(*tensors, D, name="average", **options)
            assert all(isinstance(part, type(tensors[0])) for part in average)
            assert summed.indices.dtype == indices.dtype and summed.values.dtype == np.float32
            average = dr.SparseVectors(*map(to_numpy, average))
            np.testing.assert_array_equal(average.indices.dtype, indices.dtype)
            if value is None:
                np.testing.assert_array_equal(average.indices, summed.indices)
                np.testing.assert_array_equal(average.values, summed.values / np.float32(size))
            everything = np.zeros(D)
            for result in _of_all_ranks(hvd, summed):
                np.testing.assert_array_equal(result.indices, summed.indices)
                np.testing.assert_array_equal(
                    result.values.view(np.uint32), summed.values.view(np.uint32)
                )
                everything[result.rest_indices] += result.rest_values
                if value is None and not isinstance(communicator, dr.GTopK):
                    assert result.rest_indices.size == 0
            everything[summed.indices] += summed.values
            np.testing.assert_allclose(everything, expected, atol=1e-5, err_msg=f"{communicator}")
    _check_errors(hvd)
    # the errors leave nothing behind
    result = dr.sparse_allreduce(indices, values, D, hvd.Sum, "again")
    np.testing.assert_array_equal(result.indices, np.flatnonzero(expected))


def _of_all_ranks(hvd, result):
    return [dr.SparseVectors(*parts) for parts in hvd.allgather_object(tuple(result))]


def _check_errors(hvd):
    """Check that all ranks raise if one rank passes a wrong argument."""
    rank, size = hvd.rank(), hvd.size()
    indices, values = given(rank)
    wrong = rank == size - 1
    for arguments, message in (
        ((indices, values[: -1 if wrong else None], D, None), "values: expected as many as"),
        ((indices, values, D, 7 if wrong else None), "op: expected hvd.Average or hvd.Sum, got 7"),
        ((indices, values, 5 if wrong else D, None), "indices: expected at least 0 and less"),
        ((indices.tolist() if wrong else indices, values, D, None), "got list"),
    ):
        for communicator in _COMMUNICATORS:
            try:
                dr.sparse_allreduce(*arguments, communicator=communicator)
            except dr.InvalidArgumentError as error:
                assert wrong and message in str(error), error
            except dr.PeerFailedError as error:
                assert not wrong and f"rank {size - 1}: InvalidArgumentError: " in str(error), error
                assert message in str(error), error
            else:
                raise AssertionError(f"expected an error: {message}")
    for options, message in (
        ({"op": hvd.Sum if wrong else hvd.Average}, "expected the same op on all ranks"),
        ({"communicator": _COMMUNICATORS[wrong]}, "expected the same communicator on all ranks"),
        ({"index": dr.RawIndex() if wrong else None}, "expected the same index on all ranks"),
    ):
        try:
            dr.sparse_allreduce(indices, values, D, **options)
        except dr.InvalidArgumentError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"expected an error: {message}")

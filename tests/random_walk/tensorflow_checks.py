"""Checks after every step of a random program for TensorFlow."""

import numpy as np

#: relative tolerance of a dtype where only the order of Horovod's additions differs
_CLOSE = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


class Checks:
    """Compares the state of all ranks with the oracle. Every rank checks all of them."""

    def __init__(self, program, oracle):
        self._program = program
        self._oracle = oracle

    def check(self, ranks, reductions, bad, moving):
        """Raise AssertionError if the state of any rank is wrong.

        Args:
            ranks: for each rank, the "results" of each reduction, {variable: array}, the values of
                its "variables", which of them have "moved" but should not, and what each compressor
                has "kept", {variable: (arrays, steps)}.
            reductions: (part, {rank: gradients}), in order.
            bad: (rank, variable, value) of an element that is not finite, or None.
            moving: variables of the last reduction that may have moved.
        """
        before = [
            {variable: one.copy() for variable, one in kept.items()} for kept in self._oracle.kept
        ]
        for place, (part, gradients) in enumerate(reductions):
            expected = self._oracle.reduce(part, gradients)
            of_part = {
                rank: ranks[rank]["results"][place] for rank in self._program.ranks(part.compressor)
            }
            found = next(iter(of_part.values()))
            for variable in part.present:
                what = f"reduction {place}, variable {variable}"
                _expect_replicas(what, {rank: one[variable] for rank, one in of_part.items()})
                plain_sum = self._oracle.plain_sum(part, variable, gradients)
                self._compare(what, part, variable, found[variable], expected[variable], plain_sum)
            self._oracle.count(part, gradients, found)
        moved = {rank: one["moved"] for rank, one in enumerate(ranks) if one["moved"]}
        assert not moved, f"variables that had to stay have moved, by ranks: {moved}"
        for variable in moving:
            own = {
                rank: ranks[rank]["variables"][variable]
                for rank in self._program.ranks(reductions[-1][0].compressor)
            }
            _expect_replicas(f"variable {variable}", own)
        for number in range(len(self._program.compressors)):
            kept = [one["kept"][number] for one in ranks]
            self._compare_kept(number, kept, before[number], bad)

    def _compare(self, what, part, variable, found, expected, plain_sum):
        how = self._oracle.known(part.compressor)
        if self._program.is_dense(part.compressor, variable):
            expect_close(what, found, expected)
            return
        finite = np.isfinite(found.astype(np.float64)).all()
        if finite and self._program.compressors[part.compressor].is_a_plain_sum:
            expect_close(what, found, plain_sum)
        if how == "exactly":
            assert equal(found, expected), f"{what}: {_difference(expected, found)}"
        elif how == "closely":
            expect_close(what, found, expected)
        if np.isnan(expected.astype(np.float64)).any():
            assert np.isnan(found.astype(np.float64)).any(), f"{what}: expected NaN, got {found}"

    def _compare_kept(self, number, ranks, before, bad):
        how = self._oracle.known(number)
        for variable, kept in self._oracle.kept[number].items():
            for rank, expected in kept.arrays.items():
                what = f"memory of variable {variable} on rank {rank}"
                arrays, steps = ranks[rank][variable]
                assert steps == kept.steps[rank], f"{what}: {steps} steps, not {kept.steps[rank]}"
                for one, other in zip(arrays, expected, strict=True):
                    if how == "exactly":
                        assert equal(one, other), f"{what}: {_difference(other, one)}"
                    elif how == "closely":
                        expect_close(what, one, other)
                if bad is not None and (rank, variable) == bad[:2]:
                    untouched = zip(arrays, before[variable].arrays[rank])
                    assert all(equal(one, other) for one, other in untouched), (
                        f"{what}: a gradient with {bad[2]} has changed it"
                    )
                kept.arrays[rank] = tuple(arrays)
            self._compare_mass(number, variable, kept)

    def _compare_mass(self, number, variable, kept):
        dense = self._program.is_dense(number, variable)
        if dense or not self._oracle.keeps_everything(number):
            return
        total = sum(arrays[0].astype(np.float64) for arrays in kept.arrays.values())
        missing = self._oracle.missing_mass(number, variable, total)
        assert missing is None, (
            f"variable {variable}: mass is missing, {missing[0]} of {missing[1]}"
        )


def _expect_replicas(what, ranks):
    """Check that all arrays of {rank: array} are equal, bit for bit.

    Arrays with NaN need only equal numbers, not equal bits.
    """
    (first, expected), *others = ranks.items()
    for rank, one in others:
        same = equal(one, expected) and (
            np.isnan(one.astype(np.float64)).any() or one.tobytes() == expected.tobytes()
        )
        assert same, f"{what}: rank {rank} unlike rank {first}: {_difference(expected, one)}"


def equal(one, other):
    """Return whether two arrays have the same dtype, shape and numbers."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and np.array_equal(one.astype(np.float64), other.astype(np.float64), equal_nan=True)
    )


def expect_close(what, found, expected):
    one, other = found.astype(np.float64), expected.astype(np.float64)
    largest = np.abs(other[np.isfinite(other)]).max(initial=0)
    rounding = _CLOSE.get(str(found.dtype), 1e-5)
    np.testing.assert_allclose(one, other, rtol=0, atol=rounding * largest, err_msg=what)


def _difference(expected, found):
    if (expected.dtype, expected.shape) != (found.dtype, found.shape):
        return (
            f"expected {expected.dtype} of shape {expected.shape}, "
            f"got {found.dtype} of shape {found.shape}"
        )
    expected, found = expected.reshape(-1), found.reshape(-1)
    one, other = expected.astype(np.float64), found.astype(np.float64)
    differ = np.flatnonzero(~((one == other) | (np.isnan(one) & np.isnan(other))))
    return (
        f"expected {expected[differ[:4]]} at {differ[:4]}, got {found[differ[:4]]}; "
        f"{differ.size} of {one.size} differ"
    )

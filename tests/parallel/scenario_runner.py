"""Shared by the scenarios of all frameworks: running them, and checks of statistics."""

import contextlib
import gc
import json
import pathlib
import re
import sys
import time
import traceback
import warnings

#: number of ranks on which products of settings run completely
WHOLE = 2


def sample(size, cases, every=3):
    """Return all cases on two ranks, and one of ``every`` cases on other numbers of ranks.

    For settings that do not depend on the number of ranks, such as codecs.
    """
    cases = list(cases)
    return cases if size == WHOLE else cases[::every]


@contextlib.contextmanager
def refused(message):
    """Check that the body raises an error that matches ``message``, a regex, on every rank."""
    try:
        yield
    except Exception as error:  # AutoGraph raises its own types, with our text
        assert re.search(message, str(error)), f"expected an error with {message!r}, got {error!r}"
    else:
        raise AssertionError(f"expected an error with {message!r}; went on silently")


def texts_of_warnings(function):
    """Call a function; return the texts of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(one.message) for one in caught]


def run_all(namespace, directory, hvd, barrier):
    """Run every scenario_* of a module on this rank, and write the results.

    Names on the command line after the directory select the scenarios to run.
    """
    outcomes, wanted = {}, sys.argv[2:]
    for name, scenario in list(namespace.items()):
        if not name.startswith("scenario_"):
            continue
        if wanted and name[len("scenario_") :] not in wanted:
            continue
        # collections, and searches for optimizers, need not traverse what is there already
        gc.collect()
        gc.freeze()
        # shown if a job ends without its report
        print(f"{time.strftime('%X')} {name}", flush=True)
        try:
            scenario(pathlib.Path(directory))
            outcomes[name[len("scenario_") :]] = None
        except Exception:
            outcomes[name[len("scenario_") :]] = traceback.format_exc()
            # shown if the other ranks wait for this one in the scenario, and no report is written
            traceback.print_exc()
        # all ranks start the next scenario together, whatever happened in this one
        barrier()
    path = pathlib.Path(directory) / f"report.{hvd.size()}.{hvd.rank()}.json"
    path.write_text(json.dumps(outcomes))


def expect_statistics_that_add_up(compressor, roll_call_bytes=0):
    """Check that the statistics of a compressor add up.

    ``roll_call_bytes`` are the bytes of the roll call per step, which count for one parameter.
    """
    beside = 0
    for name, row in compressor.stats().items():
        if row["path"] == "dense":
            assert row["sent_bytes"] == row["dense_bytes"] == 4 * row["elements"]
            assert row["relative_error"] == 0, name
            continue
        sections = (
            row["header_bytes"] + row["index_bytes"] + row["value_bytes"] + row["order_bytes"]
        )
        beside += row["sent_bytes"] - sections - 16
        assert (
            0 < row["relative_error"] < 1
            and row["encode_seconds"] > 0
            and row["decode_seconds"] > 0
        )
    assert beside == roll_call_bytes

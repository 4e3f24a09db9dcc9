"""What the scenarios of all frameworks share: running them, and the statistics that any compressor
must show.
"""

import contextlib
import gc
import json
import pathlib
import re
import sys
import time
import traceback

#: the number of ranks on which products of settings run whole
WHOLE = 2


def sample(size, cases, every=3):
    """All cases on two ranks, and on another number of ranks one of ``every`` so many.

    For settings that meet the number of ranks nowhere, such as codecs.
    """
    cases = list(cases)
    return cases if size == WHOLE else cases[::every]


@contextlib.contextmanager
def refused(message):
    """What is inside must end with an error on every rank that says ``message``, a regex."""
    try:
        yield
    except Exception as error:  # AutoGraph makes types of its own, with the text of ours
        assert re.search(message, str(error)), f"expected an error with {message!r}, got {error!r}"
    else:
        raise AssertionError(f"expected an error with {message!r}; went on silently")


def run_all(namespace, directory, hvd, barrier):
    """Runs every scenario_* of a module on this rank and writes what happened.

    Names on the command line behind the directory limit what is run.
    """
    # what the frameworks have imported is not looked through again by every collection
    gc.collect()
    gc.freeze()
    outcomes, wanted = {}, sys.argv[2:]
    for name, scenario in list(namespace.items()):
        if not name.startswith("scenario_"):
            continue
        if wanted and name[len("scenario_") :] not in wanted:
            continue
        # shown when a job ends without its report
        print(f"{time.strftime('%X')} {name}", flush=True)
        try:
            scenario(pathlib.Path(directory))
            outcomes[name[len("scenario_") :]] = None
        except Exception:
            outcomes[name[len("scenario_") :]] = traceback.format_exc()
            # shown when the other ranks wait for this one in the scenario, and no report is written
            traceback.print_exc()
        # the next scenario starts together on all ranks, whatever happened in this one
        barrier()
    path = pathlib.Path(directory) / f"report.{hvd.size()}.{hvd.rank()}.json"
    path.write_text(json.dumps(outcomes))


def expect_statistics_that_add_up(compressor, roll_call_bytes=0):
    """``roll_call_bytes``: the bytes of the roll call per step, which count for one parameter."""
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

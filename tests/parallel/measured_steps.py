"""Check profile() and timeline() under torch.distributed; used by workers for DDP and FSDP."""

import itertools
import json
import pathlib
import time

import torch.distributed as dist
from ddp_tools import assert_refused

from deepreduce_hvd.schedule import Profile

_PAUSE = 0.02  # seconds
_ROUNDING = 0.01  # microseconds


def check(compressor, network, step, directory):
    """Train with pauses of known length, and compare them with what was measured.

    Args:
        compressor: a registered compressor that has not been used.
        network: the network; its modules ``last`` and ``first`` do not share a buffer.
        step: function of a number that runs one forward and backward pass.
        directory: directory for files.
    """
    path = pathlib.Path(directory) / f"{len(compressor.policies)}.{dist.get_rank()}.json"
    assert_refused("expected some complete steps", compressor.profile)
    assert_refused("expected a complete step", lambda: compressor.timeline(path))
    network.first.register_full_backward_pre_hook(lambda *_: time.sleep(_PAUSE))
    begun = time.perf_counter()
    for number in range(6):
        step(number)
        time.sleep(2 * _PAUSE)  # the optimizer
    elapsed = time.perf_counter() - begun
    profile, rows = compressor.profile(), compressor.stats()
    compressed = {name: row for name, row in rows.items() if row["path"] == "compressed"}
    assert {one.name for one in profile.parameters} == compressed.keys(), profile
    ready = {one.name: one.ready_seconds for one in profile.parameters}
    assert ready["first.weight"] >= _PAUSE, ready
    assert 2 * _PAUSE <= profile.forward_seconds < elapsed / 2, (profile, elapsed)
    for one in profile.parameters:
        row = compressed[one.name]
        assert one.elements == row["elements"] and 0 < one.encode_seconds < elapsed / 6, one
        payload = row["header_bytes"] + row["index_bytes"] + row["value_bytes"] + row["order_bytes"]
        sizes = [size for _, size in one.payload_bytes]  # the others are of larger densities
        assert sizes[0] == payload and sizes[-1] > 1.5 * payload, (one, row)
    assert profile.to_fp16_seconds > 0, profile
    profile.save(path)
    assert Profile.load(path) == profile
    compressor.timeline(path)
    _check_trace(json.loads(path.read_text())["traceEvents"], compressor, compressed, elapsed)


def _check_trace(events, compressor, compressed, elapsed):
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"measured", *(["predicted"] if compressor.plan is not None else [])}, names
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    found = {}
    for event in events:
        if event["ph"] == "X" and event["pid"] == 0:
            track = tracks[event["pid"], event["tid"]]
            found.setdefault(track, []).append(event)
            assert event["ts"] >= 0 and event["dur"] >= 0, event
            assert event["ts"] + event["dur"] < 1e6 * elapsed, event
    messages = found["network"]
    assert len(messages) > 1
    for one, other in itertools.pairwise(messages):  # one thread runs all of them
        assert other["ts"] >= one["ts"] + one["dur"] - _ROUNDING, (one, other)
    decoded = {event["name"]: event["ts"] for event in found["exchange thread"]}
    assert compressed.keys() <= decoded.keys(), decoded
    assert min(decoded.values()) >= messages[0]["ts"] + messages[0]["dur"] - _ROUNDING
    pauses = [event["dur"] for event in found["compute"] if event["cat"] == "backward"]
    assert max(pauses) >= 1e6 * _PAUSE, pauses
    (update,) = [event for event in found["compute"] if event["cat"] == "update"]
    assert update["dur"] >= 2e6 * _PAUSE, update

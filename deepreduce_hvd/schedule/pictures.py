"""Timelines as a picture, and as a Chrome trace for Perfetto."""

import json
import os
import pathlib
from collections.abc import Mapping

from deepreduce_hvd.schedule.dag import COMPUTE, EXCHANGES, NETWORK, THREADS, Timeline

_COLORS = {
    "forward": "#a0aec0",
    "backward": "#4a5568",
    "encode": "#d69e2e",
    "decode": "#ed8936",
    "update": "#a0aec0",
}
#: colors of messages by their way, which is the end of their label
_WAYS = {"dense": "#c53030", "fp16": "#805ad5", "codec": "#2b6cb0"}
_LABELS = {
    "forward": "forward, update", "backward": "backward", "encode": "encode", "decode": "decode",
    "dense": "dense message", "fp16": "float16 message", "codec": "encoded message",
}  # fmt: skip
#: the tracks of a timeline, from top to bottom
_TRACKS = (COMPUTE, THREADS, EXCHANGES, NETWORK)
_ROW, _BAR, _GAP = 0.38, 0.34, 0.24  # of a track; its bar; and between timelines
_INCHES, _MARGIN = 0.62, 1.3  # of 1 in these units, and around the timelines
#: the tracks in words
_ROWS = {
    COMPUTE: "the device", THREADS: "threads that encode", EXCHANGES: "a thread that decodes",
    NETWORK: "the network",
}  # fmt: skip
_EDGE = 0.004  # bars that are wider than this fraction of the picture have an edge


def _way(label: str) -> str:
    """Return the way of a message from its label."""
    return next((way for way in ("dense", "fp16") if label.endswith(f", {way}")), "codec")


def _tracks(found: Timeline) -> list[str]:
    """Return the tracks of a timeline: those with events, and always device and network."""
    used = {event.track for event in found.events} | {COMPUTE, NETWORK}
    return [track for track in _TRACKS if track in used]


def draw(timelines: Mapping[str, Timeline], path: str | os.PathLike[str], title: str = "") -> None:
    """Draw timelines below each other and write the picture to a file.

    Each timeline has a row for what the device computes, one for the messages on the network, and,
    if threads encode, one for them in between.

    Args:
        timelines: {name: timeline}.
        path: the path of the file; its extension selects the format.
        title: a title.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    tracks = [_tracks(found) for found in timelines.values()]
    heights = [_ROW * len(own) + _GAP for own in tracks]
    figure = Figure(figsize=(11, _MARGIN + _INCHES * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    used: set[str] = set()
    width = 1.1 * max(found.step_seconds for found in timelines.values())
    top, middles = 0.0, []
    for found, own, height in zip(timelines.values(), tracks, heights):
        for row, track in enumerate(own):
            bars = [event for event in found.events if event.track == track]
            kinds = [_way(event.name) if track == NETWORK else event.kind for event in bars]
            used.update("forward" if kind == "update" else kind for kind in kinds)
            axes.broken_barh(
                [(event.start, event.end - event.start) for event in bars],
                (top + row * _ROW, _BAR),
                facecolors=[{**_COLORS, **_WAYS}[kind] for kind in kinds],
                edgecolors="white",
                # an edge would cover a narrow bar
                linewidths=[
                    0.5 if event.end - event.start > _EDGE * width else 0 for event in bars
                ],
            )
        middles.append(top + (height - _GAP) / 2)
        axes.text(
            found.step_seconds,
            middles[-1],
            f"  {_in_words(found.step_seconds)}",
            va="center",
            fontsize=9,
        )
        top += height
    axes.set_yticks(middles, list(timelines))
    axes.set_ylim(-_GAP, top)
    axes.invert_yaxis()
    axes.set_xlim(0, width or 1.0)  # steps of 0 seconds are drawn too
    shown = [track for track in _TRACKS if any(track in own for own in tracks)]
    axes.set_xlabel(f"seconds; rows from the top: {', '.join(_ROWS[track] for track in shown)}")
    if title:
        axes.set_title(title, fontsize=10)
    handles = [
        Patch(color={**_COLORS, **_WAYS}[kind], label=label)
        for kind, label in _LABELS.items()
        if kind in used
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=110)


def _in_words(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"


def write_trace(timelines: Mapping[str, Timeline], path: str | os.PathLike[str]) -> None:
    """Write timelines as a trace in the format of Chrome, which ui.perfetto.dev opens.

    Each timeline is a process, and its tracks are threads.

    Args:
        timelines: {name: timeline}.
        path: the path of the JSON file.
    """
    events: list[dict[str, object]] = []
    for number, (name, found) in enumerate(timelines.items()):
        threads = {track: thread for thread, track in enumerate(_tracks(found))}
        events.append(
            {"name": "process_name", "ph": "M", "pid": number, "tid": 0, "args": {"name": name}}
        )
        for track, thread in threads.items():
            events.append(
                {
                    "name": "thread_name", "ph": "M", "pid": number, "tid": thread,
                    "args": {"name": track},
                }
            )  # fmt: skip
        for event in found.events:
            events.append(
                {
                    "name": event.name,
                    "cat": event.kind,
                    "ph": "X",
                    "pid": number,
                    "tid": threads[event.track],
                    "ts": 1e6 * event.start,
                    "dur": 1e6 * (event.end - event.start),
                }
            )
    trace = {"displayTimeUnit": "ms", "traceEvents": events}
    pathlib.Path(path).write_text(json.dumps(trace) + "\n")

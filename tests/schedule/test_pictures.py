"""Pictures of timelines: the pixels of each row are the events of its track."""

import random

import pytest
from matplotlib import image

from deepreduce_hvd.schedule import Event, Timeline
from deepreduce_hvd.schedule.dag import COMPUTE, NETWORK, THREADS
from deepreduce_hvd.schedule.pictures import draw

#: {track: (kind of its events, their color)}, from the top row to the bottom row
DRAWN = {
    COMPUTE: ("backward", (0x4A, 0x55, 0x68)),
    THREADS: ("encode", (0xD6, 0x9E, 0x2E)),
    NETWORK: ("exchange", (0x2B, 0x6C, 0xB0)),
}


def random_timeline(draw_of, tracks):
    """Return a timeline of one event per track, of a step of 10 s."""
    events = []
    for track in tracks:
        start = draw_of.uniform(0, 6)
        end = start + draw_of.uniform(1, 4)
        events.append(Event(track, DRAWN[track][0], "w, 1 % Allgather", start, end))
    return Timeline(tuple(events), 10.0)


def box_of(pixels, color, below=0, above=None):
    """Return the (top, bottom, left, right) pixels of a color between two rows."""
    found = (abs(255 * pixels[below:above, :, :3] - color) < 2).all(axis=2)
    rows, columns = found.any(axis=1).nonzero()[0], found.any(axis=0).nonzero()[0]
    if not rows.size:
        return None
    return rows[0] + below, rows[-1] + below, columns[0], columns[-1]


@pytest.mark.parametrize("seed", range(8))
def test_every_track_has_a_row_of_its_own(seed, tmp_path):
    """Also the threads that encode, where there are any."""
    draw_of = random.Random(seed)
    whole = Timeline((Event(COMPUTE, "update", "update", 0.0, 10.0),), 10.0)
    tracks = [COMPUTE, THREADS, NETWORK] if seed % 2 else [COMPUTE, NETWORK]
    found = random_timeline(draw_of, tracks)
    draw({"all": whole, "some": found}, tmp_path / "one.png")
    pixels = image.imread(tmp_path / "one.png")
    _, bottom, left, right = box_of(pixels, (0xA0, 0xAE, 0xC0), above=pixels.shape[0] // 2)
    scale = (right - left) / 10.0
    for track, (_, color) in DRAWN.items():
        box = box_of(pixels, color, above=pixels.shape[0] - 70)  # without the legend
        assert (box is not None) == (track in tracks), track
        if box is None:
            continue
        (event,) = (one for one in found.events if one.track == track)
        assert box[0] > bottom, "rows overlap"
        assert box[2] == pytest.approx(left + scale * event.start, abs=4)
        assert box[3] == pytest.approx(left + scale * event.end, abs=4)
        bottom = box[1]
    # a picture is as high as its rows
    draw({"all": whole}, tmp_path / "first.png")
    rows = (pixels.shape[0] - image.imread(tmp_path / "first.png").shape[0]) / 110 / 0.62
    assert rows == pytest.approx(0.38 * len(tracks) + 0.24, abs=0.02)

"""Profiles: JSON, layer times, merging, and what is refused."""

import dataclasses
import json
import math
import random

import numpy as np
import pytest

import deepreduce_hvd as dr
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.schedule import Link, Network, Parameter, Plan, Profile, Table, layer_times

GATHER = Table(((1e3, 1e-3), (1e5, 2e-3), (1e6, 1.1e-2)))
REDUCE = Table(((1e3, 2e-3), (1e5, 3e-3), (1e6, 3.1e-2)))
PROFILE = Profile(
    (
        Parameter("last", 1_000, 0.01, 0.001, 0.0005, ((0.01, 60), (0.1, 300))),
        Parameter("first", 5_000, 0.03, 0.002, 0.001, ((0.01, 120), (0.1, 900))),
    ),
    forward_seconds=0.02,
    update_seconds=0.001,
    hosts=2,
    codec="TopK(0.01)",
    allgather=GATHER,
    allreduce=REDUCE,
)
HALF = dataclasses.replace(
    PROFILE, allreduce_fp16=GATHER, to_fp16_seconds=2e-9, from_fp16_seconds=1e-9
)
BACKGROUND = dataclasses.replace(PROFILE, seconds_per_kept_element=3e-9, encoding_delay=0.5)


def test_json_and_back(tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    loaded = Profile.load(tmp_path / "profile.json")
    assert loaded == PROFILE
    assert loaded.to_json() == PROFILE.to_json() and loaded.digest() == PROFILE.digest()
    data = json.loads(PROFILE.to_json())
    assert data["version"] == 1 and data["link"]["allgather"]["fit"]["error"] > 0
    assert dataclasses.replace(PROFILE, update_seconds=0.0).digest() != PROFILE.digest()


def test_what_was_measured_of_float16_is_kept_and_may_be_missing():
    assert Profile.from_json(HALF.to_json()) == HALF != PROFILE
    data = json.loads(PROFILE.to_json())
    del data["to_fp16_seconds"], data["from_fp16_seconds"]  # as in files of earlier versions
    assert Profile.from_json(json.dumps(data)) == PROFILE
    other = dataclasses.replace(HALF, to_fp16_seconds=1e-9, from_fp16_seconds=3e-9)
    merged = Profile.merged([HALF, dataclasses.replace(other, allreduce_fp16=REDUCE)])
    assert (merged.to_fp16_seconds, merged.from_fp16_seconds) == (2e-9, 3e-9)
    assert merged.allreduce_fp16 == REDUCE
    with pytest.raises(InvalidArgumentError, match="link allreduce_fp16.*all profiles"):
        Profile.merged([HALF, PROFILE])


def test_how_gradients_are_encoded_is_kept_and_may_be_missing():
    assert Profile.from_json(BACKGROUND.to_json()) == BACKGROUND != PROFILE
    data = json.loads(PROFILE.to_json())
    del data["seconds_per_kept_element"], data["encoding_delay"], data["max_density"]
    assert Profile.from_json(json.dumps(data)) == PROFILE
    slower = dataclasses.replace(BACKGROUND, seconds_per_kept_element=4e-9, encoding_delay=0.75)
    assert Profile.merged([BACKGROUND, slower]) == slower


def changed(*path, value):
    data = json.loads(PROFILE.to_json())
    place = data
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "expected JSON"),
        ("[1]", "a JSON object"),
        (changed("format", value="other"), "profile format: expected 'deepreduce_hvd profile'"),
        (changed("version", value=2), "profile version: expected 1, got 2"),
        (changed("version", value=True), "profile version: expected 1, got True"),
        (changed("hosts", value=None), "none named hosts"),
        (changed("hosts", value=0), "profile hosts: expected an integer of 1 to 2.53, got 0"),
        (changed("hosts", value=1), "between at least 2 hosts"),
        (changed("more", value=1), "also more"),
        (changed("forward_seconds", value=-1), "at least 0, got -1"),
        (changed("update_seconds", value=math.nan), "finite number"),
        (changed("to_fp16_seconds", value=-1), "to_fp16_seconds: expected a finite number"),
        (changed("seconds_per_kept_element", value="1"), "a finite number of at least 0"),
        (changed("encoding_delay", value=1.5), r"expected a number in \[0, 1\], got 1.5"),
        (changed("max_density", value=0), r"profile max_density: expected a density in \(0, 1\]"),
        (changed("has_ratio", value=0), "profile has_ratio: expected True or False, got 0"),
        (
            changed("has_ratio", value=False),
            r"payload_bytes: expected the density 0.01 without a ratio, got \[0.1, 1.0\]",
        ),
        (changed("density", value=0), r"a density in \(0, 1\], got 0"),
        (changed("parameters", value=[]), "at least one"),
        (changed("parameters", value={}), "a list"),
        (changed("parameters", 0, "elements", value=1.5), "last elements: expected an integer"),
        (changed("parameters", 0, "name", value="first"), "unique names, got 'first' more"),
        (changed("parameters", 0, "name", value=7), "expected text, got 7"),
        (changed("parameters", 0, "ready_seconds", value=1.0), "ascending ready_seconds"),
        (changed("parameters", 0, "payload_bytes", value=[[0.1, 2, 3]]), "pairs"),
        (changed("parameters", 0, "payload_bytes", value=[[2, 60]]), "density"),
        (changed("parameters", 0, "payload_bytes", value=[[0.1, 9], [0.1, 9]]), "ascending"),
        (changed("parameters", 0, "payload_bytes", value=[[0.1, 9], [0.2, 8]]), "grow"),
        (changed("parameters", 0, "payload_bytes", value=[[0.1, 0]]), "bytes above 0"),
        (changed("parameters", 0, value=3), "an object with names"),
        (changed("link", "allreduce", value=None), "both allgather and allreduce"),
        (changed("link", "allgather", "seconds", value=[[1, 1]]), "at least 2"),
        (changed("link", "other", value={"seconds": []}), "also other"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Profile.from_json(text)


_LINK = Link("line", 1e-4, 1e-9, 1e-4, 1e-9)
_RECORDS = (PROFILE, PROFILE.parameters[0], _LINK)
_NUMBERS = [
    (record, field.name)
    for record in _RECORDS
    for field in dataclasses.fields(record)
    if field.type in (int, float)
]


@pytest.mark.parametrize(
    "record, name", _NUMBERS, ids=[f"{type(record).__name__} {name}" for record, name in _NUMBERS]
)
@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, np.float32(np.inf), "1", True, None])
def test_objects_refuse_what_files_refuse(record, name, bad):
    with pytest.raises(InvalidArgumentError, match=f"{name}: expected"):
        dataclasses.replace(record, **{name: bad})


def test_types_of_numbers_do_not_change_the_digest():
    plain = Profile((Parameter("one", 5, 1.0, payload_bytes=((0.5, 3.0),)),), 2.0, hosts=2)
    other = Profile(
        [Parameter("one", np.int64(5), 1, -0.0, payload_bytes=[[np.float32(0.5), 3]])],  # type: ignore[arg-type]
        np.float32(2),  # type: ignore[arg-type]
        hosts=np.int32(2),  # type: ignore[arg-type]
    )
    assert plain == other and plain.digest() == other.digest() and hash(plain) == hash(other)


def test_what_is_no_parameter_and_no_name():
    with pytest.raises(InvalidArgumentError, match="objects of Parameter, got str"):
        Profile(("one",))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="link name: expected text, got 3"):
        Link(3, 0, 0, 0, 0)  # type: ignore[arg-type]


def test_a_link_needs_a_rate():
    for rate in (0, -1e9, math.nan, math.inf):
        with pytest.raises(InvalidArgumentError, match="link slow rate: expected bits per second"):
            Link.of_rate("slow", rate)


def test_the_slowest_rank_counts():
    last, first = PROFILE.parameters
    other = dataclasses.replace(
        PROFILE,
        parameters=(
            dataclasses.replace(first, ready_seconds=0.005, encode_seconds=0.009),
            dataclasses.replace(last, ready_seconds=0.04, payload_bytes=((0.01, 50), (0.1, 400))),
        ),
        forward_seconds=0.01,
        update_seconds=0.5,
        allgather=Table(((1e3, 2e-3), (1e5, 1e-3), (1e6, 1e-3))),
    )
    merged = Profile.merged([PROFILE, other])
    assert [part.name for part in merged.parameters] == ["first", "last"]
    assert [part.ready_seconds for part in merged.parameters] == [0.03, 0.04]
    assert merged.parameters[0].encode_seconds == 0.009
    assert merged.parameters[1].payload_bytes == ((0.01, 60), (0.1, 400))
    assert (merged.forward_seconds, merged.update_seconds) == (0.02, 0.5)
    assert merged.allgather == Table(((1e3, 2e-3), (1e5, 2e-3), (1e6, 1.1e-2)))
    assert Profile.merged([PROFILE]) == PROFILE == Profile.merged([PROFILE, PROFILE])
    assert merged == Profile.merged([other, PROFILE])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"density": 0.02}, "profile 1 density: expected 0.01 as in profile 0, got 0.02"),
        ({"hosts": 3}, "profile 1 hosts: expected 2 as in profile 0, got 3"),
        ({"codec": "x"}, "profile 1 codec"),
        ({"parameters": PROFILE.parameters[:1]}, "a difference in first"),
        ({"allgather": None, "allreduce": None}, "in all profiles, got .*none"),
    ],
)
def test_profiles_of_different_jobs_are_not_merged(changes, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Profile.merged([PROFILE, dataclasses.replace(PROFILE, **changes)])
    with pytest.raises(InvalidArgumentError, match="at least one"):
        Profile.merged([])


def test_payloads_between_and_beyond_measured_densities():
    part = PROFILE.parameters[0]
    assert part.payload(0.01) == 60 and part.payload(0.1) == 300
    # of 1,000 elements: 10 in 20 bytes besides the header, 100 in 260 bytes, and 55 between them
    index_bits = [math.log2(1 / density) + 1 / math.log(2) for density in (0.01, 0.1, 0.055)]
    low, high = 8 * 20 / 10 - index_bits[0], 8 * 260 / 100 - index_bits[1]
    value_bits = low + math.log(0.055 / 0.01) / math.log(10) * (high - low)
    expected = 40 + 55 * (index_bits[2] + value_bits) / 8
    assert part.payload(0.055) == pytest.approx(expected, rel=1e-3)
    assert 40 <= part.payload(0.001) < 60
    assert part.payload(1.0) == 300 / 0.1  # less than 4 bytes per element
    points = [part.payload(density / 100) for density in range(1, 101)]
    assert points == sorted(points)


@pytest.mark.parametrize("value", [dr.LloydMax(bits=1), dr.QSGD(bits=4), dr.RawValue()])
def test_payloads_between_known_densities_are_those_of_the_codec(value):
    random = np.random.default_rng(3)
    gradient = random.standard_normal(200_000).astype("float32")

    def size(density):
        return dr.Codec(dr.TopK(density), dr.Rice(), value).encode(gradient).size

    known = tuple((density, size(density)) for density in (0.002, 0.01, 0.03, 0.1, 0.3))
    part = Parameter("w", gradient.size, 0.0, payload_bytes=known)
    for density in random.uniform(0.002, 0.3, 8).tolist():
        assert part.payload(density) == pytest.approx(size(density), rel=0.05)


@pytest.mark.parametrize("name", ["Allgather", "SplitAllgather", "RecursiveDoubling"])
def test_a_denser_message_takes_longer(name):
    network = Network(64, Link.parse("100mbit"))
    measured = ((0.01, 11_000), (0.03, 27_000), (0.1, 71_000), (0.25, 140_000), (0.5, 200_000))
    for payloads in ((), measured):
        part = Parameter("w", 1_000_000, 0.0, payload_bytes=payloads)
        densities = np.geomspace(0.002, 1, 60).tolist()
        seconds = [
            network.exchange(name, 1e6 * density, 1e6, part.payload(density))
            for density in densities
        ]
        assert seconds == sorted(seconds)


def test_payloads_that_were_not_measured_are_estimated():
    part = Parameter("w", 100_000, 0.0)
    gradient = np.random.default_rng(0).standard_normal(100_000).astype("float32")
    codec = dr.recommended_codec()
    payload = codec.encode(gradient, step=codec.sparsifier.schedule_steps)
    assert part.payload(0.01) == pytest.approx(payload.size, rel=0.05)


def test_layer_times_as_csv_and_json():
    text = "name, elements, backward_seconds, forward_seconds\nfirst,100,0.5,0.25\nlast,10,0.25,1\n"
    profile = layer_times(text)
    assert [(part.name, part.elements, part.ready_seconds) for part in profile.parameters] == [
        ("last", 10, 0.25), ("first", 100, 0.75)
    ]  # fmt: skip
    assert profile.forward_seconds == 1.25 and profile.link() is None
    rows = [
        {"name": "first", "elements": 100, "backward_seconds": 0.5, "forward_seconds": 0.25},
        {"name": "last", "elements": 10, "backward_seconds": 0.25, "forward_seconds": 1},
    ]
    assert layer_times(json.dumps(rows)) == profile


def test_layer_times_load_as_a_profile(tmp_path):
    path = tmp_path / "layers.csv"
    path.write_text("name,elements,backward_seconds,encode_seconds\nw,100,0.5,0.1\n")
    assert Profile.load(path).parameters == (Parameter("w", 100, 0.5, 0.1),)
    path.write_text('[{"name": "w", "elements": 100, "backward_seconds": 0.5}]')
    assert Profile.load(path).parameters == (Parameter("w", 100, 0.5),)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "layer times: expected a first line with the columns name, .*, got ''$"),
        ("null", "got 'null'$"),
        ("name;elements;backward_seconds\r\nw;3;0,5\r\n", "separated by commas, .* got 'name;elements;backward_seconds'$"),
        ("name,elements,backward_seconds,\nw,3,1,\n", "got 'name,elements,backward_seconds,'$"),
        ("name,elements,backward_seconds\n", "at least one"),
        ("name,elements\nw,3\n", "got 'name,elements'$"),
        ("name,elements,backward_seconds,x\nw,3,1,1\n", "got 'name,elements,backward_seconds,x'$"),
        ("name,elements,backward_seconds\nw,many,1\n", "w elements: expected an integer of 1 to 2.53, got 'many'"),
        ("name,elements,backward_seconds\nw,3,-1\n", "w backward_seconds: expected a finite number of at least 0, got -1"),
        ("name,elements,backward_seconds\nw,3\n", "backward_seconds"),
        ("name,elements,backward_seconds,elements\nw,3,1,4\n", "unique columns, got 'elements' more than once"),
        ("name,elements,backward_seconds,,\nw,3,1,,\n", "unique columns, got '' more than once"),
        ('[{"name": "w", "name": "v"}]', "unique keys, got 'name' more than once"),
        ("name,elements,backward_seconds\nw,3,1,9\n", "also columns without a name"),
        ('{"name": 3}', "a list of objects"),
        ("[1,", "expected JSON"),
    ],
)  # fmt: skip
def test_layer_times_that_are_refused(text, message):
    with pytest.raises(InvalidArgumentError, match=message):
        layer_times(text)


def test_the_measured_link():
    link = PROFILE.link()
    assert link.measured_hosts == 2 and link.gather_table == GATHER
    assert set(PROFILE.fits()) == {"allgather", "allreduce"}
    assert PROFILE.backward_seconds == 0.03 and PROFILE.elements == 6_000


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("load", [Profile.load, Plan.load])
def test_files_of_anything_are_refused_by_their_cause(tmp_path, seed, load):
    """Bytes that are no text, and lists and objects in each other, raise no other error."""
    draw, path = random.Random(seed), tmp_path / "file"
    kind = seed % 3
    if kind == 0:
        path.write_bytes(b"\xff" + draw.randbytes(draw.randint(0, 300)))
        message = "expected text in UTF-8, got "
    elif kind == 1:
        path.write_text(draw.choice(("[", '{"format":', '[{"format": ')) * 100_000)
        message = "nested too deeply"
    else:
        path.write_text("[" + "".join(draw.choices('[]{}",:19.e- nul', k=50)))
        message = "expected "
    with pytest.raises(InvalidArgumentError, match=message):
        load(path)


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_byte_order_mark_changes_nothing(tmp_path, mark):
    rows = [{"name": "é", "elements": 3, "backward_seconds": 0.5}]
    csv = "name,elements,backward_seconds\né,3,0.5\n"
    path = tmp_path / "file"
    for text in (json.dumps(rows), json.dumps(rows, ensure_ascii=False), csv):
        path.write_text(mark + text, encoding="utf-8")
        assert layer_times(mark + text) == Profile.load(path) == layer_times(text)
    path.write_text(mark + PROFILE.to_json(), encoding="utf-8")
    assert Profile.load(path) == PROFILE

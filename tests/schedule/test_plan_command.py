"""``deepreduce-plan``: what it prints, writes and refuses."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from schedule_profiles import random_profile

from deepreduce_hvd import plan as command
from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.schedule import Link, Network, Plan, Profile, Table, layer_times, optimal_plan
from deepreduce_hvd.schedule.rules import RULES, predict

ROOT = Path(__file__).resolve().parents[2]
LAYERS = (
    "name,elements,backward_seconds\nfirst,40000,0.004\nmiddle,900000,0.003\nlast,20000,0.001\n"
)


@pytest.fixture
def layers(tmp_path):
    path = tmp_path / "layers.csv"
    path.write_text(LAYERS)
    return path


def run(capsys, *arguments):
    assert command.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_a_table_of_every_rule(layers, capsys):
    text = run(capsys, layers, "--hosts", "2,4", "--link", "100mbit,1gbit:50us")
    assert "3 parameters, 960,000 elements; forward 0.004 s, backward 0.008 s" in text
    for note in ("half of backward", "encode seconds are not known", "payloads are estimated"):
        assert note in text
    assert "1gbit:50us: 50 us per message, 1,000 Mb/s" in text
    for rule in RULES:
        assert sum(line.startswith(f"{rule} ") for line in text.splitlines()) == 2, rule
    profile = Profile(Profile.load(layers).parameters, 0.004)
    dense = predict("dense", profile, Network(4, Link.parse("100mbit")))[0]
    row = next(line for line in text.splitlines() if line.startswith("dense "))
    assert f"{dense.step_seconds:.4f}" in row and "network" in row
    assert text.count("4 hosts: plan, ") == 2 and "seconds: forward 0.0040" in text


def test_short_steps_have_a_smaller_unit(tmp_path, capsys):
    path = tmp_path / "layers.csv"
    for seconds, unit in ((1e-2, "seconds"), (1e-5, "milliseconds"), (1e-8, "microseconds")):
        path.write_text(f"name,elements,backward_seconds\na,100,{seconds}\n")
        text = run(capsys, path, "--hosts", "1", "--rules", "fp16,dense", "--forward", 0)
        assert re.search(rf"^{unit} +1 host$", text, re.MULTILINE)
        assert re.search(r"^dense +0\.0100$", text, re.MULTILINE)
        assert f"{unit}: backward 0.0100" in text
    # of equally fast rules the densest, in whatever order they were asked for
    assert "1 host: fp16" in text
    path.write_text("name,elements,backward_seconds\na,100,0\n")
    picture = tmp_path / "picture.png"
    text = run(capsys, path, "--hosts", "1", "--rules", "dense", "--plot", picture)
    assert re.search(r"^ +seconds: none$", text, re.MULTILINE) and picture.stat().st_size > 1000


def test_values_of_the_command_line(layers, capsys):
    text = run(
        capsys, layers, "--hosts", 2, "--forward", 0.5, "--update", 0.25, "--encode", 10,
        "--decode", 1, "--density", 0.05, "--rules", "codec,dense", "--ranks-per-host", 2
    )  # fmt: skip
    assert "forward 0.5 s, backward 0.008 s, update 0.25 s; density 5 % or more" in text
    assert "seconds are not known" not in text and "WFBP" not in text
    assert "encode" in text


@pytest.mark.parametrize("to_fp16", [0.0, 1e-9])
@pytest.mark.parametrize("from_fp16", [0.0, 1e-9])
def test_free_conversion_to_float16_is_noted(tmp_path, capsys, to_fp16, from_fp16):
    profile = dataclasses.replace(
        layer_times(LAYERS), to_fp16_seconds=to_fp16, from_fp16_seconds=from_fp16
    )
    profile.save(tmp_path / "profile.json")
    text = run(capsys, tmp_path / "profile.json", "--hosts", 2, "--rules", "fp16")
    noted = "note: conversion to float16 is not known: counted as free" in text
    assert noted == (to_fp16 == from_fp16 == 0)


def test_encoding_in_the_background(layers, capsys):
    options = (
        "--hosts",
        2,
        "--link",
        "1gbit",
        "--forward",
        0.01,
        "--encode",
        9,
        "--rules",
        "top-k",
    )
    waits, goes_on = (run(capsys, layers, *options, *more) for more in ((), ("--delay", 0)))
    # 0.01 + 0.008 s of computing; encoding takes 8.64 ms, most of it after the largest gradient
    step = float(re.search(r"^top-k +(\S+)", waits, re.MULTILINE)[1])
    other = float(re.search(r"^top-k +(\S+)", goes_on, re.MULTILINE)[1])
    assert step > 0.018 + 0.0086 and 0.018 < other < step - 0.003


def test_profiles_of_several_ranks_and_a_measured_link(tmp_path, capsys):
    profile = random_profile(1, 5)
    table = Table(((1e3, 1e-3), (1e6, 1e-2)))
    measured = Profile(profile.parameters, 0.01, 0.001, hosts=2, allgather=table, allreduce=table)
    measured.save(tmp_path / "0.json")
    Profile(profile.parameters, 0.02, 0.001, hosts=2, allgather=table, allreduce=table).save(
        tmp_path / "1.json"
    )
    text = run(capsys, tmp_path / "0.json", tmp_path / "1.json", "--hosts", "2,8")
    assert "forward 0.02 s" in text
    assert "\nmeasured: " in text and "measured allgather, 2 hosts: 0.991 ms + 9.009 ns" in text
    text = run(capsys, tmp_path / "0.json", "--link", "measured,10mbit", "--hosts", "2")
    assert "\nmeasured: " in text and "\n10mbit: " in text


def test_a_codec_without_a_ratio(tmp_path, capsys):
    """Its density differs between ranks, and neither an option nor a plan changes it."""
    network = Network(4, Link.parse("100mbit"))
    parameters = random_profile(1, 5).parameters
    for rank, density in enumerate((0.02, 0.03)):
        parts = [
            dataclasses.replace(part, payload_bytes=((density, 1e5 * density),))
            for part in parameters
        ]
        profile = Profile(
            parts, 0.01, codec="Threshold(1.0)", density=density, max_density=density,
            has_ratio=False,
        )  # fmt: skip
        profile.save(tmp_path / f"{rank}.json")
    paths = tmp_path / "0.json", tmp_path / "1.json"
    text = run(capsys, *paths, "--hosts", 4, "--link", "100mbit", "--save", tmp_path / "plan.json")
    assert "; density 3 %\n" in text
    plan = Plan.load(tmp_path / "plan.json")
    assert plan == optimal_plan(profile, network)
    assert {message.density for message in plan.messages} <= {0.03, None}
    assert 0.03 in {message.density for message in plan.messages}
    with pytest.raises(SystemExit):
        command.main([*map(str, paths), "--density", "0.05"])
    message = "--density: expected none for Threshold(1.0), whose density no plan can change, got 0"
    assert message in capsys.readouterr().err
    with pytest.raises(InvalidArgumentError, match="predict density: expected none for Threshold"):
        predict("codec", profile, network, 0.05)


def test_picture_trace_and_plan(layers, tmp_path, capsys):
    run(
        capsys, layers, "--hosts", "4,2", "--link", "1gbit,100mbit", "--plot",
        tmp_path / "plan.png",
        "--trace", tmp_path / "trace.json", "--save", tmp_path / "plan.json", "--forward", 0,
    )  # fmt: skip
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"
    network = Network(4, Link.parse("1gbit"))
    plan = optimal_plan(Profile.load(layers), network)
    assert Plan.load(tmp_path / "plan.json") == plan
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["one message", "WFBP", "MG-WFBP", "dense", "fp16", "buckets", "plan"]
    own = [event for event in events if event["pid"] == names.index("plan") and event["ph"] == "X"]
    assert [(event["cat"], event["name"]) for event in own] == [
        (event.kind, event.name) for event in plan.events
    ]
    assert max(event["ts"] + event["dur"] for event in own) == pytest.approx(
        1e6 * plan.step_seconds
    )
    assert {event["tid"] for event in own} == {0, 1}


def test_matplotlib_is_imported_only_for_a_picture(layers):
    script = (
        "import sys\nfrom deepreduce_hvd import plan\n"
        f"plan.main([{str(layers)!r}, '--hosts', '2'])\n"
        "assert 'matplotlib' not in sys.modules and 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_as_a_module(layers):
    done = subprocess.run(
        [sys.executable, "-m", "deepreduce_hvd.plan", str(layers), "--hosts", "2"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0 and "\nplan " in done.stdout, done.stderr
    assert 'deepreduce-plan = "deepreduce_hvd.plan:main"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--hosts", "two"], "--hosts: expected numbers such as 2,4,16, got 'two'"),
        (["--hosts", "0"], "--hosts: expected numbers"),
        (["--link", "fast"], "expected a rate such as 100mbit"),
        (["--link", "٣gbit"], "expected a rate such as 100mbit"),
        (["--link", "measured"], "a profile with a measured link"),
        (["--density", "2"], r"--density: expected a number in (0, 1], got 2.0"),
        (["--rules", "best"], "--rules: expected some of serial"),
        (["--encode", "-1"], "--encode: expected at least 0"),
        (["--ranks-per-host", "0"], "--ranks-per-host: expected at least 1, got 0"),
        (["--delay", "-1"], "--delay: expected a number in [0, 1], got -1.0"),
        (["--delay", "nan"], "--delay: expected a number in [0, 1], got nan"),
        (["--hosts", ""], "--hosts: expected numbers such as 2,4,16, got ''"),
        (["--link", ""], "link: expected a rate such as 100mbit, 1gbit or 10gbit:25us, got ''"),
        (["--rules", ""], "--rules: expected some of serial"),
    ],
)
def test_wrong_arguments(layers, arguments, text, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main([str(layers), *arguments])
    assert stop.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("option", ["--save", "--trace"])
def test_a_full_disk_is_named(layers, option, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main([str(layers), option, "/dev/full"])
    assert stop.value.code == 2
    assert "No space left on device: '/dev/full'" in capsys.readouterr().err


def test_files_that_are_no_profiles(tmp_path, capsys):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "text.csv").write_text("layer,size\na,1\n")
    (tmp_path / "profile.json").write_text('{"format": "deepreduce_hvd profile", "version": 9}')
    for path, text in (
        (tmp_path / "missing.json", "No such file"),
        (tmp_path / "binary", "decode"),
        (
            tmp_path / "text.csv",
            "layer times: expected a first line with the columns name, elements, backward_seconds,"
            " separated by commas, and optionally forward_seconds, encode_seconds, decode_seconds,"
            " got 'layer,size'",
        ),
        (tmp_path / "profile.json", "profile version: expected 1, got 9"),
    ):
        with pytest.raises(SystemExit) as stop:
            command.main([str(path)])
        printed = capsys.readouterr().err
        assert stop.value.code == 2 and text in printed and str(path) in printed


@pytest.mark.parametrize("option", ["--plot", "--trace", "--save"])
@pytest.mark.parametrize("name", ["missing/file.png", "folder"])
def test_files_that_cannot_be_written(layers, tmp_path, capsys, option, name):
    """This is found before anything is computed and printed."""
    (tmp_path / "folder").mkdir()
    with pytest.raises(SystemExit) as stop:
        command.main([str(layers), option, str(tmp_path / name)])
    printed = capsys.readouterr()
    assert stop.value.code == 2 and not printed.out
    message = f"{option}: expected a file in a folder that exists, got {tmp_path / name}"
    assert message in printed.err


@pytest.mark.parametrize("options", [["--save"], ["--trace"], ["--trace", "--save"]])
def test_a_file_is_not_used_twice(layers, tmp_path, capsys, options):
    """A profile that is read, or an earlier file, would be lost."""
    path, other = layers, "the profile"
    if len(options) == 2:
        path, other = tmp_path / "written.json", options[0]
    same = tmp_path / "folder" / ".." / path.name
    same.parent.parent.mkdir()
    with pytest.raises(SystemExit) as stop:
        command.main([str(layers), *(word for one in options for word in (one, str(same)))])
    message = f"{options[-1]}: expected another file than {other}, got {same}"
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert layers.read_text() == LAYERS
    assert command.main([str(layers), "--trace", "/dev/null", "--save", "/dev/null"]) == 0


@pytest.mark.parametrize("module", ["plan", "__main__"])
def test_a_reader_that_ends_is_no_error(layers, module):
    """As with ``| head -1``."""
    words = {"plan": f"deepreduce_hvd.plan {layers}", "__main__": "deepreduce_hvd --check"}[module]
    piped = f"set -o pipefail; {shlex.quote(sys.executable)} -u -m {words} | :; echo $?"
    done = subprocess.run(
        ["bash", "-c", piped], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "1\n" and not done.stderr, done.stderr


def test_a_link_without_a_limit(tmp_path, capsys):
    table = Table(((1e3, 2e-3), (1e6, 1e-3)))
    profile = random_profile(1, 3)
    Profile(profile.parameters, 0.1, hosts=2, allgather=table, allreduce=table).save(
        tmp_path / "profile.json"
    )
    assert "no limit of the rate" in run(capsys, tmp_path / "profile.json")


def blocks(language):
    text = (ROOT / "docs" / "schedule.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_page_shows_what_the_command_prints(capsys):
    text = (ROOT / "docs" / "schedule.md").read_text()
    command_line = re.search(r"    deepreduce-plan (.*?) \\\n *(--rules .*)\n", text)
    arguments = shlex.split(f"{command_line[1]} {command_line[2]}")
    arguments[0] = str(ROOT / arguments[0])
    printed = run(capsys, *arguments)
    assert blocks("text")[0] in printed


def test_the_code_of_the_page_runs(capsys):
    (code,) = blocks("python")
    exec(compile(code, "docs/schedule.md", "exec"), {})
    expected = re.findall(r"  # (\[.*)$", code, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == expected


def test_the_layer_times_of_the_page_are_read():
    profile = layer_times(blocks("text")[1])
    assert [part.name for part in profile.parameters] == ["fc.weight", "conv.weight"]


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (LAYERS, ["--plot", "picture.xyz"], "expected a file name that ends in one of"),
        (LAYERS, ["--hosts", "9" * 5000], "expected numbers such as 2,4,16"),
        (LAYERS.replace("40000", "9" * 400), [], r"expected an integer of 1 to 2\^53"),
        (LAYERS.replace("0.004", "9" * 400), [], "expected a finite number"),
        (LAYERS + '"' + "x" * 140_000, [], "expected comma-separated values"),
        (LAYERS.replace("0.004", "0.004,7"), [], "columns without a name"),
        ("[" * 100_000, [], "expected JSON"),
    ],
)
def test_any_input_ends_in_a_message(tmp_path, capsys, text, arguments, message):
    path = tmp_path / "layers"
    path.write_text(text)
    with pytest.raises(SystemExit):
        command.main([str(path), *arguments])
    said = capsys.readouterr().err
    assert re.search(message, said) and "Traceback" not in said


def test_a_file_with_a_byte_order_mark(tmp_path, capsys):
    path = tmp_path / "layers.csv"
    path.write_text("\ufeff" + LAYERS)
    assert "3 parameters" in run(capsys, path, "--hosts", "2", "--rules", "dense")

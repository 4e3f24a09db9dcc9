"""Test logs, locks and stamps of the set-up. A failed Horovod build leaves nothing behind."""

import os
import subprocess
import sys
import time
import venv
from pathlib import Path

import build_horovod
import console
import pytest
import set_up


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    monkeypatch.setattr(console, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(build_horovod, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(set_up, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(set_up, "PYTHON", tmp_path / ".venv/bin/python")
    monkeypatch.setattr(set_up, "STAMPS", tmp_path / "set-up.json")
    monkeypatch.setenv("DEEPREDUCE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_a_failing_step_shows_the_end_of_its_log():
    with pytest.raises(console.SetUpError) as caught:
        console.run(
            [sys.executable, "-c", "print(*range(1000), sep='\\n'); raise SystemExit(3)"],
            "counting",
            "no time",
        )
    words = str(caught.value)
    assert (
        "counting: expected exit status 0, got 3" in words
        and words.endswith("\n999")
        and "\n5\n" not in words
    )


def test_progress_is_the_last_percentage_or_the_last_line(own_place):
    log = own_place / "log"
    log.write_text("[  3%] Building\n[ 42%] Building\nwarning: x\n\n")
    assert console._progress(log, r"\[ *(\d+)%\]") == "42 %"
    assert console._progress(log, None) == "warning: x"
    log.write_text("")
    assert (console._progress(log, r"\[ *(\d+)%\]"), console._progress(log, None)) == (
        "preparing",
        "",
    )


def test_a_second_set_up_waits_for_the_first(own_place, capsys):
    path = own_place / "some.lock"
    code = (
        "import console, pathlib\n"
        f"with console.locked(pathlib.Path({str(path)!r}), 'building'):\n    print('held', "
        "flush=True); input()"
    )

    def start():
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(Path(console.__file__).parent)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    first = start()
    assert first.stdout.readline() == "held\n"
    second = start()
    assert "waiting for another set-up that is building" in second.stdout.readline()
    time.sleep(0.2)
    assert second.poll() is None
    first.communicate("\n")
    assert second.communicate("\n")[0] == "held\n" and second.returncode == 0


def test_stamps_are_kept_by_step():
    assert set_up.stamp("pins") is None
    set_up.stamp("pins", "a")
    set_up.stamp("horovod", "b")
    assert (set_up.stamp("pins"), set_up.stamp("horovod"), set_up.stamp("package")) == (
        "a",
        "b",
        None,
    )


def test_an_environment_from_another_place_is_refused(own_place):
    (own_place / ".venv/bin").mkdir(parents=True)
    with pytest.raises(console.SetUpError, match="got no interpreter; remove it .make distclean."):
        set_up.make_venv()
    (own_place / ".venv/bin/python").symlink_to("/usr/bin/env")
    with pytest.raises(console.SetUpError, match=r"\.venv: expected an environment of \(3, 11\)"):
        set_up.make_venv()


def test_a_failed_horovod_build_leaves_no_wheel(own_place, monkeypatch):
    bad = own_place / "bin" / "python"
    bad.parent.mkdir()
    bad.write_text('#!/bin/sh\necho "$CXX: C++14 refused"\nexit 1\n')
    bad.chmod(0o755)
    folder = own_place / "cache" / "key"
    with pytest.raises(console.SetUpError, match=r"C\+\+14 refused"):
        build_horovod.build(bad, folder)
    assert list(folder.iterdir()) == []


def test_the_compiler_wrapper_puts_the_standard_last(own_place):
    """The compiler that the build gets as CXX compiles a source that needs C++17."""
    fake = own_place / "bin" / "python"
    fake.parent.mkdir()
    fake.write_text(
        "#!/bin/sh\n"
        "for out; do case $previous in -w) folder=$out;; esac; previous=$out; done\n"
        "echo 'static_assert(__cplusplus == 201703L);' > $folder/a.cc\n"
        "$CXX -std=c++14 -c $folder/a.cc -o $folder/a.o && touch $folder/horovod-0.whl\n"
    )
    fake.chmod(0o755)
    build_horovod.build(fake, own_place / "key")
    assert [path.name for path in (own_place / "key").iterdir()] == ["horovod-0.whl"]


def test_the_cache_key_names_what_the_binary_depends_on():
    key = build_horovod.cache_key(sys.executable)
    for part in ("horovod-0.28.1-cp311-", "-gcc", "-torch2.", "-tensorflow2."):
        assert part in key


def test_a_check_build_without_a_framework_is_refused(own_place):
    (own_place / "bin").mkdir()
    horovodrun = own_place / "bin/horovodrun"
    horovodrun.write_text("#!/bin/sh\necho '[X] PyTorch'; echo '[ ] TensorFlow'; echo '[X] Gloo'\n")
    horovodrun.chmod(0o755)
    with pytest.raises(console.SetUpError, match=r"got no \[X\] TensorFlow"):
        build_horovod.check(own_place / "bin/python")


@pytest.mark.parametrize("text", ["", '{"pins": "a'])
def test_stamps_that_were_written_in_part_count_as_none(own_place, text):
    set_up.STAMPS.write_text(text)
    assert set_up.stamp("pins") is None
    set_up.stamp("pins", "b")
    assert set_up.stamp("pins") == "b"


def test_an_environment_whose_making_was_interrupted_gets_pip(capsys):
    venv.create(set_up.VENV, with_pip=False, symlinks=True)
    set_up.make_venv()
    assert "has no pip: installing it" in capsys.readouterr().out
    subprocess.run([set_up.PYTHON, "-m", "pip", "--version"], check=True, capture_output=True)
    set_up.make_venv()
    assert "pip" not in capsys.readouterr().out


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_pytorch_without_cuda_is_looked_for_in_two_indexes(monkeypatch, capsys, failures):
    commands = []

    def run(command, *about, **options):
        commands.append(command)
        if len(commands) <= failures:
            raise console.SetUpError("not found")

    monkeypatch.setattr(set_up, "run", run)
    set_up.install_torch(["pip"], "torch==2.13.0")
    own = ["pip", "--no-deps", "torch==2.13.0+cpu"]
    other = ["pip", "--no-deps", "--index-url", set_up._CPU_INDEX, "torch==2.13.0+cpu"]
    assert commands == [own, other][: failures + 1]
    assert ("going on with the build with CUDA" in capsys.readouterr().out) == (failures == 2)


def test_a_cache_that_cannot_be_made_is_named(own_place):
    (own_place / "file").touch()
    with (
        pytest.raises(console.SetUpError, match=r"file/lock: expected a file that can be written"),
        console.locked(own_place / "file" / "lock", "building"),
    ):
        pass

"""Test restarts by torchrun after a loss: the tutorial's script for DDP, and fully_shard."""

import pathlib
import re
import socket
import threading

import pytest
import torch
from launch import HERE, ROOT, run_ranks

pytestmark = pytest.mark.slow

#: as in the tutorial; otherwise a rank may connect to addresses from before the restart
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
#: put before the script: how one rank is lost in step 50, and what must hold after a restart
BEFORE = """
import os, signal

def lose(step):
    lost = rank == 1 if not LOSE_HOST else "LOST" in os.environ
    if step != 50 or not lost or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    if LOSE_HOST:
        os.kill(os.getppid(), signal.SIGKILL)  # torchrun
    os.kill(os.getpid(), signal.SIGKILL)

def expect_the_mean_of_residuals(step):
    if not step:
        return
    training = torch.load(folder / f"step-{step}" / "training.pt")
    assert size == (1 if LOSE_HOST else 2) and training["ranks"] == 2, (size, training["ranks"])
    states = [torch.load(folder / f"step-{step}" / f"compressor.{one}.pt") for one in range(2)]
    for name, own in compressor.state_dict()["parameters"].items():
        assert own["steps"] == step, (name, own["steps"])
        for kind, kept in own["memory"].items():
            total = kept.double()
            dist.all_reduce(total)
            saved = [one["parameters"][name]["memory"][kind].double() for one in states]
            assert saved[0].any() and saved[1].any()
            torch.testing.assert_close(total / size, sum(saved) / 2, rtol=0, atol=1e-6)
    print(f"resumed at {step}", flush=True)

"""


def script(directory, lose_host):
    """Write the script, which loses a rank, into a directory; return its path."""
    text = (ROOT / "docs" / "tutorial-ddp.md").read_text()
    (block,) = (
        one
        for one in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        if one.startswith("# restarts.py\n")
    )
    first, loop = "first = load()\n", "    optimizer.step()\n"
    assert block.count(first) == 1 and block.count(loop) == 1
    block = block.replace(first, f"{first}expect_the_mean_of_residuals(first)\n")
    block = block.replace(loop, f"{loop}    lose(step)\n")
    path = pathlib.Path(directory) / "restarts.py"
    path.write_text(f"LOSE_HOST = {lose_host}\n{BEFORE}{block}")
    return path


def expect_to_have_resumed(output, ranks):
    assert re.search(r"resumed at 40$", output, re.MULTILINE), output[-5000:]
    losses = re.findall(r"step (\d+): loss ([0-9.]+), ranks (\d)", output)
    assert [step for step, *_ in losses] == ["19", "39", "59", "79", "99"], losses
    assert [int(size) for *_, size in losses] == [2, 2, ranks, ranks, ranks], losses
    assert float(losses[-1][1]) < float(losses[0][1]), losses


def test_a_killed_rank_is_started_again(tmp_path):
    path = script(tmp_path, lose_host=False)
    finished = run_ranks(
        "torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=2", path,
        tmp_path / "saved",
        timeout=120, **OWN_STORE,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-5000:]
    expect_to_have_resumed(finished.stdout, 2)


def test_the_rest_goes_on_without_a_lost_host(tmp_path):
    path = script(tmp_path, lose_host=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = [
        "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=restarts",
    ]  # fmt: skip
    conf = "--rdzv-conf=keep_alive_interval=1,last_call_timeout=12,is_host="
    finished = {}

    def host(name, is_host, **variables):
        finished[name] = run_ranks(
            "torchrun", *words, f"{conf}{is_host}", path, tmp_path / "saved",
            timeout=150, **OWN_STORE, **variables,
        )  # fmt: skip

    threads = [
        threading.Thread(target=host, args=["stays", "true"]),
        threading.Thread(target=host, args=["leaves", "false"], kwargs={"LOST": "1"}),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    output = "\n".join(f"{name}:\n{one.stdout}" for name, one in finished.items())
    codes = {name: one.returncode for name, one in finished.items()}
    assert codes == {"stays": 0, "leaves": -9}, f"{codes}\n{output[-5000:]}"
    expect_to_have_resumed(output, 1)
    # the state that was loaded is not written again, while another rank may still read it
    assert torch.load(tmp_path / "saved" / "step-40" / "training.pt")["ranks"] == 2


def test_fully_shard_goes_on_with_other_shards(tmp_path):
    """Two hosts of two ranks become four hosts of one rank. No residual is lost."""
    finished = run_ranks(
        "torchrun", "--standalone", "--nproc-per-node=4", "--max-restarts=1",
        HERE / "fsdp_restarts.py", tmp_path, 8, 12,
        folders=[HERE], timeout=240, **OWN_STORE,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-5000:]
    assert finished.stdout.count("resumed at 8") == 4, finished.stdout[-5000:]
    assert finished.stdout.count("done on 4 ranks") == 4, finished.stdout[-5000:]

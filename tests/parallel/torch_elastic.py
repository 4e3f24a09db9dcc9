"""Train as one worker of an elastic job on PyTorch, until a file tells it to stop.

Started by test_torch_elastic.py under horovodrun.
"""

import pathlib
import signal
import sys

import elastic_worker
import horovod.torch as hvd
import torch
from torch_tools import assert_equal_everywhere, backward, distributed, model, sum_over_ranks

import deepreduce_hvd as dr
from deepreduce_hvd.planning.policies import rows_codec


class Network(torch.nn.Module):
    """Layers, and an embedding table, which new ranks do not know as one."""

    def __init__(self):
        super().__init__()
        self.layers = model(outputs=elastic_worker.FEWEST_ELEMENTS)
        self.table = torch.nn.Embedding(400, 8)

    def forward(self, batch):
        rows = (100 * batch[:, 0]).long() % 400
        return self.layers(batch) + self.table(rows).sum(dim=1, keepdim=True)


def expect_a_long_roll_call(compressor):
    """Check that what is sent beside payloads and probes is long enough for Gloo."""
    rows = [row for row in compressor.stats().values() if row["path"] != "dense"]
    parts = ("header_bytes", "index_bytes", "value_bytes", "order_bytes")
    beside = sum(row["sent_bytes"] - 16 - sum(row[part] for part in parts) for row in rows)
    if compressor.stats()["table.weight"]["steps"] == 1:
        beside -= 8  # what the ranks tell each other about a table that is new to them
    assert beside == 64 * hvd.size(), f"expected 64 bytes per rank, got {beside / hvd.size()}"


def main(directory, communicator):
    directory = pathlib.Path(directory)
    elastic_worker.announce(directory)
    hvd.init()
    network = Network()
    # RandomK and QSGD depend on the step counter: a joining rank must get it
    codec = {"layers.*": dr.Codec(dr.RandomK(0.05), dr.Rice(), dr.QSGD(bits=4))}
    optimizer, compressor = distributed(
        network, codec, compressor_options={"communicator": communicator}
    )
    state = hvd.elastic.TorchState(
        compressor=compressor, model=network, optimizer=optimizer, step=0, committed=None
    )

    def step(number):
        optimizer.zero_grad()
        backward(network, number)
        optimizer.step()
        assert_equal_everywhere(network.named_parameters(), f"step {number + 1}")
        if isinstance(communicator, dr.Allgather):
            expect_a_long_roll_call(compressor)
            assert compressor.policies["table.weight"].codec == rows_codec(), f"step {number}"

    def snapshot():
        flat = [one.detach().double().reshape(-1) for one in network.parameters()]
        memories = [one["memory"] for one in compressor.state_dict()["parameters"].values()]
        kept = torch.cat([part for memory in memories for part in memory.values()])
        return torch.cat(flat).numpy(), sum_over_ranks(kept, "kept").numpy() / hvd.size()

    def as_rank_0(number):
        return hvd.broadcast(torch.tensor(number), 0, name="commits")

    worker = elastic_worker.Worker(directory, hvd, step, snapshot, as_rank_0)

    @hvd.elastic.run
    def train(state):
        if state.committed is not None:
            if worker.commits_go_on():
                state.save()  # the next step or commit takes over memories of ranks that have left
            worker.note_start(state)
        worker.train(state)

    train(state)
    worker.finish()


if __name__ == "__main__":
    # trains until the file tells it to stop; ends even if the test is killed
    signal.alarm(600)
    main(
        sys.argv[1],
        {
            "allgather": dr.Allgather(),
            "auto": "auto",
            "hierarchical": dr.Hierarchical(dr.Allgather(), 1),
        }[sys.argv[2]],
    )

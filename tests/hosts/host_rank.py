"""What one rank per host does in the tests, under Horovod and under DDP.

A rank runs the method that its first argument names.
"""

import json
import os
import pathlib
import sys

import links
import torch

import deepreduce_hvd as dr

STEPS = 6
CODECS = {
    # the same number of messages with almost no contents, to measure the cost of the protocols
    "nothing": dr.Codec(dr.Threshold(1e30)),
    "recommended": None,
    "pairs": dr.Codec(dr.TopK(0.05)),
}
#: Headers of Ethernet, IP and TCP with time stamps, per segment. The counters count segments that
#: the kernel has joined as one.
HEADER_BYTES = 14 + 20 + 32


def network():
    """Return a network with 4 million parameters."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(500, 2000),
        torch.nn.Tanh(),
        torch.nn.Linear(2000, 1500),
        torch.nn.Tanh(),
        torch.nn.Linear(1500, 10),
    )


class HostRank:
    """A rank of a job; subclasses say how ranks communicate.

    Attributes:
        rank: number of this rank.
        size: number of ranks.
    """

    rank: int
    size: int

    def barrier(self):
        """Wait for all ranks."""
        raise NotImplementedError

    def attach(self, layers, codec):
        """Return (model, optimizer, compressor) of a network."""
        raise NotImplementedError

    def gather(self, own):
        """Return what each rank has, tensors of the same shape."""
        raise NotImplementedError

    def expected_on_the_wire(self, stats):
        """Return the expected traffic of all hosts together, from the statistics of a rank."""
        raise NotImplementedError

    def killed_in_a_step(self, directory):
        """The last rank kills itself in its third step."""
        raise NotImplementedError

    def training(self, codec):
        """Return (step function, compressor, network).

        The gradients differ between ranks.
        """
        layers = network()
        model, optimizer, compressor = self.attach(layers, codec)
        random = torch.Generator().manual_seed(1 + self.rank)

        def step():
            optimizer.zero_grad()
            model(torch.randn(16, 500, generator=random)).pow(2).mean().backward()
            optimizer.step()

        return step, compressor, layers

    def assert_bit_identical(self, layers):
        own = torch.cat([parameter.detach().view(-1) for parameter in layers.parameters()])
        own = own.view(torch.int32)
        for rank, other in enumerate(self.gather(own)):
            assert torch.equal(other, own), f"replicas: rank {rank} differs from rank {self.rank}"

    def bytes_of(self, step):
        """Return the bytes that the interface of this host sent in a step, without headers."""
        self.barrier()
        before = links.interface_counters()
        step()
        self.barrier()  # now all messages have arrived on all hosts
        after = links.interface_counters()
        return (
            after["sent_bytes"]
            - before["sent_bytes"]
            - HEADER_BYTES * (after["sent_packets"] - before["sent_packets"])
        )

    def train(self, directory):
        """Train with several codecs; write the bytes of the interface and those of stats()."""
        report = {"host": os.uname().nodename}
        for name, codec in CODECS.items():
            step, compressor, layers = self.training(codec)
            start = layers[0].weight.detach().clone()
            step()
            sent, expected = [], []
            for _ in range(STEPS):
                sent.append(self.bytes_of(step))
                expected.append(self.expected_on_the_wire(compressor.stats()))
            self.assert_bit_identical(layers)
            assert torch.equal(start, layers[0].weight) == (name == "nothing"), (
                f"{name}: expected training to move the weights"
            )
            report[name] = {"sent": sent, "expected": expected}
        (pathlib.Path(directory) / f"report.{self.rank}.json").write_text(json.dumps(report))

    def train_on(self, directory):
        """Train until something ends the process; tell the test when training has started."""
        step, _, _ = self.training(None)
        for number in range(100000):
            step()
            if number == 3:
                (pathlib.Path(directory) / f"training.{self.rank}").touch()

    def run(self):
        what, directory = sys.argv[1:]
        if what != "train":
            (pathlib.Path(directory) / f"process.{self.rank}").write_text(str(os.getpid()))
        getattr(self, what)(directory)
        print("ended as it should")

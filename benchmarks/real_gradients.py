"""Dump real gradients of the demo's network while it trains.

    PYTHONPATH=examples python benchmarks/real_gradients.py

writes build/gradients.npz. Benchmarks that need the file do the same when it is missing.
"""

import os
import subprocess
import sys

import numpy as np
from folders import EXAMPLES, ROOT

FILE = ROOT / "build" / "gradients.npz"
STEPS = (20, 100, 300)


def dump():
    """Train the demo's network and save its larger gradients at STEPS.

    The network has an additional convolution of 36,864 weights.
    """
    import torch
    from fashion import BATCH, Network, load

    class Deeper(Network):
        def __init__(self):
            super().__init__()
            self.convolution2 = torch.nn.Conv2d(16, 64, 3, padding=1)
            self.convolution3 = torch.nn.Conv2d(64, 64, 3, padding=1)
            self.hidden = torch.nn.Linear(64 * 7 * 7, 128)
            self.output = torch.nn.Linear(128, 10)

        def forward(self, images):
            features = torch.nn.functional.max_pool2d(torch.relu(self.convolution1(images)), 2)
            features = torch.relu(self.convolution3(torch.relu(self.convolution2(features))))
            features = torch.nn.functional.max_pool2d(features, 2)
            return self.output(torch.relu(self.hidden(features.flatten(1))))

    torch.manual_seed(0)
    network = Deeper()
    images, labels, _, _ = load()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    order = torch.randperm(len(images))
    arrays = {}
    for step in range(max(STEPS) + 1):
        batch = order[step * BATCH : (step + 1) * BATCH]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(images[batch]), labels[batch]).backward()
        if step in STEPS:
            for name, parameter in network.named_parameters():
                if parameter.numel() >= 10_000:
                    arrays[f"{name}@{step}"] = parameter.grad.detach().numpy().ravel().copy()
        optimizer.step()
        if step % 100 == 0:
            print(f"gradients: step {step} of {max(STEPS)}", flush=True)
    FILE.parent.mkdir(exist_ok=True)
    np.savez(FILE, **arrays)


def load_gradients():
    """Return {"parameter@step": (d,) float32}; dump the gradients first if they are missing."""
    if not FILE.exists():
        environment = {**os.environ, "PYTHONPATH": str(EXAMPLES)}
        subprocess.run([sys.executable, __file__], env=environment, check=True)
    with np.load(FILE) as arrays:
        return {name: arrays[name] for name in arrays}


if __name__ == "__main__":
    dump()
    print(f"wrote {FILE}")

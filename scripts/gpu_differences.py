"""What the comparisons of a GPU with the host share: random inputs, and a list of differences."""

import numpy as np

_MOST_SHOWN = 20


def heavy_tailed(random, d):
    return (random.standard_normal(d) * np.exp(random.standard_normal(d))).astype(np.float32)


def inputs(random, sizes):
    """Return {name: (d,) float32}."""
    cases = {f"d{d}": heavy_tailed(random, d) for d in sizes}
    cases["empty"] = np.zeros(0, dtype=np.float32)
    cases["zeros"] = np.zeros(int(random.integers(1, 3000)), dtype=np.float32)
    cases["ties"] = np.round(heavy_tailed(random, 2000) * 4).astype(np.float32)
    cases["huge"] = np.clip(heavy_tailed(random, 700), -3, 3) * np.float32(1e38)
    for name, bad in (("nan", np.nan), ("inf", -np.inf)):
        cases[name] = heavy_tailed(random, 1000)
        cases[name][random.integers(1000)] = bad
    return cases


class Differences:
    """Count comparisons and store differences.

    Args:
        device: name of the device that is compared with the host.
        random: NumPy generator of the inputs.
    """

    def __init__(self, device, random):
        self.device = device
        self.random = random
        self.made = 0
        self.failures = []

    def show(self):
        for failure in self.failures[:_MOST_SHOWN]:
            print(f"DIFFERS  {failure}")

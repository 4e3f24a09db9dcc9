"""Random profiles for tests of schedules."""

import numpy as np

from deepreduce_hvd.schedule import Link, Network, Parameter, Profile


def random_profile(seed, count, encode=1.0, decode=1.0, density=0.01):
    """Return a profile of random layers; encode and decode scale the seconds of these.

    With odd seeds, threads encode: with half of them, encoding delays backward in part. Conversion
    to float16 then takes no time.
    """
    encoding_delay = (1.0, 0.0, 1.0, 0.4)[seed % 4]
    random = np.random.default_rng(seed)
    clock, parameters = 0.0, []
    for layer in range(count):
        clock += float(random.uniform(0.1, 1.0)) * 1e-3
        elements = int(10 ** random.uniform(2.5, 6))
        points = [(d, 50 + elements * d * (0.5 + 4 * (1 - d))) for d in (0.01, 0.1, 0.5)]
        parameters.append(
            Parameter(
                f"layer{count - layer}",
                elements,
                clock,
                encode * elements * 1e-9,
                decode * elements * 1e-10,
                tuple(points),
            )
        )
    return Profile(
        tuple(parameters),
        1e-3,
        5e-4,
        density=density,
        to_fp16_seconds=encode * 2e-10 if encoding_delay == 1 else 0.0,
        from_fp16_seconds=decode * 1e-10,
        seconds_per_kept_element=encode * 1e-9 * (seed % 3),
        encoding_delay=encoding_delay,
        max_density=0.6 if seed % 8 in (3, 5) else 1.0,
    )


def random_network(seed, hosts=None):
    """Return a network of 2 to 16 hosts."""
    random = np.random.default_rng([seed, 1])
    rate = 10 ** random.uniform(8, 10.5)
    link = Link.of_rate("random", rate, 10 ** random.uniform(-5, -3.5))
    return Network(hosts or int(random.integers(2, 17)), link)

"""The shapes of ResNet-50's parameters (He et al., 2016), for measurements of exchanges."""


def shapes():
    """Return [(name, shape)] of the 161 parameters in network order: 25,557,032 elements."""
    found = []

    def convolution(name, outputs, inputs, size):
        found.append((f"{name}.weight", (outputs, inputs, size, size)))

    def normalisation(name, channels):
        found.extend([(f"{name}.weight", (channels,)), (f"{name}.bias", (channels,))])

    convolution("stem", 64, 3, 7)
    normalisation("stem.norm", 64)
    inputs = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
        for block in range(blocks):
            name = f"stage{stage}.block{block}"
            for number, (outputs, channels, size) in enumerate(
                ((width, inputs, 1), (width, width, 3), (4 * width, width, 1)), 1
            ):
                convolution(f"{name}.convolution{number}", outputs, channels, size)
                normalisation(f"{name}.norm{number}", outputs)
            if block == 0:
                convolution(f"{name}.shortcut", 4 * width, inputs, 1)
                normalisation(f"{name}.shortcut.norm", 4 * width)
            inputs = 4 * width
    return [*found, ("classifier.weight", (1000, inputs)), ("classifier.bias", (1000,))]

"""A codec for each tensor: densities as LAGS-SGD chooses them (Shi et al. 2019), or the default.

LAGS sends a layer as densely as the exchange can be hidden behind the backward pass of the next
layer. So the number of elements of a layer is in proportion to the time of the next one.
"""

import torch

from deepreduce_hvd import recommended_codec
from deepreduce_hvd.schedule import hidden_density


def sizes(task):
    """Return {parameter name: number of elements} of a task's model."""
    with torch.random.fork_rng():
        return {name: one.numel() for name, one in task.model().named_parameters()}


def recommended_codecs(task):
    """Return {parameter name: default codec} of a task's model."""
    return {name: recommended_codec((d,)) for name, d in sizes(task).items()}


def tables(task):
    """Return the names of the weights of a task's embedding tables."""
    with torch.random.fork_rng():
        modules = dict(task.model().named_modules())
    return [
        f"{name}.weight"
        for name, module in modules.items()
        if isinstance(module, torch.nn.Embedding)
    ]


def multiplications(task):
    """Return {parameter name: multiplications of a forward pass} of a task's model, on one batch.

    Only convolutions and linear layers count. Other parameters are absent.
    """
    found, handles = {}, []
    with torch.random.fork_rng():
        model = task.model()

    def counter(name):
        def count(layer, inputs, output):
            found[f"{name}.weight"] = layer.weight.numel() * output.numel() // len(layer.weight)

        return count

    for name, layer in model.named_modules():
        if isinstance(layer, (torch.nn.Conv2d, torch.nn.Linear)):
            handles.append(layer.register_forward_hook(counter(name)))
    with torch.no_grad():
        task.loss(model, next(task.batches(1, seed=0))[0])
    return found


def densities(elements, seconds, ratio, smallest=0.001):
    """Return the density of each layer on a network on which ``ratio`` of all elements are sent.

    Args:
        elements: {name: number of elements} in the order in which backward computes the gradients.
        seconds: {name: seconds of its backward pass}, in any unit.
        ratio: share of the elements of all layers that is sent.
        smallest: smallest density of a layer.

    Returns:
        {name: density}. The last layer has none to hide behind, so it has the smallest density.
    """
    names = list(elements)
    hidden = [seconds[name] for name in names[1:]] + [0.0]
    total = ratio * sum(elements.values())

    def all_densities(seconds_per_element):
        return {
            name: hidden_density(
                own, elements[name], 1, 0.0, seconds_per_element, ranks=2,
                max_compression=1 / smallest,
            )
            for name, own in zip(names, hidden)
        }  # fmt: skip

    low, high = 1e-9 * max(hidden) / total, 1e9 * max(hidden) / total
    for _ in range(200):
        middle = (low * high) ** 0.5
        sent = sum(share * elements[name] for name, share in all_densities(middle).items())
        low, high = (middle, high) if sent > total else (low, middle)
    return all_densities(high)


def layerwise_codecs(task, codec_of, ratio, dense_below=1024):
    """Return {parameter name: codec} of the large layers, with the densities of LAGS.

    Args:
        task: one of :mod:`tasks` whose large parameters are weights of convolutions and linear
            layers.
        codec_of: function of a density that returns a codec.
        ratio: share of the elements of all large layers that is sent.
        dense_below: number of elements from which a layer is large.
    """
    seconds, shapes = multiplications(task), sizes(task)
    large = {name: shapes[name] for name in reversed(shapes) if shapes[name] >= dense_below}
    return {name: codec_of(density) for name, density in densities(large, seconds, ratio).items()}

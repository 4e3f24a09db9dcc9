"""Parameters of well-known networks and the work of their layers, computed from the architectures.

Every function returns [(name, shape, multiplications)] in network order. The multiplications are
those of a forward pass of one example. Elementwise layers, which multiply nothing, count ten times
the elements that they read.
"""

import math

import resnet50 as resnet50_shapes

_ELEMENTWISE = 10
#: height and width of the output of each part of ResNet-50
_SIDES = {"stem": 112, "stage1": 56, "stage2": 28, "stage3": 14, "stage4": 7, "classifier": 1}
#: outputs and height of the output of the convolutions of VGG-16
_VGG = [(64, 224)] * 2 + [(128, 112)] * 2 + [(256, 56)] * 3 + [(512, 28)] * 3 + [(512, 14)] * 3
_TOKENS = 128  # of an example of BERT
_WORDS, _STEPS, _WIDTH = 10_000, 35, 1500  # of the LSTM


def resnet50():
    """ResNet-50 (He et al., 2016), 224 x 224 pixels: 25,557,032 elements."""
    found = []
    for name, shape in resnet50_shapes.shapes():
        per_element = 1 if len(shape) > 1 else _ELEMENTWISE
        area = _SIDES[name.split(".")[0]] ** 2
        found.append((name, shape, per_element * math.prod(shape) * area))
    return found


def _linear(name, outputs, inputs, rows):
    """A linear layer that is applied to ``rows`` rows."""
    weight = (f"{name}.weight", (outputs, inputs), outputs * inputs * rows)
    return [weight, (f"{name}.bias", (outputs,), outputs * rows)]


def _normalization(name, width, times):
    work = _ELEMENTWISE * width * times
    return [(f"{name}.weight", (width,), work), (f"{name}.bias", (width,), work)]


def vgg16():
    """VGG-16 (Simonyan and Zisserman, 2015), 224 x 224 pixels: 138,357,544 elements."""
    found, inputs = [], 3
    for number, (outputs, side) in enumerate(_VGG, 1):
        shape = (outputs, inputs, 3, 3)
        found.append((f"convolution{number}.weight", shape, math.prod(shape) * side**2))
        found.append((f"convolution{number}.bias", (outputs,), outputs * side**2))
        inputs = outputs
    for number, (outputs, width) in enumerate(((4096, 25088), (4096, 4096), (1000, 4096)), 1):
        found += _linear(f"linear{number}", outputs, width, 1)
    return found


def bert_base():
    """BERT-base, uncased (Devlin et al., 2019), 128 tokens: 109,482,240 elements."""
    width, inner = 768, 3072
    found = [
        (f"embeddings.{kind}", (rows, width), _ELEMENTWISE * width * _TOKENS)
        for kind, rows in (("word", 30_522), ("position", 512), ("type", 2))
    ]
    found += _normalization("embeddings.norm", width, _TOKENS)
    for number in range(12):
        name = f"layer{number}"
        for part in ("query", "key"):
            found += _linear(f"{name}.{part}", width, width, _TOKENS)
        # the products of queries with keys and of weights with values have no parameters
        weight, bias = _linear(f"{name}.value", width, width, _TOKENS)
        found += [(*weight[:2], weight[2] + 2 * _TOKENS**2 * width), bias]
        found += _linear(f"{name}.attention", width, width, _TOKENS)
        found += _normalization(f"{name}.norm1", width, _TOKENS)
        found += _linear(f"{name}.inner", inner, width, _TOKENS)
        found += _linear(f"{name}.outer", width, inner, _TOKENS)
        found += _normalization(f"{name}.norm2", width, _TOKENS)
    return found + _linear("pooler", width, width, 1)


def lstm():
    """The large LSTM of Zaremba et al. (2014), 35 words of 10,000: 66,034,000 elements."""
    found = [("embedding", (_WORDS, _WIDTH), _ELEMENTWISE * _WIDTH * _STEPS)]
    for layer in (1, 2):
        for part in ("input", "hidden"):
            found += _linear(f"lstm{layer}.{part}", 4 * _WIDTH, _WIDTH, _STEPS)
    return found + _linear("words", _WORDS, _WIDTH, _STEPS)

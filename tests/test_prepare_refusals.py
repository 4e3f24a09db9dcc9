"""Test what prepare refuses, and what it and a compressor warn of."""

import functools

import horovod.torch as hvd
import pytest
import torch
from test_prepare import SETTINGS, compressor_of, horovod, network, parted  # noqa: F401

import deepreduce_hvd as dr
from deepreduce_hvd.torch.unprepared import momentum_warning


class Wrapper(torch.optim.Optimizer):
    """An optimizer with another one inside, such as Accelerate's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups


def test_a_wrapper_is_refused():
    model = network()
    wrapper = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    message = "expected the optimizer inside of Wrapper, .* call dr.prepare before Wrapper is made"
    with pytest.raises(dr.InvalidArgumentError, match=message):
        dr.prepare(wrapper, compressor_of(model))


def test_what_cannot_be_prepared_is_refused():
    model = network()
    compressor = compressor_of(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped = hvd.DistributedOptimizer(
        sgd, named_parameters=model.named_parameters(), compression=compressor
    )
    with pytest.raises(dr.InvalidArgumentError, match=r"before hvd\.DistributedOptimizer wraps"):
        dr.prepare(wrapped, compressor)
    scheduled = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(scheduled, 10)
    with pytest.raises(dr.InvalidArgumentError, match="create schedulers after prepare"):
        dr.prepare(scheduled, compressor)
    endless = torch.optim.SGD(model.parameters(), lr=0.1, momentum=1.0)
    with pytest.raises(dr.InvalidArgumentError, match=r"expected a momentum below 1, got 1\.0"):
        dr.prepare(endless, compressor)
    assert type(endless) is torch.optim.SGD
    with pytest.raises(dr.InvalidArgumentError, match="expected one of SGD, .*got LBFGS"):
        dr.prepare(torch.optim.LBFGS(model.parameters()), compressor)
    with pytest.raises(dr.InvalidArgumentError, match="expected a Compressor or None, got Codec"):
        dr.prepare(sgd, dr.recommended_codec())
    with pytest.raises(dr.InvalidArgumentError, match=r"got Compressor itself, a class; write"):
        dr.prepare(sgd, dr.Compressor)
    with pytest.raises(
        dr.InvalidArgumentError,
        match=r"expected a Compressor or None, got SGD; the optimizer comes first: dr\.prepare\(",
    ):
        dr.prepare(compressor, sgd)
    with pytest.raises(dr.InvalidArgumentError, match="expected a PyTorch or Keras optimizer, got"):
        dr.prepare(model.parameters(), compressor)


class Multiplied:
    """A learning rate multiplier for each group, as a mixin."""

    def step(self, closure=None):
        rates = [group["lr"] for group in self.param_groups]
        for number, group in enumerate(self.param_groups):
            group["lr"] *= number
        loss = super().step(closure)
        for group, rate in zip(self.param_groups, rates):
            group["lr"] = rate
        return loss


def decorated(kind):
    """Return a subclass whose step is wrapped by functools.wraps."""
    step = kind.step

    @functools.wraps(step)
    def watched(self, closure=None):
        self.watched = len(self.param_groups)
        return step(self, closure)

    return type(f"Watched{kind.__name__}", (kind,), {"step": watched})


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "with hooks"])
def test_a_step_of_its_own_is_refused(kind, used):
    model = network()
    compressor = compressor_of(model)
    if used:  # PyTorch wraps the step of a class when its first optimizer is made
        kind(model.parameters())
    for own in (type("Multiplied", (Multiplied, kind), {}), decorated(kind)):
        optimizer = own(model.parameters())
        with pytest.raises(dr.InvalidArgumentError) as refused:
            dr.prepare(optimizer, compressor)
        assert f"with the step of torch.optim.{kind.__name__}, got {own.__name__}" in str(
            refused.value
        )
        assert type(optimizer) is own
    inherits = type("Inherits", (kind,), {"zero_grad": lambda self: None})
    assert isinstance(dr.prepare(inherits(model.parameters()), compressor), inherits)


def test_an_optimizer_with_momentum_is_warned_of():
    model = network()
    compressor = compressor_of(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    text = momentum_warning(sgd, compressor)
    assert "SGD has momentum 0.9 for compressed parameters" in text
    assert "write optimizer = dr.prepare(optimizer, compressor)" in text
    adam = torch.optim.AdamW(model.parameters())
    assert "AdamW has betas[0] 0.9 for compressed parameters" in momentum_warning(adam, compressor)
    assert momentum_warning(torch.optim.SGD(model.parameters(), lr=0.1), compressor) is None
    assert momentum_warning(torch.optim.Adagrad(model.parameters()), compressor) is None
    assert momentum_warning(dr.prepare(sgd, compressor), compressor) is None
    _, small = parted(model)
    assert momentum_warning(torch.optim.Adam(small), compressor) is None
    assert momentum_warning(adam, compressor_of(model, memory=dr.NoMemory())) is None


class Momentum(torch.optim.Optimizer):
    """An optimizer that this package does not know."""

    def __init__(self, parameters, **defaults):
        super().__init__(parameters, defaults)

    def step(self, closure=None):
        pass


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (torch.optim.SparseAdam, "betas[0]"),
        (lambda parameters: Momentum(parameters, momentum=0.5), "momentum"),
        (lambda parameters: Momentum(parameters, betas=(0.5, 0.9)), "betas[0]"),
        (lambda parameters: decorated(torch.optim.SGD)(parameters, momentum=0.5), "momentum"),
        (lambda parameters: decorated(torch.optim.Adam)(parameters), "betas[0]"),
        (lambda parameters: Momentum(parameters, decay=0.5), None),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_to_do_with_an_optimizer_that_cannot_be_prepared(make, setting, wrapped):
    """The warning and the refusal name the setting, and no warning recommends prepare."""
    model = network()
    compressor = compressor_of(model)
    optimizer = make(list(model.parameters()))
    with pytest.raises(dr.InvalidArgumentError) as refused:
        dr.prepare(optimizer, compressor)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compressor
        )
    text = momentum_warning(optimizer, compressor)
    if setting is None:
        assert text is None
        assert str(refused.value).endswith("without prepare: it has no momentum that is known")
        return
    assert str(refused.value).endswith(
        f"without prepare: set {setting} to 0 for the compressed parameters"
    )
    assert text.endswith(f"; set {setting} to 0 for them") and "dr.prepare" not in text


class Adafactor(Momentum):
    """As that of another package."""


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.LBFGS,
        torch.optim.Rprop,
        torch.optim.Adafactor,
        torch.optim.Muon,
        Adafactor,
        lambda parameters: decorated(torch.optim.Muon)(parameters),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_optimizers_that_do_not_suit_compression_are_named(make, wrapped):
    model = torch.nn.Linear(200, 100, bias=False)
    compressor = compressor_of(model)
    optimizer = make(list(model.parameters()))
    with pytest.raises(dr.InvalidArgumentError, match="which needs complete gradients; use"):
        dr.prepare(optimizer, compressor)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compressor
        )
    text = momentum_warning(optimizer, compressor)
    assert "needs complete gradients, but of those of compressed parameters only" in text, text
    assert text.endswith("or send its parameters uncompressed, as Compressor('dense') does")
    assert momentum_warning(optimizer, compressor_of(model, memory=dr.NoMemory())) is None


@pytest.mark.parametrize(
    ("kind", "sparsifier", "hint"),
    [
        (torch.optim.Adam, dr.TopK(0.02), "a higher density: dr.TopK(0.02, warmup_steps=50)"),
        (torch.optim.Adam, dr.TopK(0.02, warmup_steps=9), ""),
        (torch.optim.Adam, dr.RandomK(0.02), ""),
        (torch.optim.Adam, dr.TopK(0.5), ""),
        (torch.optim.Adam, dr.TopK(k=5), ""),
        (torch.optim.RMSprop, dr.TopK(0.02), ""),
    ],
)
def test_adam_is_told_to_start_with_a_higher_density(kind, sparsifier, hint, capsys):
    model = network()
    settings = {"momentum": 0.9} if kind is torch.optim.RMSprop else {}
    codec = dr.Codec(sparsifier, index=dr.Rice())
    dr.prepare(kind(model.parameters(), **settings), compressor_of(model, codec=codec))
    said = capsys.readouterr().out
    assert ("higher density" in said) == bool(hint) and hint in said


def test_an_optimizer_of_other_parameters():
    compressor = compressor_of(network())
    with pytest.raises(dr.InvalidArgumentError, match="got one that has none of them"):
        dr.prepare(torch.optim.SGD(network().parameters(), lr=0.1, momentum=0.9), compressor)


def test_a_second_compressor_for_other_parameters_of_the_optimizer():
    """It would undo what the first one needs. One for the same parameters replaces it."""
    first, second = network(), network()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1, momentum=0.9)
    compressor = compressor_of(first)
    dr.prepare(optimizer, compressor)
    with pytest.raises(dr.InvalidArgumentError, match="got a second one without 0.weight and 3 mo"):
        dr.prepare(optimizer, compressor_of(second))
    dr.prepare(optimizer, compressor_of(first))
    compressor = optimizer.preparation.compressor
    compressor.close()
    dr.prepare(optimizer, compressor_of(second))
    dr.prepare(optimizer, None)

"""Warnings about programs in which gradients are not exchanged, or change meanwhile.

Run by torch_scenarios.py.
"""

import gc
import itertools
import warnings

import horovod.torch as hvd
import torch
from scenario_runner import refused, texts_of_warnings
from torch_tools import assert_equal_everywhere, backward, batch, distributed, model

import deepreduce_hvd as dr


def _warned_steps(optimizer, step_with, steps=4):
    """Make steps with ``step_with(optimizer, number)``; return the warnings about exchanges."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(steps):
            step_with(optimizer, number)
    texts = [str(one.message) for one in caught]
    return [text for text in texts if "not exchanged" in text or "while it was exchanged" in text]


def _plain(network):
    def step(optimizer, number):
        network.zero_grad()
        backward(network, number)
        optimizer.step()

    return step


def scenario_layers_that_were_frozen_when_the_optimizer_was_created_are_named(directory):
    network = model()
    frozen = list(network[0].parameters())
    for parameter in frozen:
        parameter.requires_grad_(False)
    optimizer, _ = distributed(network)
    assert _warned_steps(optimizer, _plain(network)) == []
    assert_equal_everywhere(network.named_parameters(), "frozen from the start")
    for parameter in frozen:
        parameter.requires_grad_(True)
    (text,) = _warned_steps(optimizer, _plain(network))
    assert "0.weight, 0.bias that was not exchanged" in text, text


def scenario_layers_that_are_added_to_the_optimizer_are_named(directory):
    network = model()
    optimizer, _ = distributed(network)
    assert _warned_steps(optimizer, _plain(network)) == []
    added = torch.nn.Linear(network[-1].out_features, network[-1].out_features)
    optimizer.add_param_group({"params": added.parameters()})
    assert _warned_steps(optimizer, _plain(network)) == []  # it is not used yet
    (text,) = _warned_steps(optimizer, _plain(network.append(added)))
    assert 'of param_groups[1]["params"][0], param_groups[1]["params"][1] that was' in text, text


def scenario_ranks_that_begin_with_other_values_are_named(directory):
    for dtype in (torch.float32, torch.float16, torch.float64):
        for differs in (True, False):
            network = model(seed=hvd.rank(), dtype=dtype)
            if not differs:
                hvd.broadcast_parameters(network.state_dict(), root_rank=0)
            with torch.no_grad():
                network[4].bias[2] += differs and hvd.rank() == hvd.size() - 1
            optimizer, _ = distributed(network)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for number in range(3):
                    _plain(network)(optimizer, number)
            texts = [str(one.message) for one in caught if "other values" in str(one.message)]
            assert bool(texts) == (differs and hvd.rank() == 0), texts
            if texts:
                (text,) = texts
                others = "rank 1" if hvd.size() == 2 else "ranks 1, 2"
                assert f"{others} began with other values" in text, text
                assert "and after hvd.broadcast_optimizer_state" in text, text


def scenario_a_second_compressor_of_the_same_parameters_is_named(directory):
    for kind, named in (
        ("other", True),
        ("closed", False),
        ("loaded", False),
        ("no memory", False),
    ):
        network = model()
        optimizer, first = distributed(
            network, memory=dr.NoMemory() if kind == "no memory" else None
        )
        _plain(network)(optimizer, 0)
        state = first.state_dict()
        if kind == "closed":
            first.close()
        del optimizer
        gc.collect()  # Horovod's hooks refer to it
        optimizer, second = distributed(network)
        if kind == "loaded":
            second.load_state_dict(state)
        texts = texts_of_warnings(lambda: _plain(network)(optimizer, 1))
        texts = [text for text in texts if "begins without residuals" in text]
        assert len(texts) == (named and hvd.rank() == 0), (kind, texts)
        assert all("(0.weight, 0.bias, 2.weight, 4.weight)" in text for text in texts), texts


def scenario_steps_in_inference_mode(directory):
    """What a step makes there can be written outside of it later."""
    results = []
    for inference, codec in itertools.product((False, True), (dr.recommended_codec(), "dense")):
        network = model()
        network.unused = torch.nn.Linear(40, 50)  # Horovod makes its gradients in the step
        optimizer, _ = distributed(network, codec)
        for number in range(4):
            optimizer.zero_grad()
            network[:-1](batch(number)).pow(2).mean().backward()
            with torch.inference_mode(inference and number % 2 == 1):
                optimizer.step()
        assert_equal_everywhere(network.named_parameters(), f"{inference} {codec}")
        results.append([one.detach().clone() for one in network.parameters()])
    half = len(results) // 2
    if hvd.size() == 2:  # the order of a sum of more values varies
        for plain, other in zip(results[:half], results[half:]):
            assert all(torch.equal(*pair) for pair in zip(plain, other))


def scenario_a_closure_is_named(directory):
    network = model()
    optimizer, _ = distributed(network)
    assert _warned_steps(optimizer, _plain(network), 1) == []

    def step(optimizer, number):
        def closure():
            network.zero_grad()
            backward(network, number)

        optimizer.step(closure)

    (text,) = _warned_steps(optimizer, step)
    assert "do not give step() a closure" in text, text


def _clip(network):
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1e-3)


def _replace_all(network):
    for parameter in network.parameters():
        parameter.grad = parameter.grad.clamp(-1e-3, 1e-3)


def _replace_last(network):
    network[-1].weight.grad = network[-1].weight.grad * 2


def scenario_gradients_that_change_while_they_are_exchanged_are_named(directory):
    """In place, or because the program sets others; uncompressed gradients, too."""
    codecs = dr.Codec(dr.TopK(0.05)), dr.recommended_codec(), "fp16", "dense"
    for codec, dense_below, change in itertools.product(
        codecs, (0, 50), (_clip, _replace_all, _replace_last)
    ):
        network = model()
        optimizer, _ = distributed(network, codec, compressor_options={"dense_below": dense_below})

        def clipped(optimizer, number, network=network, change=change):
            network.zero_grad()
            backward(network, number)
            optimizer.synchronize()
            change(network)
            with optimizer.skip_synchronize():
                optimizer.step()

        assert _warned_steps(optimizer, clipped) == []
        assert_equal_everywhere(
            network.named_parameters(), f"{codec} {dense_below} {change.__name__}"
        )

        def too_early(optimizer, number, network=network, change=change):
            network.zero_grad()
            backward(network, number)
            change(network)
            optimizer.step()

        (text,) = _warned_steps(optimizer, too_early)
        assert "was changed while it was exchanged" in text, text
        assert (f"gradient of {len(network) - 1}.weight was" in text) or change != _replace_last


def scenario_gradients_that_are_views_of_one_buffer(directory):
    """PyTorch counts writes to all of them together, which says nothing about one of them."""

    def trained(views):
        network = model(seed=7)
        parameters = list(network.parameters())
        buffer = torch.zeros(sum(parameter.numel() for parameter in parameters))
        if views:
            parts = buffer.split([parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts):
                parameter.grad = part.view_as(parameter)
        optimizer, _ = distributed(network)

        def step(optimizer, number):
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()
            backward(network, number)
            optimizer.step()

        assert _warned_steps(optimizer, step) == []
        assert bool(buffer.any()) == views, "expected the sums in the buffer"
        return torch.cat([parameter.detach().flatten() for parameter in parameters])

    assert torch.equal(trained(views=True), trained(views=False))


def scenario_a_state_of_a_step_in_progress_is_named(directory):
    network = model()
    optimizer, compressor = distributed(network)

    def saved():
        return texts_of_warnings(compressor.state_dict)

    for number in range(3):
        optimizer.zero_grad()
        if number == 1:
            assert saved() == []
        backward(network, number)
        if number == 2:
            (text,) = saved()
            assert "got one between backward() and step()" in text, text
        optimizer.step()
        assert saved() == []


def scenario_a_state_is_not_loaded_within_a_step(directory):
    network = model()
    optimizer, compressor = distributed(network)
    for number in range(3):
        state = compressor.state_dict()
        optimizer.zero_grad()
        backward(network, number)
        with refused(r"load_state_dict: expected .* got one between backward\(\) and step\(\)"):
            compressor.load_state_dict(state)
        optimizer.synchronize()
        compressor.load_state_dict(state)
        with optimizer.skip_synchronize():
            optimizer.step()


def scenario_a_scaler_that_steps_before_synchronize_is_refused(directory):
    """Its step would use averages of scaled gradients; PyTorch does not count what it wrote."""
    for enabled, codec in itertools.product((True, False), (dr.recommended_codec(), "dense")):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=enabled)
        network = model()
        optimizer, _ = distributed(
            network, codec, compressor_options={"loss_scale": scaler.get_scale}
        )
        before = [one.detach().clone() for one in network.parameters()]
        scaler.scale(network(batch(0)).pow(2).mean()).backward()
        if not enabled:
            scaler.step(optimizer)
            continue
        with refused(r"scaler.step: expected optimizer.synchronize\(\) before it"):
            scaler.step(optimizer)
        assert all(map(torch.equal, before, network.parameters()))


def scenario_a_scaler_that_the_compressor_does_not_know_is_named(directory):
    """Its optimizer may be prepared, clip gradients, or begin with a step of zeros."""
    for enabled, known, clips, codec in itertools.product(
        (True, False), (True, False), (True, False), (dr.recommended_codec(), "dense")
    ):
        network = model()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=enabled)
        options = {"loss_scale": scaler.get_scale} if known else {}
        optimizer, _ = distributed(network, codec, compressor_options=options)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)

        def train(optimizer=optimizer, network=network, scaler=scaler, clips=clips):
            for number in range(3):
                optimizer.zero_grad()
                scaler.scale(network(batch(number)).pow(2).mean()).backward()
                optimizer.synchronize()
                if clips:
                    scaler.unscale_(optimizer)
                    _clip(network)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
                scaler.update()

        said = [one for one in texts_of_warnings(train) if "GradScaler" in one]
        expect = enabled and not known and codec != "dense"
        assert len(said) == expect, (enabled, known, clips, codec, said)


def scenario_loss_scales_that_differ_are_refused(directory):
    """As those of an elastic state's scaler, if the compressor reads another one."""
    last = hvd.rank() == hvd.size() - 1
    scales = [8.0, 8.0, 4.0 if last else 8.0]
    network = model()
    optimizer, _ = distributed(network, compressor_options={"loss_scale": lambda: scales[0]})
    for _ in range(2):
        _plain(network)(optimizer, 0)
        scales.pop(0)
    with refused(f"at the same step, got .*; the loss scale here is {scales[0]:g}"):
        _plain(network)(optimizer, 1)


def scenario_reducescatter_is_refused(directory):
    network = model()
    optimizer, compressor = distributed(network)
    _plain(network)(optimizer, 0)
    gradient = network[0].weight.grad
    with refused("expected a call by Horovod's allreduce, got one by reducescatter"):
        hvd.reducescatter(gradient, compression=compressor)
    with refused("expected a call by Horovod's allreduce, got one by reducescatter"):
        hvd.grouped_reducescatter([gradient, gradient], compression=compressor)
    # nothing was begun: the compressor goes on
    assert hvd.allreduce(gradient, compression=compressor).shape == gradient.shape


def scenario_a_frozen_layer_without_gradients_does_not_change(directory):
    """The remedy of the page against weight decay and momentum, for frozen layers."""
    for remedied in (False, True):
        network = model()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        optimizer, _ = distributed(network, optimizer=optimizer)
        _warned_steps(optimizer, _plain(network), 2)
        frozen = list(network[0].parameters())
        for parameter in frozen:
            parameter.requires_grad_(False)
        before = [parameter.clone() for parameter in frozen]

        def step(optimizer, number, network=network, frozen=frozen, remedied=remedied):
            network.zero_grad()
            backward(network, number)
            optimizer.synchronize()
            for parameter in frozen if remedied else ():
                parameter.grad = None
            with optimizer.skip_synchronize():
                optimizer.step()

        assert _warned_steps(optimizer, step) == []
        assert all(map(torch.equal, frozen, before)) == remedied
        assert_equal_everywhere(network.named_parameters(), f"frozen {remedied}")


def scenario_parameters_may_leave_the_optimizer(directory):
    """Horovod goes on with exchanging them; nothing is updated."""
    for prepared in (False, True):
        network = model()
        groups = [{"params": list(network[number].parameters())} for number in (0, 2, 4)]
        compressor = dr.Compressor(parameters=network.named_parameters(), dense_below=50)
        optimizer = torch.optim.SGD([dict(group) for group in groups], lr=0.1, momentum=0.9)
        if prepared:
            dr.prepare(optimizer, compressor)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=network.named_parameters(), compression=compressor
        )
        _warned_steps(optimizer, _plain(network), 2)
        del optimizer.param_groups[0]
        before = network[0].weight.detach().clone()
        assert _warned_steps(optimizer, _plain(network), 2) == []
        assert torch.equal(network[0].weight, before)
        assert_equal_everywhere(network.named_parameters(), f"left {prepared}")


def scenario_momentum_is_not_applied_twice(directory):
    """A memory with a momentum takes only gradients that were not averaged."""
    for loss_scale in (None, lambda: 1.0):
        for memory in (dr.MomentumCorrection(0.9), dr.Residual()):
            network = model()
            optimizer, _ = distributed(
                network, memory=memory, compressor_options={"loss_scale": loss_scale}
            )

            def exchange(number, network=network, optimizer=optimizer):
                backward(network, number)
                optimizer.synchronize()

            for number in range(3):
                optimizer.zero_grad()
                exchange(number)
                if number % 2:
                    network.zero_grad(set_to_none=False)  # the program discards them
                    exchange(10 + number)
                with optimizer.skip_synchronize():
                    optimizer.step()
            exchange(3)  # without zero_grad, the optimizer has used the last average
            if isinstance(memory, dr.Residual):
                exchange(4)
                continue
            with refused("expected one backward pass per step that synchronizes gradients"):
                exchange(4)

"""Test what is known about embedding tables on one rank: loaded states, devices, profiles."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
hvd = pytest.importorskip("horovod.torch", reason="Horovod is not installed")

import deepreduce_hvd as dr  # noqa: E402
from deepreduce_hvd.adapters.embedding_tables import has_bias, names_of  # noqa: E402
from deepreduce_hvd.planning.measured_profile import profiled  # noqa: E402
from deepreduce_hvd.planning.policies import Policy, rows_codec  # noqa: E402
from deepreduce_hvd.torch.unprepared import momentum_warning  # noqa: E402

hvd.init()


def model():
    return torch.nn.ModuleDict(
        {"table": torch.nn.Embedding(400, 8), "layer": torch.nn.Linear(8, 400)}
    )


def with_table(network, **settings):
    """Return a compressor that has loaded that ``table.weight`` is one."""
    compressor = dr.Compressor(parameters=network.named_parameters(), **settings)
    state = dr.Compressor(parameters=network.named_parameters(), **settings).state_dict()
    state["parameters"]["table.weight"]["is_table"] = True
    state["parameters"]["layer.weight"]["is_table"] = False
    compressor.load_state_dict(state)
    return compressor


def test_a_loaded_table_has_the_codec_rows_and_no_warning():
    network = model()
    compressor = with_table(network)
    rows = dr.Codec(dr.Threshold(0), index=dr.RLE(), value=dr.LloydMax(bits=4))
    assert compressor.policies["table.weight"].codec == rows
    assert compressor.policies["layer.weight"].codec == dr.recommended_codec()
    assert compressor.state_dict()["parameters"]["table.weight"]["is_table"] is True
    assert momentum_warning(torch.optim.Adam(network["table"].parameters()), compressor) is None


def test_a_state_does_not_make_a_table_of_a_parameter_with_a_chosen_memory():
    """It is delayed, so that it is stepped without momentum, or with a warning."""
    network = model()
    compressor = with_table(network, memory=dr.Residual())
    assert compressor.policies["table.weight"].codec == dr.recommended_codec()
    optimizer = torch.optim.Adam(network["table"].parameters(), betas=(0.9, 0.999))
    assert "Adam has betas[0] 0.9" in momentum_warning(optimizer, compressor)
    dr.prepare(optimizer, compressor)
    (group,) = optimizer._split(optimizer.param_groups[0])
    assert group["betas"] == (0.0, 0.999)


def test_a_table_that_is_moved_to_a_gpu_gets_an_index_codec_that_works_there():
    network = model()
    compressor = with_table(network)
    adapter = compressor.adapter
    on_host, again, on_gpu = (
        adapter.tables.layout_of(adapter.scheduler.layout, adapter.slots.values())
        for adapter.tables._is_on_gpu in (lambda name: False, lambda name: False, lambda name: True)
    )
    assert on_host is again and on_host.fingerprint == on_gpu.fingerprint
    for layout, index in ((on_host, dr.RLE()), (on_gpu, dr.Rice())):
        assert layout.policies["table.weight"].codec.index == index
        assert layout.policies["layer.weight"].codec == dr.recommended_codec()


def test_profiles_leave_tables_out():
    class Times:
        ready = {"table.weight": 0.2, "layer.weight": 0.1}  # noqa: RUF012

    compressor = with_table(model())
    slots = compressor.adapter.slots
    policies = compressor.first_policies
    assert profiled(policies, Times, slots, names_of(slots)) == ["layer.weight"]
    assert profiled(policies, Times, slots, []) == ["layer.weight", "table.weight"]
    rows = policies | {"layer.weight": Policy("codec", rows_codec())}
    assert profiled(rows, Times, slots, []) == ["table.weight"]
    assert profiled(rows, Times, slots, names_of(slots)) == []
    rows = {name: Policy("codec", rows_codec()) for name in Times.ready}
    assert profiled(rows, Times, slots, []) == ["layer.weight", "table.weight"]


def test_candidates_are_compared_between_ranks():
    network = model()
    settings = [
        {one.name: one.value for one in compressor.settings(compressor.adapter.transport)}
        for compressor in (
            dr.Compressor(parameters=network.named_parameters()),
            dr.Compressor(memory=dr.Residual(), parameters=network.named_parameters()),
        )
    ]
    different = [name for name in settings[0] if settings[0][name] != settings[1][name]]
    assert different == ["parameters that may be embedding tables"]


def test_biases_are_known_by_their_names():
    names = {"bias", "a.bias", "b.bias", "rows.0.bias"}
    for name, expected in {
        "weight": True,
        "a.weight": True,
        "c.weight": False,
        "a.weights": False,
        "a.bias": False,
        "b.parametrizations.weight.original": True,
        "b.parametrizations.weight.original1": True,
        "c.parametrizations.weight.original1": False,
        "parametrizations.weight.original0": True,
        "b.weight_orig": True,
        "b.weight_v": True,
        "rows.0.weight": True,
        "rows.1.weight": False,
    }.items():
        assert has_bias(name, names) is expected, name

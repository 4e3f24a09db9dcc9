"""from_params: the dictionaries of GRACE and DeepReduce, defaults, and unsupported settings."""

import ast
import re
import warnings
from pathlib import Path

import pytest
import torch
from published_params import DEFAULTS, NAMES, PUBLISHED

import deepreduce_hvd as dr
from deepreduce_hvd.migration import params_table
from deepreduce_hvd.migration.params import _Settings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "migration.md"
GATHERED = {"communicator": "allgather"}
TOPK = {"compressor": "topk", "compress_ratio": 0.01, "memory": "residual", **GATHERED}


@pytest.fixture(autouse=True)
def initialized_horovod():
    import horovod.torch as hvd

    hvd.init()


def named():
    return torch.nn.Linear(40, 50).named_parameters()


def made(params, **options):
    """Return the compressor and the texts of the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compressor = dr.from_params(params, named(), **options)
    return compressor, [str(warning.message) for warning in caught]


def quiet(params, **options):
    compressor, texts = made(params, **options)
    assert not texts
    return compressor


@pytest.mark.parametrize(
    "published", PUBLISHED, ids=[f"{number}-{one.source}" for number, one in enumerate(PUBLISHED)]
)
def test_published_dictionaries(published):
    compressor, texts = made(published.params)
    assert repr(compressor.codec) == repr(published.codec)
    assert (
        compressor.memory == published.memory and compressor.communicator == published.communicator
    )
    assert len(texts) == len(published.warnings)
    assert all(text.startswith("deepreduce_hvd: ") for text in texts)
    for words in published.warnings:
        assert any(words in text for text in texts), (words, texts)


def test_every_published_name_is_known():
    for setting, names in NAMES.items():
        assert names <= set(params_table.CHOICES[setting]), setting


def test_defaults_are_those_of_the_projects():
    assert {name: params_table.DEFAULTS[name] for name in DEFAULTS} == DEFAULTS
    nothing = quiet({})
    assert (
        repr(nothing.codec) == repr(dr.Codec(dr.NoneSparsifier()))
        and nothing.memory == dr.NoMemory()
    )
    assert quiet({"compressor": "topk", **GATHERED}).codec.sparsifier == dr.TopK(0.3)
    assert quiet({"compressor": "randomk"}).codec.sparsifier == dr.RandomK(0.3)
    assert quiet({"compressor": "threshold", **GATHERED}).codec.sparsifier == dr.Threshold(0.01)
    assert quiet({**TOPK, "memory": "dgc"}).memory == dr.MomentumCorrection(0.9)


def test_none_with_allreduce_is_horovods_own():
    slots = quiet({"communicator": "allreduce"}).adapter.slots
    assert all(slot.dense for slot in slots.values())
    slots = quiet({"communicator": "allreduce"}, dense_below=100).adapter.slots
    assert slots["bias"].dense and not slots["weight"].dense


def test_small_tensors_are_compressed():
    assert not any(slot.dense for slot in quiet(TOPK).adapter.slots.values())
    assert all(slot.dense for slot in quiet(TOPK, dense_below=10_000).adapter.slots.values())


def test_a_dictionary_that_says_all_is_taken_as_it_is():
    compressor, _ = made(
        {
            **TOPK,
            "deepreduce": "both",
            "index": "bloom",
            "policy": "p2",
            "fpr": 1e-3,
            "value": "polyfit",
        }
    )
    assert compressor.codec.sparsifier == dr.TopK(0.01) and compressor.memory == dr.Residual()
    assert compressor.codec.index == dr.Bloom(
        fpr=1e-3, policy="p2"
    ) and compressor.codec.value == dr.FitPoly(degree=5)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"index": "bloom", "policy": "conflict_sets"}, dr.Bloom()),
        ({"index": "bloom", "policy": "leftmostK"}, dr.Bloom(policy="leftmost")),
        ({"index": "bloom", "policy": "randomK"}, dr.Bloom(policy="p1")),
        ({"index": "bloom", "policy": "policy_zero"}, dr.Bloom(policy="p0")),
        ({"index": "bloom_cpu"}, dr.Bloom(policy="leftmost")),
        ({"index": "rle", "value": None}, dr.RLE()),
        ({"index": "huffman"}, dr.Huffman()),
        ({"index": "rice", "world_size": 4, "kernel": "cupy", "micro-benchmark": False}, dr.Rice()),
        ({"index": None}, dr.RawIndex()),
    ],
)
def test_indices(more, expected):
    compressor, texts = made({**TOPK, "deepreduce": "index", **more})
    assert compressor.codec.index == expected
    assert len(texts) == (getattr(expected, "policy", None) == "leftmost")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"value": "gzip"}, dr.Deflate()),
        ({"value": "polyfit", "poly_degree": 3, "sort": False}, dr.FitPoly(degree=3)),
        ({"value": "polyfit_cpu", "index": None}, dr.FitPoly(degree=5)),
        ({"value": "qsgd"}, dr.QSGD(bits=8, bucket=512, norm="l2")),
        (
            {"value": "qsgd", "quantum_num": 7, "bucket_size": 64},
            dr.QSGD(bits=4, bucket=64, norm="l2"),
        ),
        ({"value": "qsgd", "quantum_num": 1, "memory": "none"}, dr.QSGD(bits=2, norm="l2")),
        ({"value": "qsgd", "quantum_bits": 2, "memory": "none"}, dr.QSGD(bits=2)),
        ({"value": "quantile", "buckets": 2}, dr.Quantile(buckets=2)),
        ({"value": "lloyd_max"}, dr.LloydMax(bits=2)),
        ({"value": "lloyd_max", "bits": 1}, dr.LloydMax(bits=1)),
        ({"value": "doubleexp"}, dr.FitDExp()),
    ],
)
def test_values(more, expected):
    compressor, texts = made({**TOPK, "deepreduce": "value", **more})
    assert compressor.codec.value == expected
    assert [text.split(": ")[2] for text in texts] == [f"value {more['value']}"] * (
        expected in (dr.FitPoly(degree=3), dr.FitPoly(degree=5))
    )


@pytest.mark.parametrize(
    ("settings", "sparsifier", "value", "words"),
    [
        ({"compressor": "fp16"}, dr.NoneSparsifier(), dr.Float16(), None),
        (
            {"compressor": "dgc", "compress_ratio": 0.1},
            dr.TopK(0.1),
            dr.RawValue(),
            "sends exactly the largest compress_ratio of the elements",
        ),
        (
            {"compressor": "qsgd"},
            dr.NoneSparsifier(),
            dr.QSGD(bits=8, bucket=128, norm="l2"),
            "one L2 norm for each bucket_size values",
        ),
        (
            {"compressor": "qsgd_cuda", "bucket_size": 256},
            dr.NoneSparsifier(),
            dr.QSGD(bits=8, bucket=256, norm="l2"),
            "L2 norm",
        ),
        (
            {"compressor": "sketch"},
            dr.NoneSparsifier(),
            dr.Quantile(buckets=64),
            "negative values and other values",
        ),
        ({"compressor": "topk", "compress_ratio": 1}, dr.TopK(1.0), dr.RawValue(), None),
        (
            {"compressor": "topk", "compress_ratio": 0.1, "warmup_steps": 9},
            dr.TopK(0.1, warmup_steps=9),
            dr.RawValue(),
            None,
        ),
    ],
)
def test_compressors(settings, sparsifier, value, words):
    compressor, texts = made({**settings, "communicator": "broadcast"})
    assert compressor.codec.sparsifier == sparsifier and compressor.codec.value == value
    assert compressor.communicator == dr.Allgather()
    assert len(texts) == (words is not None) and all(words in text for text in texts)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"communicator": "split_allgather", "dense": 4}, dr.SplitAllgather(dense=4)),
        ({"communicator": "split_allgather", "dense": None}, dr.SplitAllgather(dense=None)),
        ({"communicator": "recursive_doubling"}, dr.RecursiveDoubling()),
        ({"communicator": "gtopk", "form": "tree"}, dr.GTopK(form="tree")),
        ({"communicator": "cltk", "compressor": "chunktopk", "memory": "low_pass"}, dr.CLTK()),
        ({"communicator": "shared_random_k", "compressor": "randomk"}, dr.SharedRandomK()),
        ({"communicator": "allreduce", "compressor": "randomk"}, dr.SharedRandomK()),
    ],
)
def test_communicators(settings, expected):
    assert (
        quiet({**TOPK, **settings} if "compressor" not in settings else settings).communicator
        == expected
    )


def test_auto_by_name():
    assert isinstance(quiet({**TOPK, "communicator": "auto"}).communicator, dr.Auto)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compressor": "topq"}, "compressor: expected one of topk, .*, got 'topq'$"),
        (
            {**TOPK, "deepreduce": "all"},
            "deepreduce: expected index, value, both or None, got 'all'",
        ),
        ({**TOPK, "deepreduce": "index", "policy": "p9"}, "policy: expected one of .*, got 'p9'"),
        (
            {**TOPK, "deepreduce": "index", "policy": ["p0"]},
            r"policy: expected one of .*, got \['p0'",
        ),
        ({"compressor": "topk", "ratio": 0.01}, r"got ratio; did you mean compress_ratio\?$"),
        (
            {**TOPK, "treshold": 0.5, 3: 1},
            r"names of settings, got treshold, 3; did you mean threshold\?$",
        ),
        (
            {**TOPK, "layers": {"w*": {"ratio": 0.1}}},
            r"names of settings, got ratio; did you mean compress_ratio\?$",
        ),
        ({**TOPK, "index": "rice"}, "got also index$"),
        ({**TOPK, "bloom_fpr": 0.1}, "got bloom_fpr; for bloom_fpr write 'fpr'"),
        ({**TOPK, "communicator": "gtopk", "dense": 4}, "got also dense"),
        (
            {**TOPK, "communicator": "shared_random_k"},
            "SharedRandomK: expected the sparsifier RandomK",
        ),
        (
            {"compressor": "topk"},
            "got allreduce, the default, which needs .* write 'communicator': 'allgather'",
        ),
        ({**TOPK, "communicator": "allreduce"}, "got allreduce, which needs the same indices"),
        (
            {**TOPK, "communicator": "cltk", "deepreduce": "value"},
            "got cltk, which does not use it",
        ),
        ({"deepreduce": "index", **GATHERED}, "compressor: expected one that selects elements"),
        (
            {"compressor": "fp16", "deepreduce": "value", **GATHERED},
            "deepreduce: expected None with the compressor fp16",
        ),
        ({**TOPK, "compress_ratio": 30}, r"compress_ratio: expected a number in \(0, 1\], got 30"),
        ({**TOPK, "warmup_steps": -1}, "TopK warmup_steps: expected an integer of at least 0"),
        ({**TOPK, "compressor": "randomk", "warmup_steps": 50}, "got also warmup_steps"),
        (
            {**TOPK, "deepreduce": "value", "value": "lloyd_max", "bits": 5},
            "LloydMax bits: expected an integer of 1 to 4, got 5",
        ),
        ({**TOPK, "deepreduce": "value", "value": "qsgd", "bits": 4}, "got also bits"),
        (
            {**TOPK, "deepreduce": "value", "value": "qsgd", "quantum_num": 256},
            "quantum_num: expected an integer of 1 to 127, .*got 256; write 127",
        ),
        (
            {**TOPK, "deepreduce": "value", "value": "qsgd", "quantum_num": 7, "quantum_bits": 4},
            "got also quantum_num",
        ),
        ({**TOPK, "deepreduce": "value", "sort": True}, "sort: expected False"),
        (
            {**TOPK, "memory": "dgc", "gradient_clipping": True},
            "gradient_clipping: expected False, got True; clip",
        ),
        (
            {"compressor": "SKCompressCPU", "sparsifier": "topk", **GATHERED},
            "num_quantiles: expected a value",
        ),
        (
            {"compressor": "SKCompressCPU", "sparsifier": "dgc", "num_quantiles": 9, **GATHERED},
            "sparsifier: expected one of topk, .*, got 'dgc'",
        ),
        ('{"compressor": "topk"}', "params: expected a dictionary of settings, got str"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(dr.InvalidArgumentError, match=message):
        dr.from_params(settings, parameters=named())


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        (setting, name)
        for setting, choices in params_table.CHOICES.items()
        for name, choice in choices.items()
        if choice.make is None
    ],
)
def test_what_has_no_equal_says_what_to_write(setting, name):
    """The settings that the message suggests are accepted."""
    with pytest.raises(
        dr.InvalidArgumentError,
        match=f"{setting}: expected one of .*, got '{name}', which has no equivalent here: .*",
    ) as caught:
        dr.from_params({**TOPK, setting: name}, named())
    advised = re.findall(
        r"'(\w+)': ('\w+'|[\d.]+)", str(caught.value).split("no equivalent here: ")[1]
    )
    assert advised
    made(
        {
            **(GATHERED if setting == "compressor" else TOPK),
            **{key: ast.literal_eval(given) for key, given in advised},
        }
    )


# --- docs/migration.md ---


def table_under(heading):
    """Return the rows of the table under a heading, as lists of cells."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in row.strip("|").split(" | ")]
        for row in section.splitlines()
        if row.startswith("| `")
    ]
    assert rows, heading
    return rows


@pytest.mark.parametrize("setting", params_table.CHOICES)
def test_the_page_has_every_value(setting):
    """Every value is listed under its setting, with its equivalent or without one."""
    rows = {
        name: cells
        for *names, cells in (
            (*re.findall(r"`(\w+)`", cells[0]), cells) for cells in table_under(setting)
        )
        for name in names
    }
    choices = params_table.CHOICES[setting]
    assert set(rows) == set(choices)
    for name, choice in choices.items():
        cells = rows[name]
        assert (cells[1] == "no equal") == (choice.make is None), name
        if choice.make is not None:
            settings = (
                {"sparsifier": "threshold", "num_quantiles": 128} if name.startswith("SK") else {}
            )
            stages = choice.make(_Settings(settings))
            for stage in stages.values() if isinstance(stages, dict) else [stages]:
                assert type(stage).__name__ in cells[1], name
        if choice.differs:
            assert cells[2], name


def test_the_page_has_the_defaults():
    shown = {
        name: ast.literal_eval(default)
        for name, default in (
            re.findall(r"`([^`]+)`", cells[0] + cells[1]) for cells in table_under("Defaults")
        )
    }
    assert shown == {name: params_table.DEFAULTS[name] for name in shown}
    assert set(shown) == set(DEFAULTS) | {"fpr"}


def test_the_page_has_the_settings_without_effect():
    assert {cells[0].strip("`") for cells in table_under("Settings without effect")} == set(
        params_table.WITHOUT_EFFECT
    )


def test_the_pages_dictionaries_are_accepted():
    """The last one has the default of Compressor for large tensors, and sends others as it says."""
    text = PAGE.read_text()
    found = re.findall(r"dr\.from_params\(\s*(\{.*?\})", text, re.DOTALL)
    *others, last = map(ast.literal_eval, found)
    for params in others:
        quiet(params)
    (dense_below,) = re.findall(r"dense_below=(\d+),\n\)", text)
    compressor = quiet(last, dense_below=int(dense_below))
    default = dr.Compressor(parameters=named(), dense_below=int(dense_below))
    assert compressor.communicator == default.communicator
    assert compressor.policies == default.policies

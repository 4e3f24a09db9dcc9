"""Test the handshake of compressors: whatever ranks receive, all raise an error or none does."""

import json
import warnings
import weakref

import numpy as np
import pytest
from threaded_ranks import Group, ThreadedTransport, on_all

from deepreduce_hvd.coordination import handshake, handshake_messages
from deepreduce_hvd.coordination.compared_settings import Setting, warns_first_rank
from deepreduce_hvd.errors import CorruptPayloadError, InvalidArgumentError


@pytest.fixture(autouse=True)
def no_others(monkeypatch):
    """Remove compressors of other tests that still wait for a handshake."""
    monkeypatch.setattr(handshake, "_adapters", weakref.WeakSet())
    monkeypatch.setattr(handshake, "_under_way", {})


class Adapter:
    """The adapter of a compressor with these settings on one rank."""

    elastic = None

    def __init__(self, transport, number, **settings):
        self.transport = transport
        self.compressor = self
        self.number = number
        self.settings = [Setting(name, value) for name, value in settings.items()]
        handshake.register(self)

    def describe(self, with_steps):
        return (
            self.settings if with_steps else [one for one in self.settings if one.name != "steps"]
        )


def outcomes(*ranks, transport=ThreadedTransport, **options):
    """Return the result of agree on each rank, each with one compressor with the given settings."""
    group = Group(len(ranks))
    adapters = [
        Adapter(transport(group, rank), 0, **settings) for rank, settings in enumerate(ranks)
    ]
    return on_all(
        group, [lambda adapter=adapter: handshake.agree(adapter, **options) for adapter in adapters]
    ), adapters


def expect_all(kind, message, raised):
    assert {type(error) for error in raised} == {kind}, raised
    assert len({str(error) for error in raised}) == 1
    assert message in str(raised[0]), raised[0]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_equal_settings(size):
    raised, adapters = outcomes(*[{"seed": "3", "parameters": ["a (3,)", "b ()"]}] * size)
    assert raised == [None] * size
    assert all(adapter.agreed for adapter in adapters)


def test_what_differs_is_named_with_the_ranks_that_have_it():
    same = {"seed": "3", "dense_below": "1024"}
    raised, adapters = outcomes(same, {**same, "dense_below": "512"}, same)
    expect_all(
        InvalidArgumentError,
        "at the same step, got dense_below=1024 on ranks 0, 2 and 512 on rank 1; give every rank",
        raised,
    )
    assert not any(adapter.agreed for adapter in adapters)


@pytest.mark.parametrize(
    ("lines", "other", "message"),
    [
        (
            ["a (3,)", "b ()"],
            ["a (3,)", "c ()"],
            "parameters, number 1=b () on rank 0 and c () on rank 1",
        ),
        (
            ["a (3,)", "b ()"],
            ["a (3,)"],
            "parameters, number 1=b () on rank 0 and nothing on rank 1",
        ),
        ([], ["a (3,)"], "parameters, number 0=nothing on rank 0 and a (3,) on rank 1"),
        (
            ["x" * 2000] * 3000,
            ["x" * 2000] * 2999 + ["y"],
            f"parameters, number 2999={'x' * 300}\u2026 on rank 0 and y on rank 1",
        ),
    ],
)
def test_the_first_line_that_differs_is_named(lines, other, message):
    raised, _ = outcomes({"parameters": lines}, {"parameters": other})
    expect_all(InvalidArgumentError, message, raised)


def test_of_many_differences_the_settings_come_first():
    raised, _ = outcomes(
        *[
            {**{f"setting{number}": str(rank) for number in range(5)}, "names": [str(rank)]}
            for rank in range(2)
        ]
    )
    expect_all(
        InvalidArgumentError, "setting2=0 on rank 0 and 1 on rank 1 (and 2 more); give", raised
    )
    assert "names" not in str(raised[0])


def test_a_setting_that_another_version_lacks():
    raised, _ = outcomes({"seed": "3", "new": "1"}, {"seed": "3"})
    expect_all(InvalidArgumentError, "new=1 on rank 0 and nothing on rank 1", raised)


def test_a_setting_that_may_differ_is_warned_of_on_the_first_rank():
    def adapters_of(*values, seeds=(3, 3, 3)):
        group = Group(len(values))
        adapters = [
            Adapter(ThreadedTransport(group, rank), 0, seed=str(seeds[rank]))
            for rank in range(len(values))
        ]
        for adapter, value in zip(adapters, values):
            warns = warns_first_rank("{ranks} began with others", adapter.transport)
            adapter.settings.append(Setting("values", value, warns))
        return group, adapters

    def warned_of(group, adapters):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            raised = on_all(group, [lambda one=one: handshake.agree(one) for one in adapters])
        return raised, [str(one.message) for one in caught]

    for values, expected in (
        ([["a 1"], ["a 2"], ["a 2"]], ["deepreduce_hvd: ranks 1, 2 began with others"]),
        ([["a 1"], ["a 1"], ["a 2"]], ["deepreduce_hvd: rank 2 began with others"]),
        ([["a 1"], ["a 1"], ["a 1"]], []),
    ):
        group, adapters = adapters_of(*values)
        assert warned_of(group, adapters) == ([None] * 3, expected)
        assert all(adapter.agreed for adapter in adapters)
    raised, texts = warned_of(*adapters_of("1", "2", "2", seeds=(3, 3, 4)))
    expect_all(InvalidArgumentError, "got seed=3 on ranks 0, 1 and 4 on rank 2;", raised)
    assert texts == []


def test_many_ranks_are_not_all_listed():
    raised, _ = outcomes(*[{"seed": str(int(rank == 3))} for rank in range(20)])
    shown = ", ".join(str(rank) for rank in range(17) if rank != 3)
    expect_all(
        InvalidArgumentError, f"seed=0 on ranks {shown} and 3 others and 1 on rank 3", raised
    )


@pytest.mark.parametrize("text", ["line\nbreak \x1b[31m", "half a pair \ud83d", "四"])
def test_texts_of_any_kind(text):
    assert outcomes({"codec": text}, {"codec": text})[0] == [None] * 2
    raised, _ = outcomes({"codec": text}, {"codec": "Codec"})
    expect_all(InvalidArgumentError, "Codec on rank 1", raised)
    assert str(raised[0]).isascii() and "\n" not in str(raised[0])


def test_steps_are_left_out_where_they_are_made_equal_afterwards():
    expect_all(
        InvalidArgumentError,
        "steps, number 0=a at step 1 on rank 0",
        outcomes({"steps": ["a at step 1"]}, {"steps": ["a at step 2"]})[0],
    )
    assert (
        outcomes({"steps": ["a at step 1"]}, {"steps": ["a at step 2"]}, with_steps=False)[0]
        == [None] * 2
    )


# --- several compressors ---


def several(*tables):
    """Return the adapters of each rank, from {number: settings} of all adapters that wait."""
    group = Group(len(tables))
    return group, [
        {
            number: Adapter(ThreadedTransport(group, rank), number, **one)
            for number, one in table.items()
        }
        for rank, table in enumerate(tables)
    ]


def test_ranks_may_begin_with_different_compressors():
    group, ranks = several(
        {0: {"seed": "3"}, 1: {"seed": "4"}}, {0: {"seed": "3"}, 1: {"seed": "4"}}
    )
    assert (
        on_all(group, [lambda rank=rank: handshake.agree(ranks[rank][rank]) for rank in range(2)])
        == [None] * 2
    )
    assert all(adapter.agreed for rank in ranks for adapter in rank.values())


def test_a_difference_of_compressors_that_nobody_uses_can_wait():
    group, ranks = several(
        {0: {"seed": "3"}, 1: {"seed": "4"}}, {0: {"seed": "3"}, 1: {"seed": "5"}}
    )
    assert (
        on_all(group, [lambda rank=rank: handshake.agree(ranks[rank][0]) for rank in range(2)])
        == [None] * 2
    )
    assert not ranks[0][1].agreed
    raised = on_all(group, [lambda rank=rank: handshake.agree(ranks[rank][1]) for rank in range(2)])
    expect_all(InvalidArgumentError, "seed=4 on rank 0 and 5 on rank 1", raised)


def test_a_compressor_that_one_rank_lacks():
    group, ranks = several({0: {"seed": "3"}, 1: {"seed": "3"}}, {0: {"seed": "3"}})
    raised = on_all(
        group, [lambda: handshake.agree(ranks[0][1]), lambda: handshake.agree(ranks[1][0])]
    )
    expect_all(
        InvalidArgumentError,
        (
            "a compressor (the 2nd of its process set) that does not exist or was used before "
            "on rank 1;"
        ),
        raised,
    )


def test_again_when_ranks_have_changed():
    group, ranks = several({0: {"seed": "3"}}, {0: {"seed": "3"}})
    for _ in range(2):
        assert (
            on_all(group, [lambda rank=rank: handshake.agree(ranks[rank][0]) for rank in range(2)])
            == [None] * 2
        )
        for rank in range(2):
            handshake.forget(ranks[rank][0])
            assert not ranks[rank][0].agreed


# --- messages that no rank sends ---


def framed(text):
    body = text if isinstance(text, bytes) else text.encode()
    return handshake_messages._FRAME.pack(b"DRHS", len(body)) + body


@pytest.mark.parametrize(
    "message",
    [
        b"", b"DR", b"DRHS\xff\xff\xff\xff", b"DRHX\0\0\0\0", framed("{}") + b"x", framed(""),
        framed("{}"), framed("[1]"), framed("[true, {}]"),
        framed('["0", {}]'), framed('[0, {"a": []}]'), framed('[0, {"0": 7}]'),
        framed('[0, {"0": [["seed", "x"]]}]'), framed('[0, {"0": [7]}]'),
        framed(b"\xff\xfe"), framed("[" * 100_000), framed("[0, " + "9" * 5000 + "]"),
        framed("null"),
    ],
)  # fmt: skip
def test_bytes_that_no_rank_sends(message):
    class Lying(ThreadedTransport):
        def allgather(self, array, name):
            return super().allgather(
                np.frombuffer(message, np.uint8) if self.rank == 1 else array, name
            )

    raised, _ = outcomes({"seed": "3"}, {"seed": "3"}, {"seed": "3"}, transport=Lying)
    assert {type(error) for error in raised} == {CorruptPayloadError}, raised
    assert all(len(str(error)) < 1000 for error in raised)


def test_what_travels_is_small():
    """Only a digest is sent, however many parameters there are."""
    sent = []

    class Counting(ThreadedTransport):
        def allgather(self, array, name):
            sent.append(array.size)
            return super().allgather(array, name)

    assert (
        outcomes(
            *[{"seed": "3", "parameters": [f"layer{number} (3,)" for number in range(10000)]}] * 2,
            transport=Counting,
        )[0]
        == [None] * 2
    )
    assert len(sent) == 2 and max(sent) < 400
    json.loads(handshake_messages.pack(0, {0: [Setting("seed", "3")]}))


class Pending(ThreadedTransport):
    """Counts gathers, which never end."""

    started = 0

    def allgather(self, array, name):
        self.started += 1

    def test(self, handle):
        return False


def test_a_rank_takes_part_only_in_handshakes_that_others_wait_in():
    adapter = Adapter(Pending(Group(2), 0), 0, seed="3")
    transport = adapter.transport
    handshake.take_part(Pending, lambda name: name != handshake.name_of(adapter))
    handshake.take_part(ThreadedTransport, lambda name: True)
    adapter.elastic = object()
    handshake.take_part(Pending, lambda name: True)
    adapter.elastic = None
    assert transport.started == 0
    for _ in range(2):  # the gather starts once, even if it has not ended
        handshake.take_part(Pending, lambda name: name == handshake.name_of(adapter))
        assert transport.started == 1

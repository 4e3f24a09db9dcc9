"""Shared by the scenarios in which ranks differ."""

#: beginning of the message about different settings
SAME = "expected the same compressor configuration on every rank, at the same step, got "


def on_last(hvd, other, usual):
    """Return ``other`` on the last rank, ``usual`` on the other ranks."""
    return other if hvd.rank() == hvd.size() - 1 else usual


def before_last(hvd):
    """Return the text with which a message names all ranks but the last."""
    ranks = list(range(hvd.size() - 1))
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

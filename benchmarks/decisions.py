"""Wait for the decisions of ``schedule="auto"``."""

#: maximum number of steps until a plan is chosen
MOST = 250


def scheduler_of(compressor):
    """Return what chooses the plans of a compressor, on PyTorch or on TensorFlow."""
    adapter = compressor.adapter
    return getattr(adapter, "auto", adapter).scheduler


def has_decided(compressor):
    """Return whether all plans had their turns, and one of them is used."""
    scheduler = scheduler_of(compressor)
    return bool(scheduler.trials) and compressor.plan is not None and not scheduler.is_trying


def decide(compressor, step):
    """Make steps until a plan is chosen, and keep this plan from then on.

    Otherwise ``"auto"`` would take the steps of other rows for its own.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        step: function of the number of a step that makes it.

    Returns:
        Number of steps.
    """
    for number in range(MOST):
        if has_decided(compressor):
            scheduler_of(compressor).step_ends = lambda *_: None
            return number
        step(number)
    raise RuntimeError(f"auto: expected a plan within {MOST} steps, got none")

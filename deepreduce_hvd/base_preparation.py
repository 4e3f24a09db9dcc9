"""prepare: set an optimizer up for error feedback.

Error feedback delays what it does not send, often by about 1 / density steps. So each sent value
already averages past gradients. Momentum in the optimizer would average them once more, which costs
accuracy. So compressed parameters are stepped without momentum, at the same step size.
"""

from deepreduce_hvd.errors import InvalidArgumentError
from deepreduce_hvd.stages.sparsifiers import TopK


def undo(optimizer, prepared, wrapped):
    """Give a prepared optimizer its own class back.

    Args:
        optimizer: the optimizer, prepared or not.
        prepared: whether it is prepared.
        wrapped: whether it is a ``hvd.DistributedOptimizer``, which is refused.
    """
    if wrapped:
        raise InvalidArgumentError(
            "prepare: expected the optimizer before hvd.DistributedOptimizer wraps it, got "
            f"hvd.DistributedOptimizer({type(optimizer).__name__}); call prepare first"
        )
    if prepared:
        optimizer.__class__ = optimizer.original_class


def expect_one_compressor(left):
    """Raise InvalidArgumentError if a prepared optimizer gets a second compressor.

    Args:
        left: names of the parameters that have a memory in the first one, and are not in the other.
    """
    if left:
        raise InvalidArgumentError(
            "prepare: expected one compressor for all parameters of the optimizer, got a second"
            f" one without {left[0]} and {len(left) - 1} more; use one optimizer per compressor, or"
            " call dr.prepare(optimizer, None) before"
        )


def warning(optimizer, name, momentum, memory, when, prepared="optimizer", instead=None):
    """Return the warning for an optimizer with momentum that was not prepared.

    Args:
        optimizer: name of the optimizer's class.
        name: name of its momentum setting.
        momentum: value of that setting.
        memory: the memory of a parameter that it steps.
        when: where to call prepare, such as ``before hvd.DistributedOptimizer``.
        prepared: what the user can prepare in its place, as code.
        instead: what to do with an optimizer that cannot be prepared, or None.
    """
    advice = instead or (f"write optimizer = dr.prepare({prepared}, compressor) {when}")
    return (
        f"{optimizer} has {name} {momentum:g} for compressed parameters, which costs accuracy"
        f" together with error feedback ({memory!r}); {advice}"
    )


def _delays(policy):
    return policy is not None and policy.delays


def momentum_of_memory(memory):
    """Return the momentum of a memory, 0 for most of them."""
    return getattr(memory, "momentum", 0.0)


def momentum_in_use(adapter, slot, memory):
    """Return the momentum of a slot's memory, which one rank alone does not use: then 0."""
    own = momentum_of_memory(memory)
    return 0.0 if own and adapter.sends_nothing(slot) else own


class Preparation:
    """What changes in an optimizer's steps, in any framework.

    Args:
        compressor: the :class:`~deepreduce_hvd.Compressor`.
        policy_of: function of a parameter that returns its
            :class:`~deepreduce_hvd.planning.policies.Policy`, or None if the compressor does not
            have it.
        normalizes: whether the optimizer divides by the size of recent gradients before it applies
            its momentum, as RMSprop.
        decouples: whether its weight decay is not added to gradients, as with AdamW.

    Attributes:
        checked: whether it is known that the compressor gets the optimizer's gradients.
    """

    def __init__(self, compressor, policy_of, normalizes=False, decouples=False):
        self.compressor = compressor
        self.policy_of = policy_of
        self._normalizes = normalizes
        self._decouples = decouples
        self.checked = False

    def compresses(self, parameter):
        """Return whether parts of a parameter's gradients are sent in later steps."""
        return _delays(self.policy_of(parameter))

    def learning_rate_factor(self, own, momentum, dampening=0.0):
        """Return the factor of the learning rate that keeps the step size without momentum.

        With momentum m, a gradient eventually moves a parameter by lr (1 - dampening) / (1 - m). A
        memory with momentum of its own, n, already multiplies what is sent by 1 / (1 - n), unless
        the optimizer normalizes it.

        Args:
            own: momentum of the memory, see :func:`momentum_of_memory`.
            momentum: momentum of the optimizer, which is replaced by 0.
            dampening: dampening of the momentum.
        """
        if momentum >= 1:
            raise InvalidArgumentError(f"prepare: expected a momentum below 1, got {momentum}")
        return self.unchecked_factor(own, momentum, dampening)

    def unchecked_factor(self, own, momentum, dampening=0.0):
        """Return :meth:`learning_rate_factor`, also for a momentum that is a tensor."""
        return (1 - dampening) * (1 - (0.0 if self._normalizes else own)) / (1 - momentum)

    def factors(self, own, momentum, dampening=0.0, scales_learning_rate=True, decays=False):
        """Return the factors of the learning rate and of the weight decay of a delayed gradient.

        A memory with momentum n multiplies what is sent by 1 / (1 - n). A decay that is added to
        the gradient is added after that, so it needs the same factor, also if the optimizer has no
        momentum.

        Args:
            own, momentum, dampening: as for :meth:`learning_rate_factor`.
            scales_learning_rate: whether the step size depends on the momentum.
            decays: whether there is a weight decay that is added to gradients.

        Returns:
            The factors, or None if nothing changes.
        """
        rate = 1.0
        if momentum and scales_learning_rate:
            rate = self.learning_rate_factor(own, momentum, dampening)
        decay = 1 / (1 - own) if decays and not self._decouples else 1.0
        return (rate, decay) if momentum or decay != 1 else None

    def describe(self, optimizer, what, parameters, with_hint):
        """Return sentences on what changes.

        Args:
            optimizer: name of the optimizer's class.
            what: name of its momentum.
            parameters: (momentum, factors) of each parameter. The factors are what :meth:`factors`
                returned, or None for a gradient that is not delayed.
            with_hint: whether the optimizer needs a higher density in its first steps, as Adam.
        """
        changes: dict[tuple[float, float, float], int] = {}
        for momentum, factors in parameters:
            if factors is not None:
                key = (momentum, *factors)
                changes[key] = changes.get(key, 0) + 1
        if not changes:
            return (
                f"{optimizer}: nothing changes, because it has no momentum, or no gradient is sent"
                " with a delay."
            )
        texts = []
        for (momentum, rate, decay), number in changes.items():
            settings = [
                *([f"{what} is 0 instead of {momentum:g}"] if momentum else []),
                *([f"the learning rate is multiplied by {rate:.4g}"] if rate != 1 else []),
                *([f"the weight decay is multiplied by {decay:.4g}"] if decay != 1 else []),
            ]
            texts.append(f"for {number} of {len(parameters)} parameters, {', and '.join(settings)}")
        whose = "its gradient" if sum(changes.values()) == 1 else "their gradients"
        has_momentum = any(momentum for momentum, _, _ in changes)
        hint = self._hint() if with_hint and has_momentum else ""
        if has_momentum and self._sends_nothing():
            hint += " This job of one process compresses nothing: leave out dr.prepare."
        return (
            f"{optimizer}: {'; '.join(texts)}. Only a part of {whose} is sent in each step.{hint}"
        )

    def _sends_nothing(self):
        """Return whether this job has one process, which exchanges no gradients."""
        adapter = self.compressor.adapter
        return all(adapter.sends_nothing(slot) for slot in adapter.slots.values())

    def _hint(self):
        """Return what an optimizer such as Adam also needs: a higher density in the first steps."""
        for policy in self.compressor.policies.values():
            sparsifier = policy.codec.sparsifier if policy.delays else None
            if (
                isinstance(sparsifier, TopK)
                and not sparsifier.warmup_steps
                and sparsifier.ratio is not None
                and sparsifier.ratio < sparsifier.warmup_ratio
            ):
                return (
                    " The first steps need a higher density:"
                    f" dr.TopK({sparsifier.ratio:g}, warmup_steps=50)."
                )
        return ""

"""From which step of each optimizer on a new layout is used."""

import collections


class LayoutChanges:
    """The layouts of the steps of several optimizers.

    When the layout changes, the next step of an optimizer may have begun on some ranks only. On the
    others, backward has made no gradient for it. All ranks must use the same layout in this step.
    So a new layout begins with the first step that no rank has begun.

    Args:
        layout: the :class:`~deepreduce_hvd.planning.layout.Layout` of the first steps.
    """

    def __init__(self, layout):
        #: name of the first parameter of an optimizer -> number of its steps that have begun
        self._begun: collections.Counter = collections.Counter()
        #: ({name: first step}, layout), the newest last
        self._changes: list[tuple[dict[str, int], object]] = [({}, layout)]

    def begun(self, names):
        """Return how many steps have begun of the optimizers whose first parameters these are."""
        return [self._begun[name] for name in names]

    def change(self, layout, names, begun):
        """Use another layout in the steps that no rank has begun.

        Args:
            layout: the new layout.
            names: names of all parameters.
            begun: what :meth:`begun` returns for them, the largest of all ranks.
        """
        first = {name: int(steps) + 1 for name, steps in zip(names, begun) if steps}
        self._changes.append((first, layout))
        while len(self._changes) > 1 and self._is_used_everywhere(self._changes[1][0]):
            del self._changes[0]

    def _is_used_everywhere(self, first):
        return all(self._begun[name] + 1 >= number for name, number in first.items())

    def begin(self, name):
        """Begin a step of an optimizer, whose first parameter has this name; return its layout."""
        self._begun[name] += 1
        number = self._begun[name]
        return next(
            layout for first, layout in reversed(self._changes) if number >= first.get(name, 1)
        )

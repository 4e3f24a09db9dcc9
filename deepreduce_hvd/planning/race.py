"""Find the plan with the shortest steps: plans take turns, and slow ones drop out.

Step times vary because of other programs and the network, and such a disturbance lasts for many
steps. So plans take turns: in each round, each remaining plan is used for some steps.
"""

from collections.abc import Sequence

#: rounds at most
_ROUNDS = 5
#: after each round, plans whose steps take longer than this many times the shortest drop out
_LIMITS = (2.0, 1.3, 1.15, 1.1)
#: A plan that was not tried yet is left out if its predicted step is longer than this many times
#: the shortest measured one. Predictions are often wrong by less than that.
_HOPELESS = 2.0
#: of the plans within this ratio of the shortest steps, the one that sends most is used
_EQUAL = 1.01


class Race:
    """The turns of some plans.

    Args:
        predicted: predicted seconds of a step of each plan. The plan with the first turn comes
            first.

    Attributes:
        current: number of the plan that has its turn; None at the end.
        blocks: measured seconds of a step in each turn of each plan.
    """

    def __init__(self, predicted: Sequence[float]) -> None:
        self._predicted = predicted
        self.blocks: list[list[float]] = [[] for _ in predicted]
        self._left = list(range(len(predicted)))
        self._queue = list(self._left)
        self._round = 0
        self.current: int | None = self._queue.pop(0)

    @property
    def tried(self) -> list[int]:
        """Numbers of the plans that had a turn."""
        return [number for number, block in enumerate(self.blocks) if block]

    def seconds(self, number: int) -> float:
        """Return the seconds of a step with a plan that had a turn.

        This is the mean of its turns, without the longest one if there are three or more, because
        a disturbance makes some steps much longer.
        """
        turns = sorted(self.blocks[number])
        if len(turns) >= 3:
            turns.pop()
        return sum(turns) / len(turns)

    def turn_ends(self, seconds: float) -> None:
        """Record the mean seconds of a step in the turn that ends, and choose the next plan."""
        assert self.current is not None
        self.blocks[self.current].append(seconds)
        self._queue = [number for number in self._queue if not self._is_hopeless(number)]
        if not self._queue:
            self._round_ends()
        self.current = self._queue.pop(0) if self._queue else None

    def _is_hopeless(self, number: int) -> bool:
        shortest = min(map(self.seconds, self.tried))
        return not self.blocks[number] and self._predicted[number] > _HOPELESS * shortest

    def _round_ends(self) -> None:
        self._left = self.tried if self._round == 0 else self._left
        self._round += 1
        if self._round == _ROUNDS:
            return
        limit = _LIMITS[self._round - 1] * min(map(self.seconds, self._left))
        self._left = [number for number in self._left if self.seconds(number) <= limit]
        if len(self._left) > 1:  # the other way round, so that no plan is always the first
            self._queue = self._left[:: -1 if self._round % 2 else 1]

    def winner(self, shares: Sequence[float]) -> int:
        """Return the number of the plan to use.

        Args:
            shares: share of the elements that one rank sends, for each plan. It decides between
                plans whose steps are equally long.
        """
        limit = _EQUAL * min(map(self.seconds, self._left))
        equal = [number for number in self._left if self.seconds(number) <= limit]
        return max(equal, key=lambda number: (shares[number], -number))

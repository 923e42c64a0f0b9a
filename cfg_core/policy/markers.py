"""Markers: whether the next token of a text is between its markers, as far as the text is known."""

from __future__ import annotations

from collections.abc import Sequence

from cfg_core.params.between import Between


class Markers:
    """The markers of one request, which are read in its output.

    is_inside: whether the token after those that were read is guided. At first, that is the one
        after the prompt.
    since: the number of output tokens at which the followers last began anew; 0 if they never do,
        or have not yet.
    """

    def __init__(self, between: Between, is_inside: bool) -> None:
        self._between = between
        self.since = self._read = 0
        self.is_inside = is_inside

    def read(self, output: Sequence[int]) -> None:
        """Read the tokens of the output that were not read yet. Tokens in flight are not in it."""
        for place in range(self._read, len(output)):
            if output[place] == self._between.start_token_id:
                self.is_inside = True
                if self._between.restart_negative:
                    self.since = place + 1
            elif output[place] == self._between.end_token_id:
                self.is_inside = False
        self._read = len(output)

    def unmarked(self, drafts: Sequence[int]) -> int:
        """How many of these drafts come before the first that is a marker, or is not known (-1).

        If they are accepted, all tokens of the step are inside, or all outside.
        """
        ends = (-1, self._between.start_token_id, self._between.end_token_id)
        return next((i for i, token in enumerate(drafts) if token in ends), len(drafts))

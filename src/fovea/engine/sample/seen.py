"""The distinct tokens of a sequence, for the repetition penalty."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor


class SeenTokens:
    """The distinct ids of a prompt and of the answer so far.

    Every token is read once. A set of the whole prompt for each new token would take milliseconds: a request
    with a long prompt would slow down the steps of all others.
    """

    def __init__(self, prompt: Seq[int], vocabulary: int, device: torch.device) -> None:
        """Read the prompt.

        vocabulary: number of ids that the model can choose. Larger ids of the prompt, which some models have
            for images, are left out: there is nothing to penalize.
        device: device of the returned ids.
        """
        self._known = bytearray(vocabulary)
        self._read = 0
        self._ids = torch.empty(0, dtype=torch.int64, device=device)
        self._add(prompt)

    def update(self, output: Seq[int]) -> Tensor:
        """Return all distinct ids, in the order of their first occurrence.

        output: the whole answer so far; it only grows from call to call.
        """
        self._add(output[self._read :])
        self._read = len(output)
        return self._ids

    def _add(self, tokens: Seq[int]) -> None:
        new = []
        for token in tokens:
            if token < len(self._known) and not self._known[token]:
                self._known[token] = 1
                new.append(token)
        if new:
            self._ids = torch.cat((self._ids, torch.tensor(new, device=self._ids.device)))

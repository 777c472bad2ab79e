"""The use of the server by one client since the server started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Totals:
    """Running totals of one client.

    requests: requests that count towards limits and have ended.
    refused: those of them that were answered with a status of 400 or above.
    prompt_tokens, completion_tokens: tokens of prompts, visual tokens included, and of answers.
    cached_tokens: prompt tokens whose KV was in the prefix cache, so that they were not computed.
    images: images and videos of requests that the engine has accepted.
    """

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    images: int = 0

    @property
    def computed_tokens(self) -> int:
        """Tokens that the engine has computed for the client: the measure of its share in the costs."""
        return self.prompt_tokens - self.cached_tokens + self.completion_tokens

    def count_end(self, *, refused: bool) -> None:
        """Count a request that has ended."""
        self.requests += 1
        self.refused += refused

"""The tokens of one generation, charged to its client.

An estimate is taken before the engine gets the request, so that many simultaneous requests cannot exceed a
limit together. It is replaced by the real usage at the end. A request whose client leaves, or whose timeout
runs out, has no usage. The limit is charged with the estimate or with what was generated, whichever is more:
otherwise a client that always leaves before the end would pay nothing. Totals, metrics and the access log get
the prompt and what was generated. A request that the engine refuses costs nothing.
"""

from __future__ import annotations

from fovea.core.errors import DeadlineExceeded, FoveaError
from fovea.core.types import ChatPrompt, Delta, GenerationRequest, Prompt, TextPart, TextPrompt, Usage
from fovea.server.clients import Caller

BYTES_PER_TOKEN = 4
"""Usual bytes of text per token."""
IMAGE_TOKENS = 256
"""Assumed tokens of an image or video of a request that ends without usage."""


class Charge:
    """The tokens of one generation.

    check: whether its client must have enough left. A request with several prompts is checked once, with the
        first of them; otherwise a request with more prompts than tokens per minute would never get through.

    media: images and videos of the prompt.

    Raises Overloaded on construction if its client has too few left.
    """

    def __init__(self, caller: Caller, request: GenerationRequest, *, check: bool = True) -> None:
        text, media = _prompt_size(request.prompt)
        answer = request.sampling.max_tokens or request.usual_tokens or 0
        self._caller = caller
        self._prompt_text = text // BYTES_PER_TOKEN
        self.media = media
        self._prompt = self._prompt_text + media * IMAGE_TOKENS
        self._generated = 0
        self._used: int | None = None
        self._estimate = 0 if request.encode_only else self._prompt_text + answer * request.sampling.n
        self._held = caller.client.hold_tokens(self._estimate, check=check)

    def add(self, delta: Delta) -> None:
        """Count a delta of the answer."""
        self._generated += len(delta.token_ids)
        self._prompt = delta.prompt_tokens or self._prompt
        if delta.usage is not None:
            usage = delta.usage
            self._used = max(usage.prompt, usage.image) + usage.completion
            self._count(max(usage.prompt, usage.image), usage.cached, usage.completion)

    def refuse(self, error: Exception) -> None:
        """Charge nothing if the engine refused the request before it began. error: the engine's error."""
        if isinstance(error, FoveaError) and not isinstance(error, DeadlineExceeded) and not self._generated:
            self._used = 0

    def settle(self) -> Usage | None:
        """Replace the estimate by the real usage. To be called once, at the end.

        Returns what a generation has used that did not reach its end; None: the engine has told it, or has
        refused the request.
        """
        used, cut = self._used, None
        if used is None:
            used = max(self._estimate, self._prompt_text + self._generated) + self.media * IMAGE_TOKENS
            cut = Usage(self._prompt, self._generated)
            self._count(self._prompt, 0, self._generated)
        self._caller.client.settle_tokens(self._held, used)
        return cut

    def _count(self, prompt: int, cached: int, completion: int) -> None:
        """Add the tokens and images of the generation to the request and to its client. To be called once."""
        self._caller.prompt_tokens += prompt
        self._caller.completion_tokens += completion
        totals = self._caller.client.totals
        totals.prompt_tokens += prompt
        totals.cached_tokens += cached
        totals.completion_tokens += completion
        totals.images += self.media


def _prompt_size(prompt: Prompt) -> tuple[int, int]:
    """Return the bytes of text of a prompt, and its number of images and videos."""
    if isinstance(prompt, ChatPrompt):
        parts = [part for message in prompt.messages for part in message.parts]
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        return _bytes(texts), len(parts) - len(texts)
    if isinstance(prompt, TextPrompt):
        return _bytes([prompt.text]), len(prompt.images)
    return len(prompt.ids) * BYTES_PER_TOKEN, 0


def _bytes(texts: list[str]) -> int:
    return sum(len(text.encode("utf-8", "replace")) for text in texts)

"""The values that server and engine exchange: prompts, requests, deltas and answers.

A server makes a `GenerationRequest`; an engine answers with deltas, which `AnswerBuilder` assembles into a
`Completion`. All are frozen values without tensors, and importing them imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fovea.core.constraints import Tool, ToolCall
from fovea.core.errors import InvalidRequest
from fovea.core.media import Image, ImageUse, PixelBudget, Video, VideoBudget, VisualTokens
from fovea.core.sampling import SamplingParams

MAX_SALT = 1024
"""Longest cache salt, in characters."""
MAX_PREDICTION = 2**18
"""Longest prediction of an answer, in characters. Searching a longer one could delay other requests."""
MAX_TIMEOUT = 10**9
"""Longest timeout, in seconds: thirty years."""
FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of text in a message."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image in a message, with the client's limits on its pixels and tokens."""

    image: Image
    budget: PixelBudget = PixelBudget()


@dataclass(frozen=True, slots=True)
class VideoPart:
    """A video in a message, with the client's limits on its frames and pixels."""

    video: Video
    budget: VideoBudget = VideoBudget()


Part = TextPart | ImagePart | VideoPart


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. Every turn may hold images and videos, anywhere among its text.

    calls: tool calls that an assistant's turn makes.
    call_id: the call whose result a turn of the role `tool` is.
    name: the tool that was called.
    reasoning: what the assistant thought before its text.
    """

    role: str
    parts: tuple[Part, ...]
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""
    reasoning: str = ""


def in_order_of_calls(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Order results of tools like the calls before them, and name the tool of each.

    Clients name the call whose result a message is. Most chat templates do not write that, so the model knows
    it by the order alone.
    """
    ordered: list[Message] = []
    calls: dict[str, tuple[int, str]] = {}
    for message in messages:
        if message.calls:
            calls = {call.id: (number, call.name) for number, call in enumerate(message.calls) if call.id}
        if message.role != "tool" or message.call_id not in calls:
            ordered.append(message)
            continue
        place, name = calls[message.call_id]
        at = len(ordered)
        while at and ordered[at - 1].role == "tool" and calls.get(ordered[at - 1].call_id, (-1,))[0] > place:
            at -= 1
        ordered.insert(at, replace(message, name=message.name or name))
    return tuple(ordered)


@dataclass(frozen=True, slots=True)
class TemplateInputs:
    """The inputs of a chat template beside the messages.

    tools: those that the model may call.
    arguments: further variables of the template, such as `enable_thinking`. Those that the template does not
        know have no effect.
    continues: the last message is not complete; the answer continues it.
    """

    tools: tuple[Tool, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, which the model's own chat template turns into text.

    visual: the request's wish for the visual tokens of all of its images, which their budgets repeat. It is
        checked also if the request has no image. None: the request names none.
    template: what the chat template gets beside the messages.
    """

    messages: tuple[Message, ...]
    visual: VisualTokens | None = None
    template: TemplateInputs = TemplateInputs()


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text without a chat template. Each of the model's image markers in it stands for the next image."""

    text: str
    images: tuple[ImagePart, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt of token ids."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """An image of a prompt that another engine has prepared.

    plan: the fields of its visual plan, as `engine.peers.plans` writes them.
    """

    image: Image
    plan: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A prompt that another engine has prepared: its token ids, and its images in their order.

    ids: (): the visual tokens of the images alone, for a request that only encodes them.
    """

    ids: tuple[int, ...]
    images: tuple[PlannedPart, ...] = ()


@dataclass(frozen=True, slots=True)
class Offering:
    """The results of a request that are offered to another engine as soon as they are computed.

    layout, road: name what both engines must have in common, see `engine.peers.layout`.
    first: tokens of the prompt whose keys and values the other engine has; those after them are offered.
        None: none are.
    outputs: numbers of the images whose encoder outputs are offered.
    """

    layout: str
    road: str
    first: int | None = None
    outputs: tuple[int, ...] = ()


Prompt = ChatPrompt | TextPrompt | TokenPrompt | PlannedPrompt
Client = tuple[str, str]
"""Name of a key, and of the client for whom a gateway with that key speaks."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request as the engine receives it.

    id: unique among the requests in flight.
    cache_salt: requests with different salts share no cache entry.
    timeout: seconds from arrival after which the request ends. None: no deadline of its own.
    encode_only: the images of the prompt are encoded and nothing is generated; the answer is empty. It ends
        with "length", because the model did not end it, and nothing failed.
    kv_keep: which keys and values are kept, see `engine.keep`; None: what the engine's setting says.
    prediction: text that the answer is likely to contain; "": none. It makes an answer that contains it
        faster, and changes none.
    speculate: whether the engine may expect tokens of the answer, so that a step verifies several. Tokens
        that the answer's format leaves no choice about are computed together in any case.
    cache_share: part of each cache of images that the entries of its client may fill, from 0 to 1.
    priority: smaller is served first, if the engine's policy uses priorities.
    usual_tokens: length limit of an answer when sampling.max_tokens is None; a smaller room in the context
        lowers it. None: an answer may fill the whole room.
    return_prompt_ids: the first delta holds the ids of the prompt.
    fetch_s: seconds spent to download images and videos and to read the images' headers, before the engine
        got the request.
    media_decode_s: seconds spent to decode images and to open videos, before the engine got the request.
    client: (name of the key, name of the tenant for whom a gateway sends with that key; "": none). Clients
        take turns where one could delay others.
    offering: its results that another engine gets; None: none.

    Raises InvalidRequest for values that clocks, queues and hashes cannot take.
    """

    id: str
    prompt: Prompt
    sampling: SamplingParams = SamplingParams()
    cache_salt: str = ""
    kv_keep: str | None = None
    prediction: str = ""
    speculate: bool = True
    cache_share: float = 1.0
    timeout: float | None = None
    encode_only: bool = False
    priority: int = 0
    usual_tokens: int | None = None
    return_prompt_ids: bool = False
    fetch_s: float = 0.0
    media_decode_s: float = 0.0
    client: Client = ("", "")
    offering: Offering | None = None

    def __post_init__(self) -> None:
        if self.timeout is not None and not abs(self.timeout) <= MAX_TIMEOUT:
            raise InvalidRequest(f"timeout must be at most {MAX_TIMEOUT} seconds", param="timeout")
        if not isinstance(self.priority, int):
            raise InvalidRequest(f"priority is {self.priority!r}; accepted: a whole number", param="priority")
        if len(self.cache_salt) > MAX_SALT or not _is_unicode(self.cache_salt):
            raise InvalidRequest(
                f"cache_salt takes Unicode text of up to {MAX_SALT} characters", param="cache_salt"
            )
        if not isinstance(self.prediction, str) or not _is_unicode(self.prediction):
            raise InvalidRequest(
                f"prediction is {self.prediction!r:.64}; accepted: Unicode text", param="prediction"
            )
        if len(self.prediction) > MAX_PREDICTION:
            raise InvalidRequest(
                f"prediction has {len(self.prediction)} characters; accepted: at most {MAX_PREDICTION}",
                param="prediction",
            )
        if not isinstance(self.speculate, bool):
            raise InvalidRequest(
                f"speculate is {self.speculate!r:.64}; accepted: true or false", param="speculate"
            )


def _is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which no hash can take."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The logprob of one token of an answer, with the most likely tokens of its position.

    text: the token's own bytes. Bytes of an incomplete character are surrogates (PEP 383, "surrogateescape").
    logprob: by the model, before temperature and penalties. None: of the first token of a prompt.
    top: (id, text, logprob) of the most likely tokens, most likely first.
    rank: of tokens of the prompt: 1 for the most likely one of its place; 0: not computed.
    offset: place in the text of the answer, or of the prompt, in characters. Tokens that are parts of one
        character all have its place. A token without text has the place of the next one.
    hidden: the text does not contain the token: a special token, or the one that ended the answer.
    """

    id: int
    text: str
    logprob: float | None
    top: tuple[tuple[int, str, float], ...] = ()
    rank: int = 0
    offset: int = 0
    hidden: bool = False


PromptLogprobs = tuple[TokenLogprob | None, ...]
"""One entry for each token of a prompt. None: the first token, and tokens of images."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of one request, by kind.

    prompt, completion: tokens of the prompt, and of all choices.
    cached: prompt tokens whose KV was in the prefix cache.
    image: prompt tokens of images or videos.
    reasoning: tokens of the answers in which the model reasoned.
    dropped: tokens of prompt and answers whose keys and values were left out, all choices together.
    drafts, accepted_drafts: tokens that were expected and computed before it was clear that they follow, and
        those of them that became part of an answer.
    accepted_prediction, rejected_prediction: drafts from the request's prediction that became part of an
        answer, and those that did not.
    """

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    image: int = 0
    reasoning: int = 0
    dropped: int = 0
    drafts: int = 0
    accepted_drafts: int = 0
    accepted_prediction: int = 0
    rejected_prediction: int = 0


@dataclass(frozen=True, slots=True)
class StageTimings:
    """Seconds that one request spent in each stage.

    fetch, media_decode: before the engine, as in GenerationRequest.
    decode: generation of tokens, from the first to the last.
    detokenize: turning tokens into text; nearly all of it passes during decode, beside the next steps.
    ttft: from arrival at the engine to the first token.
    """

    fetch: float = 0.0
    media_decode: float = 0.0
    preprocess: float = 0.0
    queue: float = 0.0
    encode: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    detokenize: float = 0.0
    ttft: float = 0.0


@dataclass(frozen=True, slots=True)
class Delta:
    """The new text and tokens of one choice since its previous delta.

    index: number of the choice, from 0.
    finish_reason: set on the last delta of a choice.
    usage, timings, images: set on the last delta of the request; images tells how each image was used.
    thinking: the prompt ended inside the model's reasoning, so the answer begins there. On every delta.
    stop: the stop string or the token of stop_token_ids that ended the choice; None: another end, or none.
    prompt_tokens, cached_tokens: tokens of the prompt, and how many of them were cached. On every delta.
    prompt_ids, prompt_logprobs: of the whole prompt, on the first delta, if the request wants them.
    offers: values that another engine can fetch, as JSON, see `engine.peers.values`.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: StageTimings | None = None
    images: tuple[ImageUse, ...] = ()
    thinking: bool = False
    stop: str | int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_ids: tuple[int, ...] = ()
    prompt_logprobs: PromptLogprobs = ()
    offers: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer: text, token ids, finish reason and logprobs of every choice, and usage and timings."""

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    finish_reasons: tuple[FinishReason, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]
    usage: Usage
    timings: StageTimings
    images: tuple[ImageUse, ...] = ()
    thinking: bool = False
    stops: tuple[str | int | None, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    prompt_logprobs: PromptLogprobs = ()

    @property
    def text(self) -> str:
        return self.texts[0]


@dataclass(frozen=True, slots=True)
class RenderedSpan:
    """The place of one image, or of one group of a video's frames, in a rendered prompt.

    name: names it as the names of KV blocks do, see `engine.kv.hashing.mm_hash`.
    offset: first position in the prompt.
    length: number of positions.
    """

    kind: Literal["image", "video"]
    name: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as the engine would compute it now.

    ids: token ids, with a placeholder for each visual token.
    spans: the images and the groups of frames, in the order of the prompt.
    max_tokens: length limit of an answer.
    """

    ids: list[int]
    spans: tuple[RenderedSpan, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about the model that an engine runs, as a server reports them.

    parameters: number of weights.
    max_context: tokens of prompt and answer together.
    created: Unix time in seconds when the model was loaded.
    default_sampling: sampling parameters that the checkpoint recommends.
    quantization, kv_dtype: as EngineConfig names them.
    max_running: most answers that are computed at a time; 0: unknown.
    input_modalities: what prompts may contain.
    fingerprint: names the weights and what changes the encoder's results; "": there are none.
    tool_format: how the model writes tool calls, by the names of `fovea.dialects`; "": it makes none.
    reasons: whether its answers may begin with reasoning.
    extra_embeddings: embeddings after those of the vocabulary. Only prompts can hold their ids.
    images_need: what an operator must do for a model without images to take them; "": nothing helps.
    """

    name: str
    architecture: str
    parameters: int
    dtype: str
    device: str
    max_context: int
    vocab_size: int
    created: int
    default_sampling: dict[str, float | int] = field(default_factory=dict)
    quantization: str = "none"
    kv_dtype: str = "auto"
    max_running: int = 0
    input_modalities: tuple[str, ...] = ("text", "image")
    fingerprint: str = ""
    tool_format: str = ""
    reasons: bool = False
    extra_embeddings: int = 0
    images_need: str = ""

    def check_media(self, kind: str, param: str, prefix: str = "") -> None:
        """Check whether prompts may contain images or videos at all.

        kind: "image", "video" or "PDF file", for the message.
        param: the path of the first one in the request.
        prefix: the beginning of the message, for callers who do not see `param`.
        Raises InvalidRequest, naming the part, if the model takes text alone. One that takes images, but no
        videos, says so itself, with the models that do (`engine.request.prompt`).
        """
        if "image" not in self.input_modalities:
            remedy = f", or {self.images_need}" if self.images_need else ""
            raise InvalidRequest(
                f"{prefix}this is {'an' if kind == 'image' else 'a'} {kind}, and the model {self.name} takes "
                f"text alone; accepted: parts of type text{remedy}",
                param=param,
                code="video_not_supported" if kind == "video" else "image_not_supported",
            )


def check_prompt_media(info: ModelInfo, prompt: Prompt) -> None:
    """Check every image and video of a prompt. Raises InvalidRequest, see `ModelInfo.check_media`."""
    if isinstance(prompt, TextPrompt | PlannedPrompt) and prompt.images:
        info.check_media("image", "images[0]", "images[0]: ")
    for i, message in enumerate(prompt.messages if isinstance(prompt, ChatPrompt) else ()):
        for j, part in enumerate(message.parts):
            if not isinstance(part, TextPart):
                kind = "image" if isinstance(part, ImagePart) else "video"
                where = f"messages[{i}].content[{j}]"
                info.check_media(kind, where, f"{where}: ")


class AnswerBuilder:
    """Assembles the deltas of one request, in any interleaving of its choices, into a `Completion`.

    choices: number of choices of the request.
    A choice without a finish reason gets the reason "abort".
    """

    def __init__(self, choices: int) -> None:
        self._texts = [""] * choices
        self._ids: list[list[int]] = [[] for _ in range(choices)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(choices)]
        self._reasons: list[FinishReason] = ["abort"] * choices
        self._stops: list[str | int | None] = [None] * choices
        self._fields: dict[str, Any] = {"usage": Usage(), "timings": StageTimings()}

    def add(self, delta: Delta) -> None:
        self._texts[delta.index] += delta.text
        self._ids[delta.index] += delta.token_ids
        self._logprobs[delta.index] += delta.logprobs
        self._reasons[delta.index] = delta.finish_reason or self._reasons[delta.index]
        if delta.stop is not None:
            self._stops[delta.index] = delta.stop
        for name in ("usage", "timings", "images", "prompt_ids", "prompt_logprobs"):
            if value := getattr(delta, name):
                self._fields[name] = value
        self._fields["thinking"] = delta.thinking

    def build(self) -> Completion:
        return Completion(
            texts=tuple(self._texts),
            token_ids=tuple(map(tuple, self._ids)),
            finish_reasons=tuple(self._reasons),
            logprobs=tuple(map(tuple, self._logprobs)),
            stops=tuple(self._stops),
            **self._fields,
        )

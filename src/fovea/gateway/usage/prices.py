"""The consumption of a request, the amounts that limits count, and its cost by the table of prices.

The price table is TOML. Prices are in units of the currency: per million tokens, per image, per request.

    currency = "EUR"

    [default]                     # prices that a model does not state; without this table they are 0
    text_input = 0.5

    ["Qwen/Qwen3-VL-8B-Instruct"] # a model by its name
    text_input = 0.40             # per million tokens of text of the prompt
    visual_input = 0.30           # per million tokens of images and videos; default: text_input
    cached_input = 0.10           # per million tokens that the backend did not compute again
    cached_share = 0.25           # instead of cached_input: share of the tokens' price; default: 0.5
    output = 1.60                 # per million tokens of answers
    image = 0.0001                # per image or video
    request = 0.0                 # per request
    cached_response = 0.0         # share of the cost, for answers from the response cache; default: 0

Costs are whole millionths of the currency. A price per million tokens in units of the currency is the price
of one token in millionths of it. All arithmetic is on integers, and each cost is rounded up once, at the end.
A backend does not say which of the prompt's tokens were cached, so they are counted as text and as visual
tokens in the proportion of the prompt (visual ones rounded down).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from fovea.core.config_files import errors_in, nearest, read_toml
from fovea.core.errors import ConfigError

BYTES_PER_TOKEN = 4
"""Usual bytes of text per token."""
_TEXTS = frozenset(
    ("arguments", "content", "input", "name", "reasoning", "reasoning_content", "refusal", "text", "thinking")
)
"""Fields of answers with what a model has written, in all APIs. Lists in them hold parts with such fields."""
MOST = 1 << 40
"""A larger number of tokens is taken for none: no account could hold it."""
DEFAULT = "default"
MOST_DECIMALS = 6
"""Most decimals of a price or share."""
MILLION = 10**6
_SCALE = 10 ** (2 * MOST_DECIMALS)
"""Prices are kept as whole numbers of 1 / _SCALE millionths, so that a price times a share is still whole."""
_CURRENCY = re.compile(r"[A-Z]{3}")
_PRICES = ("text_input", "visual_input", "cached_input", "output", "image", "request")
_SHARES = ("cached_share", "cached_response")
_HIGHEST = Decimal(MILLION)
Values = Mapping[str, Decimal]


class Amounts(NamedTuple):
    """Amounts that limits and budgets count.

    requests: number of requests.
    text_tokens: tokens of text, of prompts and answers together.
    visual_tokens: tokens of images and videos.
    cost: money, in millionths of the currency of the price table.
    """

    requests: int = 0
    text_tokens: int = 0
    visual_tokens: int = 0
    cost: int = 0


class Consumption(NamedTuple):
    """The tokens of one answered request, as its backend reports them or as the gateway estimates them.

    prompt_tokens: tokens of the prompt, visual ones included.
    visual_tokens: tokens of images and videos among them.
    cached_tokens: tokens of the prompt that the backend did not compute again.
    completion_tokens: tokens of all choices.
    images: images and videos of the request.
    estimated: whether the backend reported nothing, so that these are estimates.
    """

    prompt_tokens: int = 0
    visual_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    images: int = 0
    estimated: bool = False

    @property
    def text_tokens(self) -> int:
        """Tokens of text, of prompt and answer."""
        return max(0, self.prompt_tokens - self.visual_tokens) + self.completion_tokens


NOTHING = Consumption()


def visual_tokens_of(details: Mapping[str, Any]) -> int | None:
    """Return the visual tokens that a backend's `prompt_tokens_details` tell; None: they tell none.

    Fovea tells one number, vLLM one for each kind of media.
    """
    kinds = details.get("multimodal_tokens")
    if isinstance(kinds, Mapping):
        counts = [kinds.get("image"), kinds.get("video")]
    else:
        counts = [details.get("image_tokens")]
    known = [count for count in counts if type(count) is int and 0 <= count < MOST]
    return sum(known) if known else None


def consumption_of(usage: Mapping[str, Any] | None, estimate: Consumption) -> Consumption:
    """Return the tokens that a backend reports; what it leaves out is as estimated.

    usage: the object `usage` of an answer; None: there was none, so all of it is estimated.
    estimate: visual tokens by the model's rule, and images; used where the backend tells nothing.
    """
    if usage is None:
        return estimate._replace(estimated=True)
    told = _count(usage, "prompt_tokens", "input_tokens")
    completion = _count(usage, "completion_tokens", "output_tokens")
    if told is None and completion is None:
        return estimate._replace(estimated=True)
    prompt = estimate.prompt_tokens if told is None else told
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    if not isinstance(details, Mapping):
        details = {}
    cached = _count(details, "cached_tokens")
    if cached is None:
        cached = _count(usage, "cache_read_input_tokens") or 0
        if told is not None and "prompt_tokens" not in usage:
            # In Anthropic's API, input_tokens are only those that the cache neither gave nor took.
            prompt += cached + (_count(usage, "cache_creation_input_tokens") or 0)
    visual = visual_tokens_of(details)
    if visual is None:
        visual = min(estimate.visual_tokens, prompt)
    # A reused picture may be counted beside the prompt; never more visual tokens than the prompt has.
    return Consumption(
        prompt_tokens=max(prompt, visual),
        visual_tokens=visual,
        cached_tokens=min(cached, prompt),
        completion_tokens=estimate.completion_tokens if completion is None else completion,
        images=estimate.images,
        estimated=told is None,
    )


def usage_of(body: bytes) -> dict[str, Any] | None:
    """Return the object `usage` of a complete answer; None: it has none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    usage = value.get("usage") if isinstance(value, dict) else None
    return usage if isinstance(usage, dict) else None


def answer_tokens(answer: Mapping[str, Any]) -> int:
    """Estimate the tokens of a complete answer by its texts, for backends that tell no usage."""
    size, left = 0, [answer.get(name) for name in ("choices", "content", "output")]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += node
        elif isinstance(node, dict):
            for name, entry in node.items():
                if name not in _TEXTS or isinstance(entry, list):
                    left.append(entry if isinstance(entry, dict | list) else None)
                elif entry is not None:
                    text = entry if isinstance(entry, str) else json.dumps(entry)
                    size += len(text.encode("utf-8", "replace"))
    return -(-size // BYTES_PER_TOKEN)


def _count(values: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = values.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST:
            return value
    return None


class Price(NamedTuple):
    """The cost of one request, in millionths of the currency.

    cost: what the request costs.
    credit: what it would have cost more without the backend's or the gateway's cache.
    visual: the part of the cost that images and videos cause.
    estimated: the backend reported no token counts, so that the cost is that of an estimate.
    """

    cost: int
    credit: int = 0
    visual: int = 0
    estimated: bool = False


FREE = Price(0)


@dataclass(frozen=True, slots=True)
class Rates:
    """The prices of one model, each in 1 / _SCALE millionths.

    text, visual, cached_text, cached_visual, output: per token.
    image, request: per image, and per request.
    cached_response: share of the cost of an answer from the response cache, in 1 / _SCALE.
    """

    text: int = 0
    visual: int = 0
    cached_text: int = 0
    cached_visual: int = 0
    output: int = 0
    image: int = 0
    request: int = 0
    cached_response: int = 0

    def price(self, consumption: Consumption, cached_response: bool) -> Price:
        """Return the price of a request."""
        prompt, visual, cached, output, images, estimated = consumption
        visual = min(visual, prompt)
        cached = min(cached, prompt)
        full_visual = visual * self.visual + images * self.image
        full = full_visual + (prompt - visual) * self.text + output * self.output + self.request
        saved = saved_visual = 0
        if cached:
            cached_visual = cached * visual // prompt
            saved_visual = cached_visual * (self.visual - self.cached_visual)
            saved = saved_visual + (cached - cached_visual) * (self.text - self.cached_text)
        net, net_visual = full - saved, full_visual - saved_visual
        if cached_response:
            net = -(-net * self.cached_response // _SCALE)
            net_visual = net_visual * self.cached_response // _SCALE
        cost = -(-net // _SCALE)  # rounded up
        return Price(cost, -(-full // _SCALE) - cost, min(cost, -(-net_visual // _SCALE)), estimated)


class PriceTable:
    """The prices of all models, by name.

    currency: three letters, as "EUR".
    """

    def __init__(self, currency: str, rates: Mapping[str, Rates]) -> None:
        self.currency = currency
        self._rates = dict(rates)
        self._default = self._rates.pop(DEFAULT, Rates())

    def price(self, model: str, consumption: Consumption, *, cached_response: bool = False) -> Price:
        """Return the cost of a request with its parts.

        cached_response: the answer came from the gateway's response cache.
        """
        return self._rates.get(model, self._default).price(consumption, cached_response)

    def cost(self, model: str, consumption: Consumption) -> int:
        """Return the cost of a request, in millionths of the currency, rounded up."""
        return self.price(model, consumption).cost


def read_prices(path: Path) -> PriceTable:
    """Read a price table. Raises ConfigError if the file cannot be read, or if it is wrong."""
    values = read_toml(path, "price file", param="prices", parse_float=Decimal)
    with errors_in(f"price file {path}"):
        return prices_of(values)


def prices_of(values: dict[str, Any]) -> PriceTable:
    """Return the price table of parsed TOML. Raises ConfigError, which names the table and the wrong value.

    values: with fractions as Decimal. Its currency is taken out.
    """
    currency = values.pop("currency", "USD")
    if not isinstance(currency, str) or not _CURRENCY.fullmatch(currency):
        raise ConfigError(f"currency is {currency!r}; accepted: three letters, as EUR", param="prices")
    tables = {name: _table(name, table) for name, table in values.items()}
    default = tables.get(DEFAULT, {})
    rates = {name: _rates(name, _with_defaults(own, default)) for name, own in tables.items()}
    return PriceTable(currency, rates)


def _table(name: str, table: Any) -> Values:
    """Check the prices of one table."""
    if not isinstance(table, dict):
        raise ConfigError(
            f"{name!r} is not a table; accepted: currency, and tables such as [{DEFAULT}] or "
            f'["{name}"]; a name with a dot needs quotes',
            param="prices",
        )
    for key in table:
        if key not in (*_PRICES, *_SHARES):
            hint = nearest(key, (*_PRICES, *_SHARES))
            dots = " (a model's name with a dot needs quotes)" if isinstance(table[key], dict) else ""
            raise ConfigError(f"[{name}]: unknown key {key!r}; {hint}{dots}", param="prices")
    if "cached_input" in table and "cached_share" in table:
        raise ConfigError(
            f"[{name}] has cached_input and cached_share; accepted: cached_input or cached_share",
            param="prices",
        )
    return {key: _number(name, key, value) for key, value in table.items()}


def _number(name: str, key: str, value: Any) -> Decimal:
    high = Decimal(1) if key in _SHARES else _HIGHEST
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        number = Decimal(value)
        if number.is_finite() and 0 <= number <= high and number * MILLION == int(number * MILLION):
            return number
    shown = value if isinstance(value, Decimal) else repr(value)
    raise ConfigError(
        f"[{name}]: {key} is {shown}; accepted: 0 to {high:,}, with at most {MOST_DECIMALS} decimals",
        param="prices",
    )


def _with_defaults(own: Values, default: Values) -> Values:
    """Return the prices of a model, with those of [default] that it does not state.

    A default is not used if the model states a price from which the value derives: with text_input of its
    own and no visual_input, the model's images have its text_input.
    """
    taken = {
        key: value
        for key, value in default.items()
        if not (key == "visual_input" and "text_input" in own)
        and not (key in ("cached_input", "cached_share") and {"cached_input", "cached_share"} & set(own))
        and not (key == "cached_input" and "text_input" in own)
    }
    return {**taken, **own}


def _rates(name: str, values: Values) -> Rates:
    """Return the whole numbers that `Rates` keeps."""
    text = values.get("text_input", Decimal(0))
    visual = values.get("visual_input", text)
    share = values.get("cached_share", Decimal("0.5"))
    cached = values.get("cached_input")
    if cached is not None and cached > min(text, visual):
        raise ConfigError(
            f"[{name}]: cached_input is {cached}; accepted: at most the prices of the same tokens "
            f"(text {text}, visual {visual}), or cached_share instead",
            param="prices",
        )
    return Rates(
        text=_whole(text),
        visual=_whole(visual),
        cached_text=_whole(text * share if cached is None else cached),
        cached_visual=_whole(visual * share if cached is None else cached),
        output=_whole(values.get("output", Decimal(0))),
        image=_whole(values.get("image", Decimal(0)) * MILLION),
        request=_whole(values.get("request", Decimal(0)) * MILLION),
        cached_response=_whole(values.get("cached_response", Decimal(0))),
    )


def _whole(value: Decimal) -> int:
    return int(value * _SCALE)

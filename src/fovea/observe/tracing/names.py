"""The names of spans and attributes: the one place that maps Fovea's figures to OpenTelemetry's conventions.

The names are those of the conventions for generative AI, release gen-ai/1.42.0, which are still in
development. What they have no name for begins with `fovea.`. LEGACY are the attributes that vLLM wrote before
the conventions; dashboards made for vLLM read them (`--trace-legacy-names`).
"""

from __future__ import annotations

SCHEMA_URL = "https://opentelemetry.io/schemas/gen-ai/1.42.0"
PROVIDER = "fovea"

OPERATION = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_STREAM = "gen_ai.request.stream"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_ID = "gen_ai.response.id"
FINISH_REASONS = "gen_ai.response.finish_reasons"
FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
IMAGE_TOKENS = "gen_ai.usage.image.input_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"

SAMPLING = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
}
"""Field of SamplingParams -> attribute."""

ERROR_TYPE = "error.type"
HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"

REQUEST_ID = "fovea.request_id"
IMAGE_SIZES = "fovea.image.sizes"
IMAGE_VISUAL_TOKENS = "fovea.image.visual_tokens"
IMAGE_DETAIL = "fovea.image.detail"
CALLER = "fovea.caller"
TENANT = "fovea.tenant"
BACKEND = "fovea.backend"
ROUTE_REASON = "fovea.route.reason"
ATTEMPTS = "fovea.attempts"
CACHE = "fovea.response_cache"
VISUAL_TOKENS = "fovea.visual_tokens"

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/predict": "chat",
    "/invocations": "chat",
    "/v1/completions": "text_completion",
}
"""Route -> name of the operation. A span of another route is named by its method and path."""

LEGACY = {
    "request_id": "gen_ai.request.id",
    "num_sequences": "gen_ai.request.n",
    "prompt_tokens": "gen_ai.usage.prompt_tokens",
    "completion_tokens": "gen_ai.usage.completion_tokens",
    "queue": "gen_ai.latency.time_in_queue",
    "first_token": "gen_ai.latency.time_to_first_token",
    "total": "gen_ai.latency.e2e",
    "prefill": "gen_ai.latency.time_in_model_prefill",
    "decode": "gen_ai.latency.time_in_model_decode",
    "inference": "gen_ai.latency.time_in_model_inference",
}
"""Figure -> attribute of vLLM's traces."""

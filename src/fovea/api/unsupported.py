"""Fields of OpenAI's API and of other servers that this server cannot carry out.

Unknown fields are ignored, because clients send many. If one of these were ignored, the answer would not be
the one that the client asked for.
"""

from __future__ import annotations

_OFF: tuple[object, ...] = (None, False)
_ZERO: tuple[object, ...] = (None, 0)
_ONE: tuple[object, ...] = (None, 1)
_EMPTY: tuple[object, ...] = (None, "", [], {})
_BEAMS = "beam search is not supported"
_SAMPLER = "this sampling method is not supported"
_FORM = "forms of answers under this name are not supported; send structured_outputs or response_format"
_ADAPTER = "adapters are not supported"
_TEMPLATE = "chat templates and documents of clients are not supported"

UNSUPPORTED: dict[str, tuple[str, tuple[object, ...]]] = {
    # OpenAI and Anthropic
    "functions": ("the older form of tools is not supported; send tools", (None, [])),
    "function_call": ("the older form of tools is not supported; send tool_choice", (None, "none", "auto")),
    "audio": ("audio is not supported", (None,)),
    "modalities": ("only text is produced", (None, ["text"])),
    "web_search_options": ("web search is not supported", (None,)),
    "suffix": ("suffix is not supported", (None, "")),
    "moderation": ("moderation is not supported", (None,)),
    "mcp_servers": ("MCP servers are not supported", _EMPTY),
    "conversation": ("stored conversations are not supported; send previous_response_id", (None,)),
    "prompt": ("stored prompts, and prompts beside messages, are not supported", (None,)),
    # vLLM, Hugging Face, and programs that offer their samplers
    "use_beam_search": (_BEAMS, _OFF),
    "num_beams": (_BEAMS, _ONE),
    "length_penalty": (_BEAMS, _ONE),
    "early_stopping": (_BEAMS, _OFF),
    "best_of": ("best_of outside /v1/completions is not supported", _ONE),
    "echo": ("echo outside /v1/completions is not supported", _OFF),
    "truncate_prompt_tokens": ("shortening prompts is not supported", (None, -1)),
    "truncate": ("shortening prompts is not supported", (None,)),
    "no_repeat_ngram_size": (_SAMPLER, _ZERO),
    "watermark": ("watermarks are not supported", _OFF),
    "typical_p": (_SAMPLER, _ONE),
    "guidance_scale": (_SAMPLER, _ONE),
    "penalty_alpha": (_SAMPLER, _ZERO),
    "epsilon_cutoff": (_SAMPLER, _ZERO),
    "eta_cutoff": (_SAMPLER, _ZERO),
    "encoder_repetition_penalty": (_SAMPLER, _ONE),
    "smoothing_factor": (_SAMPLER, _ZERO),
    "logits_processors": ("code of clients is not supported", _EMPTY),
    "prompt_embeds": ("embeddings as prompts are not supported", _EMPTY),
    "chat_template": (_TEMPLATE, _EMPTY),
    "documents": (_TEMPLATE, _EMPTY),
    "logprob_token_ids": ("log probabilities of chosen tokens are not supported", _EMPTY),
    "return_tokens_as_token_ids": ("ids in place of texts are not supported; send return_token_ids", _OFF),
    "adapter_id": (_ADAPTER, _EMPTY),
    # SGLang and llama.cpp
    "lora_path": (_ADAPTER, _EMPTY),
    "custom_logit_processor": ("code of clients is not supported", _EMPTY),
    "regex": (_FORM, _EMPTY),
    "ebnf": (_FORM, _EMPTY),
    "grammar": (_FORM, _EMPTY),
    "json_schema": (_FORM, _EMPTY),
    "structural_tag": (_FORM, _EMPTY),
    "stop_regex": ("stop strings that are patterns are not supported", _EMPTY),
    "no_stop_trim": ("true is not supported; send include_stop_str_in_output", _OFF),
    "n_predict": ("a limit under this name is not supported; send max_tokens", (None, -1)),
    "num_predict": ("a limit under this name is not supported; send max_tokens", (None, -1)),
    "repeat_penalty": ("a penalty under this name is not supported; send repetition_penalty", _ONE),
    "mirostat": (_SAMPLER, _ZERO),
    "mirostat_mode": (_SAMPLER, _ZERO),
    "dry_multiplier": (_SAMPLER, _ZERO),
    "xtc_probability": (_SAMPLER, _ZERO),
    "dynatemp_range": (_SAMPLER, _ZERO),
    "top_n_sigma": (_SAMPLER, (None, -1)),
    "top_a": (_SAMPLER, _ZERO),
    "tfs_z": (_SAMPLER, _ONE),
}
"""The reason of each refusal, and the neutral values, which are accepted, by the field's name."""

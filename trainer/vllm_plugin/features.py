"""What a request may ask for, and what fused verification knows of it."""

from __future__ import annotations

from typing import Any

# Fields of vLLM's SamplingParams that are honoured here, that are in the logits before they are verified, or
# that do not touch which token is drawn. Any other one that is set leaves the request to vLLM.
KNOWN = frozenset({
    "temperature", "top_k", "top_p", "min_p", "seed",
    "structured_outputs",  # a mask of the logits
    "extra_args",  # read by custom processors alone, which are a problem of the whole server
    "watermarking", "_watermarking_skipped",  # as are watermarks
    "n", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "prompt_logprobs", "prompt_logprob_token_ids",
    "prompt_logprob_start", "flat_logprobs", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind", "stream_interval",
    "skip_clone", "output_text_buffer_length", "_eos_token_id", "_all_stop_token_ids",
    "skip_reading_prefix_cache", "repetition_detection", "routed_experts_prompt_start",
})
SAID_BY = {"_bad_words_token_ids": "bad_words"}


def unknown(params: Any) -> tuple[str, ...]:
    """The names of what `params`, vLLM's SamplingParams of a request, ask for and is not known here."""
    usual = type(params)()
    found = (name for name in params.__struct_fields__
             if name not in KNOWN and getattr(params, name) != getattr(usual, name))
    return tuple(dict.fromkeys(SAID_BY.get(name, name) for name in found))

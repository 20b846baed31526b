"""What a server of vLLM is asked for token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from trainer.records import Sampling


def request(name: str, prompt: Sequence[int], sampling: Sampling, key: str,
            end_ids: Sequence[int]) -> dict[str, Any]:
    """Body of one request for token ids. Its seed depends on the run's seed and `key`, on nothing else. The
    sampling is said whole: what is not, a server takes from the model's generation_config.json."""
    seed = int.from_bytes(hashlib.sha256(f"{sampling.seed}:{key}".encode()).digest()[:4]) >> 1
    return {"model": name, "prompt": list(prompt), "max_tokens": sampling.max_new_tokens, "seed": seed,
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
            "min_p": sampling.min_p, "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(end_ids), "return_token_ids": True}

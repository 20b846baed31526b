"""The start-up gates: are these the target's hidden states, in the layers and on the side of the norm that we
think?

What a source gives for a few rows is compared with an independent forward pass of the whole target through
transformers: its own logits, and its own hidden states layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from trainer.gates import Gate
from trainer.records import HiddenStates, Sample
from trainer.target import Target
from trainer.target_head import load_target_head


def parity_gates(target: Target, samples: Sequence[Sample], get: Callable[[Sample], HiddenStates],
                 tap_layers: Sequence[int], dtype: torch.dtype, device: str) -> list[Gate]:
    """Gates over `samples`: share of tokens whose top-1 the head gives, lowest cosine of each layer."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    model = AutoModelForCausalLM.from_pretrained(target.folder, dtype=dtype,
                                                 trust_remote_code=target.trust_remote_code).to(device).eval()
    head = load_target_head(target.folder, target.config)
    agree = total = 0
    lowest = dict.fromkeys(tap_layers, 1.0)
    for sample in samples:
        found = get(sample)
        with torch.inference_mode():
            output = model(input_ids=torch.tensor([sample.tokens], device=device), output_hidden_states=True)
        agree += int((head.logits(found.last).argmax(-1) == output.logits[0].argmax(-1).cpu()).sum())
        total += len(sample.tokens)
        for layer, taps in zip(tap_layers, _by_layer(found.taps, len(tap_layers)), strict=True):
            # index N is normed in transformers; `last` is the same state, which `top1_agreement` judges
            inner = layer < len(output.hidden_states) - 1
            expected = output.hidden_states[layer][0].cpu() if inner else found.last
            lowest[layer] = min(lowest[layer], _cosine(taps, expected))
    gates = [Gate("top1_agreement", agree / total, 0.99, ">=",
                  "head(norm(last state)) does not give the target's own tokens: the state is one layer "
                  "early, already normed, or the head's scale or norm is read wrongly")]
    return gates + [Gate(f"cosine_layer_{layer}", value, 0.99, ">=",
                         f"the states stored as layer {layer} are not the target's stream after {layer} "
                         "layers: layer ids are off by one, or rows are mixed up")
                    for layer, value in lowest.items()]


def _by_layer(taps: Tensor, count: int) -> tuple[Tensor, ...]:
    return taps.chunk(count, dim=-1)


def _cosine(found: Tensor, expected: Tensor) -> float:
    """Lowest cosine over the tokens of a row; -1 where it is not a number."""
    return float(cosine_similarity(found.float(), expected.float(), dim=-1).nan_to_num(-1.0).min())

"""The start-up gates: are these the target's hidden states, in the layers and on the side of the norm that we
think?

What a source gives for a few rows is compared with an independent forward pass of the whole target through
transformers: its own logits, and its own hidden states layer by layer. Rows of the last state that the
storage does not keep are zeros by intent and judged by nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from trainer.gates import Gate
from trainer.hidden_states.codec import Codec
from trainer.records import HiddenStates, Sample
from trainer.target import Target
from trainer.target_fit import load_model
from trainer.target_head import load_target_head

# What the head must agree on: e4m3 moves every state by 2.6 %, which turns close calls, a wrong norm or layer
# turns most tokens.
AGREEMENT = {"native": 0.99, "float8_e4m3fn": 0.9}


def parity_gates(target: Target, samples: Sequence[Sample], get: Callable[[Sample], HiddenStates],
                 codec: Codec, dtype: torch.dtype, device: str) -> list[Gate]:
    """Gates over `samples`, whose states went through `codec`: share of tokens whose top-1 the head gives,
    among the rows of the last state that are kept (no gate when none is), and the lowest cosine of each
    layer."""
    model = load_model(target.folder, dtype, target.trust_remote_code).to(device).eval()
    head = load_target_head(target.folder, target.config)
    agree = total = 0
    lowest = dict.fromkeys(codec.layers, 1.0)
    for sample in samples:
        found, kept = get(sample), codec.kept(sample.loss_mask)
        with torch.inference_mode():
            output = model(input_ids=torch.tensor([sample.tokens], device=device), output_hidden_states=True)
        own = output.logits[0].cpu()[kept].argmax(-1)
        agree += int((head.logits(found.last[kept]).argmax(-1) == own).sum())
        total += len(own)
        for layer, taps in zip(codec.layers, _by_layer(found.taps, len(codec.layers)), strict=True):
            # index N is normed in transformers; `last` is the same state, which `top1_agreement` judges
            if layer < len(output.hidden_states) - 1:
                pair = taps, output.hidden_states[layer][0].cpu()
            elif kept.any():
                pair = taps[kept], found.last[kept]
            else:
                pair = head.normed(taps), output.hidden_states[layer][0].cpu()
            lowest[layer] = min(lowest[layer], _cosine(*pair))
    gates = [Gate("top1_agreement", agree / total, AGREEMENT[codec.storage], ">=",
                  "head(norm(last state)) does not give the target's own tokens: the state is one layer "
                  "early, already normed, or the head's scale or norm is read wrongly")] if total else []
    return gates + [Gate(f"cosine_layer_{layer}", value, 0.99, ">=",
                         f"the states stored as layer {layer} are not the target's stream after {layer} "
                         "layers: layer ids are off by one, or rows are mixed up")
                    for layer, value in lowest.items()]


def _by_layer(taps: Tensor, count: int) -> tuple[Tensor, ...]:
    return taps.chunk(count, dim=-1)


def _cosine(found: Tensor, expected: Tensor) -> float:
    """Lowest cosine over the tokens of a row; -1 where it is not a number, 1 without any token."""
    cosines = cosine_similarity(found.float(), expected.float(), dim=-1).nan_to_num(-1.0)
    return float(cosines.min()) if len(cosines) else 1.0

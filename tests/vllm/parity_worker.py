"""Draft logits of exported folders, computed by vLLM's own model class; run by vLLM's interpreter.

    python parity_worker.py FOLDER

`FOLDER/request.json` lists cases (name, method, target, drafter, inputs, k, each_missing); results go to
`FOLDER/results.json` and `FOLDER/results.safetensors` (logits by case, and `CASE.confidence`). The path is
the server's: folder -> engine configuration -> class -> loader -> sharing with the target -> KV cache and
attention kernel. Before loading, every parameter is filled with a value that no checkpoint has, so that what
the loader leaves alone is seen: vLLM itself does not complain of a missing tensor. Imports torch, safetensors
and vllm only.
"""

import json
import os
import socket
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

UNSET = -(1 << 40)  # what an integer parameter holds before loading; a float one holds NaN
BLOCKS = 4
Weights = Iterable[tuple[str, Tensor]]


def engine_config(case: dict[str, Any]) -> VllmConfig:
    """Without `k` the drafter's folder is all that is given, as in `vllm serve <folder>`: it names its target
    and draft length itself."""
    settings: dict[str, Any] = {"model": case["drafter"]}
    if case["k"] is not None:
        speculation = {"method": case["method"], "model": case["drafter"],
                       "num_speculative_tokens": case["k"]}
        settings = {"model": case["target"], "speculative_config": speculation}
    return EngineArgs(dtype="float32", max_model_len=256, max_num_seqs=2, max_num_batched_tokens=256,
                      enforce_eager=True, **settings).create_engine_config()


def start_distributed(config: VllmConfig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trial:
        port = trial.getsockname()[1]
    with set_current_vllm_config(config):
        init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo",
                                     distributed_init_method=f"tcp://127.0.0.1:{port}")
        ensure_model_parallel_initialized(1, 1)


def loaded(config: VllmConfig, keep: Callable[[str], bool]) -> tuple[nn.Module, list[str]]:
    """The drafter with the tensors of its folder that `keep` accepts, and which parameters are unset."""
    draft = config.speculative_config.draft_model_config
    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config), set_default_torch_dtype(draft.dtype):
        model = initialize_model(vllm_config=config, model_config=draft)
        for parameter in model.parameters():
            parameter.data.fill_(float("nan") if parameter.is_floating_point() else UNSET)
        weights: Weights = get_model_loader(config.load_config).get_all_weights(draft, model)
        model.load_weights((name, tensor) for name, tensor in weights if keep(name))
    return model, [name for name, parameter in model.named_parameters() if is_unset(parameter)]


def is_unset(parameter: Tensor) -> bool:
    return bool((parameter.isnan() if parameter.is_floating_point() else parameter == UNSET).any())


def share(model: nn.Module, target: Path) -> None:
    """Gives the drafter the target's embedding and head where the server would."""
    # DSpark's class says nothing where the folder brings none
    model.has_own_embed_tokens, model.has_own_lm_head = (
        getattr(model, f"has_own_{name}", False) for name in ("embed_tokens", "lm_head"))
    tensors = {}
    for path in target.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()  # noqa: SIM118 - it is no dict
                        if name in ("model.embed_tokens.weight", "lm_head.weight")}
    embedding = tensors["model.embed_tokens.weight"]
    if hasattr(model, "masked_embedding"):  # an assistant: its own table is that of its head alone
        model.model.embed_tokens = nn.Embedding.from_pretrained(embedding)
        return
    if not model.has_own_embed_tokens:
        fill(model.model.embed_tokens.weight, embedding)
    if not model.has_own_lm_head:
        fill(model.lm_head.weight, tensors.get("lm_head.weight", embedding))


def fill(parameter: Tensor, rows: Tensor) -> None:
    """vLLM pads the vocabulary; the padding must not count."""
    parameter.data.zero_()
    parameter.data[:len(rows)] = rows.to(parameter.dtype)


class Cache:
    """An empty KV cache of `BLOCKS` blocks for the drafter's attention layers, and their metadata."""

    def __init__(self, config: VllmConfig, names: list[str]) -> None:
        self.config, self.names = config, names
        attention = config.compilation_config.static_forward_context
        for name in names:
            self.spec = attention[name].get_kv_cache_spec(config)
            attention[name].kv_cache = torch.zeros(BLOCKS, self.spec.num_kv_heads, self.spec.block_size,
                                                   2 * self.spec.head_size)
        self.builder = attention[names[0]].attn_backend.get_builder_cls()

    def metadata(self, first: int, count: int, causal: bool) -> tuple[Any, Tensor]:
        """For `count` tokens at positions from `first` on, and the slots of their keys. Making it also
        prepares the attention layers for keys that are written outside a forward pass."""
        starts, slots = torch.tensor([0, count], dtype=torch.int32), torch.arange(first, first + count)
        length = torch.tensor([first + count], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, num_reqs=1, num_actual_tokens=count,
            seq_lens=length, seq_lens_cpu_upper_bound=length, max_query_len=count,
            max_seq_len=first + count, block_table_tensor=torch.arange(BLOCKS, dtype=torch.int32)[None],
            slot_mapping=slots, causal=causal)
        builder = self.builder(self.spec, self.names, self.config, torch.device("cpu"))
        return builder.build(0, common), slots

    def forward(self, model: nn.Module, made: tuple[Any, Tensor], *inputs: Tensor) -> Any:
        metadata, slots = made
        with set_forward_context(dict.fromkeys(self.names, metadata), self.config, num_tokens=len(slots),
                                 slot_mapping=dict.fromkeys(self.names, slots)):
            return model(*inputs)


def block(config: VllmConfig, model: nn.Module, tokens: Tensor, states: Tensor, queries: int) -> Tensor:
    """Hidden states [queries, H] of the block after the last token, in one pass."""
    cache = Cache(config, model.get_draft_kv_cache_layer_names())
    context = len(tokens) - 1
    made = cache.metadata(context, queries, causal=all(model.get_draft_attn_causal()))
    known = torch.arange(context)
    model.precompute_and_store_context_kv(model.combine_hidden_states(states), known, known)
    ids = torch.full((queries,), model.model.mask_token_id)
    ids[0] = tokens[-1]
    return cache.forward(model, made, ids, torch.arange(context, context + queries))


Found = dict[str, Tensor]  # "logits" [1 + K, vocabulary], of which the first row may be empty


def block_logits(config: VllmConfig, model: nn.Module, tokens: Tensor, states: Tensor) -> Found:
    queries = 1 + config.speculative_config.num_speculative_tokens
    return {"logits": model.compute_logits(block(config, model, tokens, states, queries))}


def candidate_scores(config: VllmConfig, model: nn.Module, tokens: Tensor, states: Tensor) -> Found:
    """What the selector's walk gives the candidates of each slot; -inf for all other tokens."""
    steps = config.speculative_config.num_speculative_tokens
    hidden = block(config, model, tokens, states, 1 + steps)[1:]
    candidates, alone = model.compute_candidates(hidden)
    scores = model.model.candidate_selector(candidates[None], alone[None], hidden[None], tokens[-1:])[0]
    found, previous = torch.full((1 + steps, model.config.vocab_size), -torch.inf), 0
    for step in range(steps):
        found[1 + step, candidates[step]] = scores[step, previous]
        previous = int(scores[step, previous].argmax())
    return {"logits": found}


def corrected_logits(config: VllmConfig, model: nn.Module, tokens: Tensor, states: Tensor) -> Found:
    """Slot after slot with the Markov head's bias of the token before; and `confidence` [K] on the way."""
    steps = config.speculative_config.num_speculative_tokens
    first = 0 if getattr(model.config, "sample_from_anchor", True) else 1
    hidden = block(config, model, tokens, states, first + steps)[first:]
    ids = model.map_draft_to_target(torch.arange(model.config.draft_vocab_size))
    found, sure, previous = torch.full((1 + steps, model.config.vocab_size), -torch.inf), [], tokens[-1:]
    for step, logits in enumerate(model.compute_draft_logits(hidden).split(1)):
        embedded = model.markov_embed(previous)
        logits = logits + model.markov_bias(embedded)
        sure.append(model.compute_confidence(hidden[step:step + 1], embedded))
        found[1 + step, ids] = logits[0]
        previous = ids[logits.argmax(-1)]
    return {"logits": found, "confidence": torch.cat(sure)}


def chain_logits(config: VllmConfig, model: nn.Module, tokens: Tensor, states: Tensor) -> Found:
    """Token after token, each from the state of the one before."""
    attention = config.compilation_config.static_forward_context
    cache = Cache(config, [name for name in attention if type(attention[name]).__name__ == "Attention"])
    count = len(tokens) - 1
    hidden, fed = cache.forward(model, cache.metadata(0, count, causal=True), tokens[1:], torch.arange(count),
                                model.combine_hidden_states(states))
    found = [model.compute_logits(hidden[-1:])]
    for place in range(count, count + config.speculative_config.num_speculative_tokens - 1):
        hidden, fed = cache.forward(model, cache.metadata(place, 1, causal=True), found[-1].argmax(-1),
                                    torch.tensor([place]), fed[-1:])
        found.append(model.compute_logits(hidden))
    return {"logits": torch.cat([torch.full_like(found[0], float("nan")), *found])}


def assistant_logits(config: VllmConfig, model: nn.Module, tokens: Tensor, states: Tensor) -> Found:
    """Token after token at one position, from keys and values of the target. `states` has its last states,
    normed, then keys and values of each kind of attention in the order of their names."""
    text, attention = model.config.get_text_config(), config.compilation_config.static_forward_context
    count, rest = len(tokens) - 1, states[:, model.config.backbone_hidden_size:]
    metadata, place = {}, {}
    for kind in sorted(set(text.layer_types)):
        names = [name for name in attention if type(attention[name]).__name__ == "Attention"
                 and text.layer_types[int(name.split(".layers.")[1].split(".")[0])] == kind]
        cache = Cache(config, names)
        made, slots = cache.metadata(count - 1, 1, causal=True)
        width = cache.spec.num_kv_heads * cache.spec.head_size
        keys, values, rest = rest[:, :width], rest[:, width:2 * width], rest[:, 2 * width:]
        for name in names:
            layer, parts = attention[name], [each.unflatten(-1, (-1, cache.spec.head_size)).contiguous()
                                             for each in (keys, values)]
            layer.impl.do_kv_cache_update(layer, *parts, layer.kv_cache, torch.arange(count))
            metadata[name], place[name] = made, slots
    fed, token, found = states[-1:, :model.config.backbone_hidden_size], tokens[-1:], []
    for _ in range(config.speculative_config.num_speculative_tokens):
        with set_forward_context(metadata, config, num_tokens=1, slot_mapping=place):
            hidden, fed = model(token, torch.tensor([count - 1]), fed)
        found.append(model.compute_logits(hidden))
        token = found[-1].argmax(-1)
    return {"logits": torch.cat([torch.full_like(found[0], float("nan")), *found])}


DRAFT = {"DFlashQwen3ForCausalLM": block_logits, "DFlash2Qwen3ForCausalLM": candidate_scores,
         "Qwen3DSparkForCausalLM": corrected_logits, "Eagle3LlamaForCausalLM": chain_logits,
         "Eagle3Qwen3ForCausalLM": chain_logits, "Gemma4MTP": assistant_logits}


@torch.inference_mode()
def draft(config: VllmConfig, model: nn.Module, inputs: dict[str, Tensor]) -> Found:
    """The server's first draft after a prompt. inputs: `tokens` [T], whose last one is the anchor, and the
    target's state after L layers, `layer.L` [T - 1, hidden], for every L; or `taps` [T - 1, width]."""
    states = inputs["taps"] if "taps" in inputs else \
        torch.cat([inputs[f"layer.{layer}"] for layer in tapped(config)], dim=-1)
    return DRAFT[type(model).__name__](config, model, inputs["tokens"], states)


def tapped(config: VllmConfig) -> list[int]:
    """The target's layers that the server would hand to this drafter, in its order."""
    return sorted(set(get_eagle3_aux_layers_from_config(config.speculative_config) or ()))


def run(case: dict[str, Any], config: VllmConfig) -> tuple[dict[str, Any], Found]:
    result: dict[str, Any] = {"target": config.model_config.model, "layers": tapped(config),
                              "k": config.speculative_config.num_speculative_tokens, "missing": {}}
    if case["each_missing"]:
        for left_out in load_file(Path(case["drafter"], "model.safetensors")):
            result["missing"][left_out] = loaded(config, lambda name, out=left_out: name != out)[1]
    model, unset = loaded(config, lambda name: True)
    share(model, Path(case["target"]))
    with set_current_vllm_config(config):
        process_weights_after_loading(model, config.speculative_config.draft_model_config,
                                      torch.device("cpu"))
        found = draft(config, model.eval(), load_file(case["inputs"]))
    if case["method"] not in ("eagle3", "mtp"):
        result |= {"causal": model.get_draft_attn_causal(), "mask_token_id": model.model.mask_token_id}
    return {**result, "class": type(model).__name__, "unset": unset}, found


def main(folder: Path) -> None:
    results, tensors = {}, {}
    for number, case in enumerate(json.loads((folder / "request.json").read_text())):
        config = engine_config(case)
        if number == 0:
            start_distributed(config)
        results[case["name"]], found = run(case, config)
        tensors[case["name"]] = found.pop("logits")
        tensors |= {f"{case['name']}.{name}": tensor for name, tensor in found.items()}
    save_file(tensors, folder / "results.safetensors")
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Draft logits of targets with an MTP module, computed by vLLM's own classes; run by vLLM's interpreter.

    python mtp_worker.py FOLDER

`FOLDER/request.json` lists cases (name, target, inputs, k, whole, latent); results go to
`FOLDER/results.json` and `FOLDER/results.safetensors`. With `whole` the target's own class computes the
states that its module is fed with, as the server hands them over, and they are given back as `CASE.states`;
else they come from the `inputs`. Imports torch, safetensors and vllm only.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from parity_worker import BLOCKS, UNSET, Cache, fill, is_unset, start_distributed
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import MLAAttentionSpec


def engine_config(case: dict[str, Any]) -> VllmConfig:
    speculation = {"method": "mtp", "num_speculative_tokens": case["k"]}
    # The other backend for latent attention takes no float32, and this one no other blocks. The kernel for
    # unscaled positions of a build for CPUs takes heads that lie in a row and turns those of latent attention
    # by other positions; vLLM's own code in PyTorch takes its place.
    latent = {"block_size": 16, "attention_backend": AttentionBackendEnum.CPU_MLA,
              "compilation_config": {"custom_ops": ["-rotary_embedding"]}} if case["latent"] else {}
    return EngineArgs(model=case["target"], dtype="float32", max_model_len=256, max_num_seqs=2,
                      max_num_batched_tokens=256, enforce_eager=True, enable_prefix_caching=False,
                      enable_chunked_prefill=False, speculative_config=speculation,
                      **latent).create_engine_config()


def loaded(config: VllmConfig, model_config: Any) -> tuple[nn.Module, list[str]]:
    """A model with the tensors of its folder, and which of its parameters these leave unset."""
    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
        model = initialize_model(vllm_config=config, model_config=model_config)
        for parameter in model.parameters():
            parameter.data.fill_(float("nan") if parameter.is_floating_point() else UNSET)
        model.load_weights(get_model_loader(config.load_config).get_all_weights(model_config, model))
        unset = [name for name, parameter in model.named_parameters() if is_unset(parameter)]
    return model, unset


def share(model: nn.Module, target: Path) -> None:
    """The target's embedding and head, which the server gives every module."""
    tensors: dict[str, Tensor] = {}
    for path in target.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()  # noqa: SIM118 - it is no dict
                        if name.endswith("embed_tokens.weight") or name == "lm_head.weight"}
    embedding = next(tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    for name, parameter in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            fill(parameter, embedding)
        elif name.endswith(("lm_head.weight", "shared_head.head.weight")):
            fill(parameter, tensors.get("lm_head.weight", embedding))


class AnyCache(Cache):
    """Also for layers whose keys and values are latent."""

    def __init__(self, config: VllmConfig) -> None:
        layers = config.compilation_config.static_forward_context
        self.config = config
        self.names = [name for name, layer in layers.items() if hasattr(layer, "get_kv_cache_spec")]
        self.spec = layers[self.names[0]].get_kv_cache_spec(config)
        latent = isinstance(self.spec, MLAAttentionSpec)
        for name in self.names:
            shape = (BLOCKS, self.spec.block_size, self.spec.head_size) if latent else \
                (BLOCKS, self.spec.num_kv_heads, self.spec.block_size, 2 * self.spec.head_size)
            layers[name].kv_cache = torch.zeros(shape)
        first = layers[self.names[0]]
        backend = first.attn_backend if hasattr(first, "attn_backend") else first.get_attn_backend()
        self.builder = backend.get_builder_cls()

    def forward(self, model: nn.Module, made: tuple[Any, Tensor], **inputs: Any) -> Any:
        metadata, slots = made
        with set_forward_context(dict.fromkeys(self.names, metadata), self.config, num_tokens=len(slots),
                                 slot_mapping=dict.fromkeys(self.names, slots)):
            return model(**inputs)


def handed_over(config: VllmConfig, tokens: Tensor) -> Tensor:
    """What the target's class returns for the committed tokens [T, H]."""
    model, unset = loaded(config, config.model_config)
    assert not unset, unset
    with set_current_vllm_config(config):
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        cache = AnyCache(config)
        return cache.forward(model, cache.metadata(0, len(tokens), causal=True), input_ids=tokens,
                             positions=torch.arange(len(tokens)))


def draft(config: VllmConfig, model: nn.Module, tokens: Tensor, states: Tensor) -> Tensor:
    """Logits [K, vocabulary] of the server's first draft; the last of `tokens` is the anchor. With a single
    module as Model Runner V1 walks, with several as V2 does, which is given no CPU here."""
    if config.speculative_config.use_multi_module_mtp():
        return cascade(config, model, tokens, states)
    cache, found = AnyCache(config), []
    ids, place = tokens[1:], torch.arange(len(states))
    for _ in range(config.speculative_config.num_speculative_tokens):
        made = cache.forward(model, cache.metadata(int(place[0]), len(place), causal=True), input_ids=ids,
                             positions=place, hidden_states=states)
        last, states = made if isinstance(made, tuple) else (made, made)
        found.append(model.compute_logits(last[-1:])[0])
        ids, place, states = found[-1].argmax(-1, keepdim=True), place[-1:] + 1, states[-1:]
    return torch.stack(found)


def cascade(config: VllmConfig, model: nn.Module, tokens: Tensor, states: Tensor) -> Tensor:
    """Every module takes a step, over all positions, its tokens one further on."""
    found, place = [], torch.arange(len(states))
    for step in range(config.speculative_config.num_speculative_tokens):
        cache = AnyCache(config)
        made = cache.forward(model, cache.metadata(0, len(place), causal=True), input_ids=tokens[1 + step:],
                             positions=place, hidden_states=states, spec_step_idx=step)
        last, states = made if isinstance(made, tuple) else (made, made)
        found.append(model.compute_logits(last[-1:], spec_step_idx=step)[0])
        tokens = torch.cat([tokens, found[-1].argmax(-1, keepdim=True)])
    return torch.stack(found)


@torch.inference_mode()
def run(case: dict[str, Any], config: VllmConfig) -> tuple[dict[str, Any], dict[str, Tensor]]:
    inputs, found = load_file(case["inputs"]), {}
    states = inputs.get("states")
    if case["whole"]:
        states = found["states"] = handed_over(config, inputs["tokens"][:-1])
    draft_config = config.speculative_config.draft_model_config
    model, unset = loaded(config, draft_config)
    share(model, Path(case["target"]))
    with set_current_vllm_config(config):
        process_weights_after_loading(model, draft_config, torch.device("cpu"))
        found["logits"] = draft(config, model.eval(), inputs["tokens"], states)
    return {"class": type(model).__name__, "unset": unset}, found


def main(folder: Path) -> None:
    results, tensors = {}, {}
    for number, case in enumerate(json.loads((folder / "request.json").read_text())):
        config = engine_config(case)
        if number == 0:
            start_distributed(config)
        results[case["name"]], found = run(case, config)
        tensors |= {f"{case['name']}.{name}": tensor.contiguous() for name, tensor in found.items()}
        save_file(tensors, folder / "results.safetensors")
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Runs in vLLM's environment: texts of a real engine, and single steps of it verified many times by vLLM's
own code and by the plugin's, on the same logits.

`request.json` in the folder that is given: `engine` (arguments of vLLM's LLM), `prompts`, `params` (of each
prompt), `batches` (numbers of prompts that run together), `often` and `once` (the numbers of batches whose
first step with a draft for everybody is verified `draws` times, and once with the same random state, by vLLM
and by the plugin). Writes `texts.json`, `with` the plugin and `without`, and `steps.safetensors`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops import topk_topp_sampler

Output = Any


class V1:
    """The step of Model Runner V1: `_sample(logits, metadata)`."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.steps, self.fused = runner, runner._sample.__self__, True
        self.watch: Callable[[tuple[Any, ...]], None] | None = None
        runner._sample = self.sample

    def sample(self, logits: Tensor, metadata: Any) -> Output:
        if not self.fused:
            return self.steps.own(logits, metadata)
        if self.watch is not None and metadata is not None and min(metadata.num_draft_tokens) > 0:
            self.watch((logits, metadata))
        return self.steps.sample(logits, metadata)

    def own(self, step: tuple[Any, ...]) -> Output:
        return self.steps.own(step[0].clone(), step[1])

    def ours(self, step: tuple[Any, ...]) -> Output:
        return self.steps.sample(*step)

    def reseed(self, step: tuple[Any, ...], seeds: Tensor) -> None:
        """vLLM's own code draws anew without it."""
        self.steps._look()
        self.steps.seed = seeds

    def state(self) -> Callable[[], None]:
        """Puts the random numbers back to where they are now."""
        generators = self.runner.input_batch.generators
        kept, common = {at: each.get_state() for at, each in generators.items()}, torch.get_rng_state()

        def back() -> None:
            torch.set_rng_state(common)
            for at, each in generators.items():
                each.set_state(kept[at])

        return back

    def facts(self, step: tuple[Any, ...]) -> dict[str, Tensor]:
        return {"logits": step[0].float(), "ends": step[1].cu_num_sampled_tokens,
                "numbers": numbers(self.runner.input_batch.req_ids)}


class V2:
    """The step of Model Runner V2: its rejection sampler, called with the logits and the batch."""

    def __init__(self, runner: Any) -> None:
        from vllm.triton_utils import tl
        from vllm.v1.worker.gpu.sample.sampler import Sampler
        from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

        # a device's library, of which the interpreter has nothing
        rejection_sampler_utils.tldevice = SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))
        self.rejection, self.sampler = runner.rejection_sampler, runner.sampler
        self.theirs, self.plain, self.mine = RejectionSampler, Sampler, type(self.rejection)
        self.single = type(self.sampler)
        self.watch: Callable[[tuple[Any, ...]], None] | None = None
        form = self

        class Watched(self.mine):
            def __call__(self, *step: Any) -> Output:
                drafted = step[1].num_draft_tokens_per_req
                if form.watch is not None and drafted is not None and min(drafted) > 0:
                    form.watch(step)
                return super().__call__(*step)

        self.watched, self.fused = Watched, True

    @property
    def fused(self) -> bool:
        return self.sampler.__class__ is self.single

    @fused.setter
    def fused(self, wanted: bool) -> None:
        self.rejection.__class__ = self.watched if wanted else self.theirs
        self.sampler.__class__ = self.single if wanted else self.plain

    def own(self, step: tuple[Any, ...]) -> Output:
        self.sampler.__class__ = self.plain
        output = self.theirs.__call__(self.rejection, step[0].clone(), *step[1:])
        self.sampler.__class__ = self.single
        return output

    def ours(self, step: tuple[Any, ...]) -> Output:
        return self.mine.__call__(self.rejection, *step)

    def reseed(self, step: tuple[Any, ...], seeds: Tensor) -> None:
        self.sampler.sampling_states.seeds.gpu[step[1].idx_mapping] = seeds

    def state(self) -> Callable[[], None]:
        return lambda: None  # seeds and positions are all

    def facts(self, step: tuple[Any, ...]) -> dict[str, Tensor]:
        return {"logits": step[0].float(), "ends": step[1].cu_num_logits[1:],
                "numbers": numbers(step[1].req_ids)}


def expanded(x: Tensor, ends: Tensor, count: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """What vLLM's function of this place says it does: x [B] for every token, [count], whose last ones have
    `ends`. In its build for CPUs the result is that of a copy, which is dropped: temperatures and filters of
    drafts are then whatever lay in memory."""
    lengths = torch.diff(ends.long(), prepend=torch.zeros(1, dtype=torch.int64))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(lengths, output_size=count)


def numbers(names: list[str]) -> Tensor:
    """[B]: which request of its batch each one is; their names begin with a running number."""
    running = torch.tensor([int(name.partition("-")[0]) for name in names])
    return running.argsort().argsort()


def tokens(output: Output, width: int) -> Tensor:
    """[B, width] int64, -1 behind what was emitted."""
    found = output.sampled_token_ids.long()
    found = torch.nn.functional.pad(found, (0, width - found.shape[1]), value=-1)
    counts = getattr(output, "num_sampled", None)
    return found if counts is None else found.masked_fill(torch.arange(width) >= counts[:, None], -1)


def drawn_often(form: V1 | V2, step: tuple[Any, ...], draws: int, width: int) -> dict[str, Tensor]:
    """[draws, B, width] of both."""
    requests = len(form.facts(step)["ends"])
    generator = torch.Generator().manual_seed(3)
    seeds = torch.randint(-2 ** 63, 2 ** 63 - 1, (2, draws, requests), generator=generator)
    found: dict[str, list[Tensor]] = {"own": [], "ours": []}
    for name, call, drawn in (("own", form.own, seeds[0]), ("ours", form.ours, seeds[1])):
        for one in drawn:
            form.reseed(step, one)
            found[name].append(tokens(call(step), width))
    return {name: torch.stack(each) for name, each in found.items()} | form.facts(step)


def by_either(form: V1 | V2, step: tuple[Any, ...], width: int) -> dict[str, Tensor]:
    """What the step emits by vLLM's own code and with the plugin, and the log-probabilities of both."""
    found, back = form.facts(step), form.state()
    for name, call in (("own", form.own), ("ours", form.ours)):
        output = call(step)
        found[name] = tokens(output, width)
        found[f"{name}.logprobs"] = output.logprobs_tensors.logprobs
        back()
    return found


def run(request: dict[str, Any], folder: Path) -> None:
    rejection_sampler.expand_batch_to_tokens = expanded
    topk_topp_sampler.HAS_TRITON = False  # its kernel for these filters is none that the interpreter can run
    engine = LLM(**request["engine"])
    runner = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    form = (V2 if hasattr(runner, "req_states") else V1)(runner)
    width = request["engine"]["speculative_config"]["num_speculative_tokens"] + 1
    kept: dict[int, dict[str, Tensor]] = {}

    def watch(number: int, step: tuple[Any, ...]) -> None:
        if len(form.facts(step)["ends"]) == len(request["batches"][number]):
            form.watch = None
            kept[number] = by_either(form, step, width) if number == request["once"] else \
                drawn_often(form, step, request["draws"], width)

    def texts() -> list[list[list[int]]]:
        return [[list(output.outputs[0].token_ids) for output in engine.generate(
            [TokensPrompt(prompt_token_ids=request["prompts"][each]) for each in batch],
            [SamplingParams(**request["params"][each]) for each in batch], use_tqdm=False)]
            for batch in request["batches"]]

    form.fused = False
    without = texts()
    form.fused = True
    found = texts()
    for number in (request["often"], request["once"]):
        form.watch = partial(watch, number)
        engine.generate([TokensPrompt(prompt_token_ids=request["prompts"][each])
                         for each in request["batches"][number]],
                        [SamplingParams(**request["params"][each])
                         for each in request["batches"][number]], use_tqdm=False)
    (folder / "texts.json").write_text(json.dumps({"with": found, "without": without}))
    save_file({f"{number}.{name}": tensor.contiguous() for number, each in kept.items()
               for name, tensor in each.items()}, folder / "steps.safetensors")


if __name__ == "__main__":
    here = Path(sys.argv[1])
    run(json.loads((here / "request.json").read_text()), here)

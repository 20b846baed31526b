"""What tests of several rooms need around the tiny target: its engine, changed copies of it, and samples."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from hydra.utils import get_class, instantiate
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.architectures import losses
from trainer.architectures.base import Drafter
from trainer.architectures.dflash import DFlash
from trainer.data.own_prompts import OwnPrompts
from trainer.data.responses import More, Regenerate
from trainer.engines.base import Group, TargetEngine
from trainer.engines.transformers import TransformersEngine, TransformersRuntime
from trainer.errors import UserError
from trainer.evaluate.while_training import Acceptance, AcceptanceRuntime
from trainer.hidden_states.base import Manifest
from trainer.hidden_states.offline import Offline, OfflineRuntime
from trainer.hidden_states.writer import ShardWriter
from trainer.records import Completion, HiddenStates, Sample, Sampling, Tap
from trainer.strategies import process as processes
from trainer.strategies.base import MakeOptimizer, Placed
from trainer.strategies.single import Single
from trainer.target import Folder, Target
from trainer.training.build import build_drafter, require_buildable


def placed(drafter: Drafter, optimizer: MakeOptimizer) -> Placed:
    """As training in one process has it."""
    return Single().place(drafter, optimizer, processes.Group(0, 1, "cpu"), rows=1)


def engine(dtype: str = "float32", batch: int = 4, prefill_tokens: int = 0, max_length: int = 512,
           kind: type[TransformersEngine] = TransformersEngine) -> TransformersEngine:
    return kind(dtype, batch, prefill_tokens, max_length, False, TransformersRuntime("cpu"))


def regenerate(target: Target, computing: TargetEngine | None = None, **changes: Any) -> Regenerate:
    """The stage as conf/responses has it, short and greedy."""
    return Regenerate(**{"target": target, "engine": computing or engine(), "sampling_of": "settings",
                         "sampling": Sampling(9, 0.0, 1.0, 0), "own": OwnPrompts(0, 64, 1.0, 0.9),
                         "more": More(0, 0.8, 1.0), "calls": "recorded", "too_long": "error",
                         "thinking": None, **changes})


def interrupted(at: int) -> type[TransformersEngine]:
    """An engine that stops like a key press when group number `at` is asked for."""

    class Interrupted(TransformersEngine):
        asked = 0

        def completions(self, groups: Iterable[Group],
                        sampling: Sampling) -> Iterator[tuple[str, Completion]]:
            def until_the_key_is_pressed() -> Iterator[Group]:
                for group in groups:
                    self.asked += 1
                    if self.asked == at:
                        raise KeyboardInterrupt
                    yield group

            return super().completions(until_the_key_is_pressed(), sampling)

    return Interrupted


def copied(target: Target, folder: Path, weights: Callable[[dict[str, Tensor]], Any] | None = None,
           **files: dict[str, Any]) -> Target:
    """The target in a folder of its own: `weights` changes its tensors in place, `files` updates JSON files
    by their stem."""
    shutil.copytree(target.folder, folder)
    if weights is not None:
        tensors = load_file(folder / "model.safetensors")
        weights(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for stem, changes in files.items():
        path = folder / f"{stem}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return replace(target, source=Folder(str(folder)))


def uneven_norms(tensors: dict[str, Tensor]) -> None:
    """Gives every norm weights of its own: with weights of one, a norm taken twice goes unseen."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            tensor.copy_(torch.rand(tensor.shape, generator=generator) * 1.5 + 0.25)
            assert "norm" in name


def random_samples(lengths: Sequence[int], prompt: int = 8, seed: int = 0) -> list[Sample]:
    """Samples of random bytes, of which all after the first `prompt` tokens are supervised."""
    generator = torch.Generator().manual_seed(seed)
    return [Sample(f"s{number}", tuple(torch.randint(0, 256, (length,), generator=generator).tolist()),
                   tuple(index >= prompt for index in range(length)))
            for number, length in enumerate(lengths)]


def states_of(target: Target, samples: Sequence[Sample], tap_layers: Sequence[Tap]) -> list[HiddenStates]:
    with engine().load(target.folder, target.end_ids) as loaded:
        return list(loaded.hidden_states([sample.tokens for sample in samples], tap_layers))


def write_responses(folder: Path, samples: Sequence[Sample], heldout: int = 0) -> Path:
    """A finished stage `responses` with these samples, the last `heldout` of them held out."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "responses.jsonl").open("w") as file:
        for number, sample in enumerate(samples):
            start = sample.loss_mask.index(True) if True in sample.loss_mask else len(sample.tokens)
            split = "heldout" if number >= len(samples) - heldout else "train"
            file.write(json.dumps({"id": sample.id, "split": split, "category": sample.category,
                                   "language": sample.language, "thinking": sample.thinking,
                                   "prompt": sample.tokens[:start], "tokens": sample.tokens[start:],
                                   "finish_reason": "stop"}) + "\n")
    return folder


def finished_inputs(target: Target, folder: Path, samples: Sequence[Sample], heldout: int,
                    layers: Sequence[int] = (1, 2)) -> dict[str, Path]:
    """Finished stages `responses` and `hidden_states` of the samples."""
    states = folder / "hidden_states"
    states.mkdir(parents=True)
    with ShardWriter(states, manifest_of(target, layers), shard_bytes=200_000) as writer:
        for sample, state in zip(samples, states_of(target, samples, layers), strict=True):
            writer.append(sample, state)
    return {"responses": write_responses(folder / "responses", samples, heldout), "hidden_states": states}


def manifest_of(target: Target, layers: Sequence[int], **changes: Any) -> Manifest:
    """Of states in float32, stored as they are."""
    return replace(Manifest(target.identity, target.template_hash, list(layers), target.config["hidden_size"],
                            "float32", "native", "supervised", "tests"), **changes)


OFFLINE = partial(Offline, runtime=OfflineRuntime("first", 1))  # as conf/hidden_states has it


def acceptance(every: int | None = None, computing: TargetEngine | None = None, **changes: Any) -> Acceptance:
    """Measuring as conf/train has it, small; never, unless told."""
    return Acceptance(**{"every": every, "prompts": 3, "max_new_tokens": 16, "k": None, "dtype": "float32",
                         "tolerance": 0.1, "weights": {}, "engine": computing or engine(),
                         "runtime": AcceptanceRuntime(["speculators"], "cpu"), **changes})


def uneven(drafter: Drafter, seed: int = 0, scale: float = 0.15) -> Drafter:
    """Random weights everywhere, norms included, large enough that every part of the drafter shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            drawn = torch.rand(parameter.shape, generator=generator)
            parameter.copy_(drawn * 1.5 + 0.25 if parameter.ndim == 1 else (drawn - 0.5) * 4 * scale)
    return drafter


def objective(*terms: str, gamma: float | None = 7.0) -> losses.Objective:
    """The terms by the names that they have in logs, each with weight 1."""
    kinds = {kind.name: kind for kind in (losses.CrossEntropy, losses.ForwardKL, losses.TotalVariation,
                                          losses.NegativeLogAcceptance, losses.LK)}
    return losses.Objective([kinds[name]() for name in terms], losses.Exponential(gamma))


def dflash(target: Target, counts: Tensor | None = None, **settings: Any) -> DFlash:
    """DFlash as conf/drafter/dflash.yaml has it, small."""
    return small(target, "dflash", counts, **settings)


def small(target: Target, name: str, counts: Tensor | None = None, **settings: Any) -> Any:
    """The drafter of conf/drafter/<name>.yaml, small."""
    return build_drafter(make_small(name, **settings), target,
                         torch.arange(320).flip(0) if counts is None else counts)


# what no other drafter has, or has by another name or of another size
OWN = {"gemma4_assistant": {"layer_types": ["sliding_attention", "full_attention"], "hidden_size": 32,
                            "heads": 2, "intermediate_size": 48},
       "mtp": {"tap_layers": [3]}}  # the tiny target has three layers


def suits(target: Target, name: str) -> bool:
    """Whether a drafter of this name can be built for the target."""
    try:
        require_buildable(make_small(name), target, None)
    except UserError:
        return False
    return True


def make_dflash(**settings: Any) -> partial[DFlash]:
    return make_small("dflash", **settings)


def make_small(name: str, **settings: Any) -> partial[Any]:
    node = yaml.safe_load((Path(__file__).parents[1] / f"conf/drafter/{name}.yaml").read_text())
    given = {"layers": 2, "block_size": 5, "steps": 4, "anchors": 24, "tap_layers": [1, 2],
             "draft_vocab_size": 280, "markov_rank": 6, "selector_rank": 6, "selector_top_k": 5, "seed": 3,
             "attention": "reference", "loss_chunk": 10_000, "start": "random"}
    kind = get_class(node["_target_"])
    kept = {key: value for key, value in node.items() if key[0] != "_"}
    kept |= {key: value for key, value in given.items() if key in node} | OWN.get(name, {}) | settings
    assert set(kept) <= set(node)
    if isinstance(kept["objective"], str):
        kept["objective"] = objective(kept["objective"])
    elif isinstance(kept["objective"], dict):
        kept["objective"] = instantiate(kept["objective"], _convert_="all")
    return partial(kind, **kept)

"""The folders that we export mean to vLLM what they mean to us: its own model class gives our logits.

One process of vLLM's interpreter (`parity_worker.py`) answers all cases: both formats, whole and reduced
vocabulary, a random target with its own head and the real one with a tied head, and folders that are wrong in
one place, which must be seen. Weights of the drafters are random and wide, so that no part of them can be
left out without a trace.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm_support import own_cores, vllm_python

from trainer._paths import find
from trainer.architectures.base import Drafter
from trainer.compose import compose_configuration
from trainer.engines.transformers import TransformersEngine, TransformersRuntime
from trainer.engines.vllm_installation import find_installation
from trainer.export.formats import FORMATS, Serving
from trainer.pipeline import build
from trainer.target import Target
from trainer.target_made import Kept, RandomLlama
from trainer.training.build import build_drafter

pytestmark = pytest.mark.vllm
TOLERANCE = 1e-4  # float32, at logits of about 17
SEEN = 100 * TOLERANCE  # a wrong folder must be wrong by far more
TARGETS = {"random": "target=tiny", "smollm2": "target=smollm2"}
BLOCK = {"random": 5, "smollm2": 8}
ROWS = {"random": 300, "smollm2": 4096}
FORMS = sorted(Drafter.formats)  # of the drafters that are served beside their target
SPREAD = {"random": 0.15, "smollm2": 0.05}  # of the weights
TEXT = "The quick brown fox jumps over the lazy dog. Plants make food from light, and Paris is the capital of"
Config = dict[str, Any]


def shift_layers(config: Config, form: str) -> None:
    key = "aux_hidden_state_layer_ids" if form == "speculators" else "eagle_aux_hidden_state_layer_ids"
    config[key] = [layer + 1 for layer in config[key]]


def change_rope(config: Config, form: str) -> None:
    geometry = config["transformer_layer_config"] if form == "speculators" else config
    geometry["rope_parameters"]["rope_theta"] /= 10


def make_causal(config: Config, form: str) -> None:
    if form == "speculators":
        config["sliding_window_non_causal"] = False
    else:
        config["dflash_config"]["causal"] = True


def change_mask(config: Config, form: str) -> None:
    (config if "mask_token_id" in config else config["dflash_config"])["mask_token_id"] -= 1


MISTAKES: dict[str, Callable[[Config, str], None]] = {
    "layers": shift_layers, "rope": change_rope, "causal": make_causal, "mask": change_mask}


class Answers:
    """What both sides say about every case."""

    def __init__(self, ours: dict[str, Tensor], drafters: dict[str, Drafter], folder: Path) -> None:
        self.ours, self.drafters = ours, drafters
        self.logits = load_file(folder / "results.safetensors")
        self.results = json.loads((folder / "results.json").read_text())

    def pair(self, case: str, known: str | None = None) -> tuple[Tensor, Tensor]:
        """Our logits of the right folder `known` and vLLM's of `case`, both [K, draft vocabulary]."""
        ids = self.drafters[known or case].vocabulary.ids
        return self.ours[known or case], self.logits[case][1:, ids]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    """The random target has a head of its own, the real one shares its embedding."""
    found = {}
    for name, choice in TARGETS.items():
        found[name] = build(compose_configuration([choice], find()).settings["target"])
    found["random"] = random_target(tmp_path_factory.mktemp("cache"))
    return found


def random_target(cache: Path) -> Target:
    source = RandomLlama(hidden_size=64, layers=3, heads=2, key_value_heads=1, intermediate_size=128,
                         vocab_size=320, tied=False, seed=7, scale=0.2, runtime=Kept(str(cache)))
    return Target("random", source, "<|mask|>", [1, 2], {}, 512, False)


@pytest.fixture(scope="module")
def answers(targets: dict[str, Target], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp("parity")
    ours, drafters, cases = {}, {}, []
    for name, target in targets.items():
        inputs, path = states(target), folder / f"{name}.safetensors"
        save_file(inputs, path)
        for rows in (None, ROWS[name]):
            drafter = random_drafter(name, target, rows)
            for form in FORMS:
                case = f"{name}-{form}-{rows or 'all'}"
                export(drafter, form, folder / case, target)
                drafters[case], ours[case] = drafter, own_logits(drafter, inputs)
                cases.append(request(case, folder, target, path, form == "speculators", drafter.max_k,
                                     each_missing=name == "random"))
                if name == "random" and rows is None:
                    cases += [request(wrong_copy(folder / case, form, mistake), folder, target, path,
                                      form == "speculators", drafter.max_k) for mistake in MISTAKES]
    (folder / "request.json").write_text(json.dumps(cases))
    run_worker(folder)
    return Answers(ours, drafters, folder)


def states(target: Target) -> dict[str, Tensor]:
    """A text, its last token the anchor, and the target's states after every number of layers before it."""
    tokens = target.tokenizer.encode(TEXT)[:48]
    engine = TransformersEngine("float32", 1, 0, 512, False, TransformersRuntime("cpu"))
    count = target.config["num_hidden_layers"] + 1
    with engine.load(target.folder, target.end_ids):
        taps = next(engine.hidden_states([tokens], range(count))).taps[:-1]
    return {"tokens": torch.tensor(tokens)} | {
        f"layer.{layer}": part.contiguous() for layer, part in enumerate(taps.chunk(count, dim=-1))}


def random_drafter(name: str, target: Target, rows: int | None) -> Drafter:
    node = compose_configuration(["recipe=smoke", "drafter=dflash"], find()).settings["drafter"]
    make = build(node | {"layers": 2, "block_size": BLOCK[name], "tap_layers": list(target.tap_layers),
                         "draft_vocab_size": rows})
    drafter = build_drafter(make, target, torch.arange(target.config["vocab_size"]) * 7919 % 1000)
    spread(drafter, SPREAD[name])
    for layer in drafter.layers:  # the same everywhere: see `BlockAttention`
        layer.self_attn.k_norm.weight.copy_(drafter.layers[0].self_attn.k_norm.weight)
    return drafter


def spread(drafter: Drafter, width: float) -> None:
    """Gives it random weights, wide enough that no part of them can be left out without a trace."""
    drafter.eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for parameter in drafter.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else width * noise)


def export(drafter: Drafter, form: str, folder: Path, target: Target) -> None:
    serving = Serving(str(target.folder), ["LlamaForCausalLM"], drafter.max_k)
    FORMATS[form].write(folder, drafter.export(), serving, torch.float32)


def own_logits(drafter: Drafter, inputs: dict[str, Tensor]) -> Tensor:
    taps = torch.cat([inputs[f"layer.{layer}"] for layer in drafter.tap_layers], dim=-1)
    *known, anchor = inputs["tokens"].tolist()
    return drafter.draft_logits(drafter.extend(drafter.new_context(), known, taps), anchor, drafter.max_k)


def wrong_copy(right: Path, form: str, mistake: str) -> str:
    wrong = right.with_name(f"{right.name}-{mistake}")
    shutil.copytree(right, wrong)
    config = json.loads((wrong / "config.json").read_text())
    MISTAKES[mistake](config, form)
    (wrong / "config.json").write_text(json.dumps(config))
    return wrong.name


def request(case: str, folder: Path, target: Target, inputs: Path, alone: bool, k: int,
            each_missing: bool = False) -> dict[str, Any]:
    """`alone`: vLLM is given the drafter's folder and nothing else."""
    return {"name": case, "method": "dflash", "target": str(target.folder), "drafter": str(folder / case),
            "inputs": str(inputs), "k": None if alone else k, "each_missing": each_missing}


def run_worker(folder: Path, worker: str = "parity_worker.py", needs_v2: bool = False) -> None:
    found = find_installation(vllm_python())
    variables = found.environment(str(own_cores()[0]), kv_cache_gib=1)
    variables |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    variables |= found.shim(folder / "shim", needs_v2)
    command = [found.python, str(Path(__file__).with_name(worker)), str(folder)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def names(targets: tuple[str, ...] = tuple(TARGETS), reduced: tuple[bool, ...] = (False, True)) -> list[str]:
    return [f"{name}-{form}-{ROWS[name] if small else 'all'}"
            for name in targets for small in reduced for form in FORMS]


@pytest.mark.parametrize("case", names())
def test_logits_are_ours(answers: Answers, case: str) -> None:
    expected, found = answers.pair(case)
    assert answers.results[case]["class"] == "DFlashQwen3ForCausalLM"
    assert 5 < expected.abs().max() < 500, "the bound below is meant for logits of this scale"
    assert float((found - expected).abs().max()) <= TOLERANCE
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    outside = torch.ones(answers.logits[case].shape[1], dtype=torch.bool)
    outside[answers.drafters[case].vocabulary.ids] = False
    assert answers.logits[case][:, outside].eq(-torch.inf).all(), "only the draft vocabulary can be proposed"


@pytest.mark.parametrize("case", names())
def test_the_folder_says_what_we_meant(answers: Answers, targets: dict[str, Target], case: str) -> None:
    result, drafter, target = answers.results[case], answers.drafters[case], targets[case.partition("-")[0]]
    assert result["layers"] == list(drafter.tap_layers) and result["mask_token_id"] == target.mask_token_id
    assert result["causal"] == [False, False]
    assert (result["k"], result["target"]) == (drafter.max_k, str(target.folder))


@pytest.mark.parametrize("case", names())
def test_only_what_the_target_shares_is_left_unset(answers: Answers, case: str) -> None:
    assert sorted(answers.results[case]["unset"]) == shared(answers.drafters[case])


@pytest.mark.parametrize("case", names(("random",)))
def test_every_missing_tensor_is_found(answers: Answers, case: str) -> None:
    """vLLM loads a folder that lacks a tensor without a word; the check must name the parameter."""
    drafter, missing = answers.drafters[case], answers.results[case]["missing"]
    assert set(missing) == set(drafter.export().weights)
    for tensor, unset in missing.items():
        more = sorted(set(unset) - set(shared(drafter)))
        assert more == [parameter_of(tensor)], f"without {tensor}"


def shared(drafter: Drafter) -> list[str]:
    """`mask_embedding` is filled from a file that no folder of ours has, and otherwise not read."""
    head = [] if drafter.vocabulary.reduced else ["lm_head.weight"]
    return sorted([*head, "model.embed_tokens.weight", "model.mask_embedding"])


def parameter_of(tensor: str) -> str:
    """vLLM's parameter that a tensor of ours goes into, alone or stacked with others."""
    for parts, whole in (("qkv", "qkv_proj"), (("gate", "up"), "gate_up_proj")):
        for part in parts:
            tensor = tensor.replace(f".{part}_proj.", f".{whole}.")
    return {"d2t": "draft_id_to_target_id", "lm_head.weight": tensor}.get(tensor, f"model.{tensor}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mistake", sorted(MISTAKES))
def test_a_wrong_folder_is_seen(answers: Answers, form: str, mistake: str) -> None:
    right = f"random-{form}-all"
    expected, found = answers.pair(f"{right}-{mistake}", right)
    assert float((found - expected).abs().max()) > SEEN

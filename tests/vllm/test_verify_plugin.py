"""Fused verification inside real vLLM: on the same logits it draws what vLLM's rejection sampler draws,
greedy texts are the same with it and without, and what it does not know is vLLM's own, to the bit.

The target's next token depends on the last one alone, and every prompt holds each token with its likely
followers, so that n-grams draft in every step and are often accepted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm_support import FEW_PROCESSES, small_server, vllm_python

from trainer.engines.vllm_installation import find_installation
from trainer.records import Sampling
from trainer.target_made import Kept, RandomLlama

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from laws import fit, law

pytestmark = pytest.mark.vllm
K, VOCABULARY, FITS = 3, 320, 1e-4
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95}, {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 5}]
UNKNOWN: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 3}, "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.0}, "repetition_penalty": {"repetition_penalty": 1.4},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": list(range(0, VOCABULARY, 4))},
    "bad_words": {"bad_words": list("abcdefghijklmnopqrstuvwxyz")},
    "allowed_token_ids": {"allowed_token_ids": list(range(0, VOCABULARY, 3))}}
OFTEN, ONCE, ALONE = range(3)
CASES = {"v1-ngram": (False, "ngram", 2000), "v1-model": (False, "probabilistic", 2000),
         "v2-model": (True, "probabilistic", 100), "v2-greedy": (True, "greedy", 200)}
DRAWN_ANYHOW = "v1-model"  # Model Runner V1 draws the drafts themselves without a request's seed


@dataclass
class Found:
    """What the worker wrote and said."""

    case: str
    texts: dict[str, list[list[list[int]]]]
    steps: dict[str, Tensor]
    log: str

    def place(self, batch: int, number: int) -> int:
        """Where request `number` of a batch stood in the step that was looked at."""
        return self.steps[f"{batch}.numbers"].tolist().index(number)

    def drawn(self, number: int) -> tuple[Tensor, Tensor]:
        """[draws, K + 1] of vLLM's own code and of ours."""
        own, ours = (self.steps[f"{OFTEN}.{name}"][:, self.place(OFTEN, number)] for name in ("own", "ours"))
        return own, ours

    def first_row(self, number: int) -> Tensor:
        place, ends = self.place(OFTEN, number), self.steps[f"{OFTEN}.ends"].tolist()
        return self.steps[f"{OFTEN}.logits"][[0, *ends][place]]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The target, and one beside it that says something similar, to draft with."""
    kept = Kept(str(tmp_path_factory.mktemp("cache")))
    folders = []
    for seed in (5, 6):
        folders.append(RandomLlama(hidden_size=64, layers=1, heads=2, key_value_heads=1, intermediate_size=64,
                                   vocab_size=VOCABULARY, tied=False, seed=seed, scale=0.3, runtime=kept
                                   ).folder())
    weights = load_file(folders[0] / "model.safetensors")
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name].zero_()
    save_file(weights, folders[0] / "model.safetensors", metadata={"format": "pt"})
    noise = torch.randn(weights["lm_head.weight"].shape, generator=torch.Generator().manual_seed(1))
    weights["lm_head.weight"] += 0.1 * noise
    save_file(weights, folders[1] / "model.safetensors", metadata={"format": "pt"})
    return folders[0], folders[1]


def prompts(target: Path, count: int) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        follower = model(torch.arange(VOCABULARY)[:, None]).logits[:, 0].argmax(1).tolist()
    circle = []
    for token in range(VOCABULARY):
        for _ in range(K + 1):
            circle.append(token)
            token = follower[token]
    return [circle[4 * start:] + circle[:4 * start] for start in range(count)]


def find(case: str, targets: tuple[Path, Path], folder: Path) -> Found:
    v2, drafts, draws = CASES[case]
    target, drafter = targets
    speculation: dict[str, Any] = {"method": "draft_model", "model": str(drafter),
                                   "draft_sample_method": drafts}
    if drafts == "ngram":
        speculation = {"method": "ngram", "prompt_lookup_max": 1, "prompt_lookup_min": 1}
    common = {"max_tokens": 12, "ignore_eos": True}
    plain = {"temperature": 0.8, "seed": 5}
    params = [*WAYS, *({"temperature": 0.8, "seed": 11, **more} for more in UNKNOWN.values()),
              {"temperature": 0.0, "repetition_penalty": 1.4}, {"temperature": 0.0}, plain, plain,
              {"temperature": 0.8}]
    numbers = list(range(len(params)))
    given = prompts(target, len(params) - 1)
    given.insert(-1, given[-2])  # the two plain ones with a seed are the same
    batches = [numbers[:len(WAYS)], [each for each in numbers[len(WAYS):] if each != len(params) - 2],
               [len(params) - 2]]
    engine = {"model": str(target), "dtype": "float32", "max_model_len": 2048, "max_num_seqs": 16,
              "max_num_batched_tokens": 2048 * 16, "enforce_eager": True, "enable_prefix_caching": False,
              "enable_chunked_prefill": False,
              "speculative_config": {**speculation, "num_speculative_tokens": K}}
    request = {"engine": engine, "prompts": given, "params": [{**common, **each} for each in params],
               "batches": batches, "often": OFTEN, "once": ONCE, "draws": draws}
    (folder / "request.json").write_text(json.dumps(request))
    installation = find_installation(vllm_python())
    settings = small_server(environment={**FEW_PROCESSES, "TRAINER_FUSED_VERIFY": 1})
    variables = settings.variables(installation, True, folder / "shim", needs_v2=v2)
    command = [installation.python, str(Path(__file__).with_name("verify_worker.py")), str(folder)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-3000:]
    return Found(case, json.loads((folder / "texts.json").read_text()),
                 load_file(folder / "steps.safetensors"), log)


@pytest.fixture(scope="module", params=CASES)
def found(request: pytest.FixtureRequest, targets: tuple[Path, Path],
          tmp_path_factory: pytest.TempPathFactory) -> Found:
    return find(request.param, targets, tmp_path_factory.mktemp("worker"))


def alike(one: Tensor, other: Tensor) -> float:
    """The p-value of two samples, [n, columns] each, as of one law, by chi squared; rare cells are one."""
    rows, cell = torch.cat([one, other]).unique(dim=0, return_inverse=True)
    table = torch.stack([cell[:len(one)].bincount(minlength=len(rows)),
                         cell[len(one):].bincount(minlength=len(rows))]).double()
    rare = table.sum(0) < 10
    table = torch.cat([table[:, ~rare], table[:, rare].sum(1, keepdim=True)], 1)
    table = table[:, table.sum(0) > 0]
    expected = table.sum(1, keepdim=True) * table.sum(0) / table.sum()
    statistic = ((table - expected) ** 2 / expected).sum()
    freedom = torch.tensor(max(1, table.shape[1] - 1) / 2).double()
    return float(torch.special.gammaincc(freedom, statistic / 2))


@pytest.mark.parametrize("number", range(len(WAYS)))
def test_a_step_draws_what_vllm_draws(found: Found, number: int) -> None:
    own, ours = found.drawn(number)
    if WAYS[number]["temperature"] == 0:
        assert (own == own[0]).all() and torch.equal(own, ours)
        return
    assert alike(own, ours) > FITS
    assert len(ours.unique(dim=0)) > 1, "nothing was drawn"
    if not found.case.endswith("model"):  # with drafts of one token, whatever they are, the first one's law
        chances = torch.tensor(law(found.first_row(number), **WAYS[number])).double()
        assert fit(ours[:, 0], chances) > FITS


def test_drafts_are_accepted_and_refused(found: Found) -> None:
    counts = torch.cat([(found.drawn(number)[1] >= 0).sum(1) for number in range(len(WAYS))])
    assert (counts == 1).any() and (counts == K + 1).any()


def test_other_laws_are_told(found: Found) -> None:
    """What was drawn is not of half the temperature, and not what another request draws."""
    own, ours = found.drawn(2)
    other = found.drawn(4)[1]
    # of few draws whole rows are too rare to tell, and first tokens are not
    assert min(alike(own, other), alike(own[:, :1], other[:, :1])) < 1e-6
    chances = torch.tensor(law(found.first_row(2), WAYS[2]["temperature"] / 2)).double()
    assert fit(ours[:, 0], chances) < 1e-6


@pytest.mark.parametrize("feature", UNKNOWN)
def test_requests_that_it_does_not_know_are_vllm_s_own(found: Found, feature: str) -> None:
    number = list(UNKNOWN).index(feature)
    place = found.place(ONCE, number)
    own, ours = (found.steps[f"{ONCE}.{name}"][place] for name in ("own", "ours"))
    assert torch.equal(own, ours)
    if found.case != DRAWN_ANYHOW:
        assert found.texts["with"][ONCE][number] == found.texts["without"][ONCE][number]
    said = [line for line in found.log.splitlines() if f"fused verification does not know {feature}:" in line]
    assert len(said) == 1, "told once"


def test_log_probabilities_beside_others_are_vllm_s(found: Found) -> None:
    number = list(UNKNOWN).index("logprobs")
    at = found.place(ONCE, number)
    own, ours = (found.steps[f"{ONCE}.{name}.logprobs"] for name in ("own", "ours"))
    rows = slice(at * (K + 1), at * (K + 1) + int((found.steps[f"{ONCE}.own"][at] >= 0).sum()))
    if found.case.startswith("v2"):  # by rows of logits there
        start = [0, *found.steps[f"{ONCE}.ends"].tolist()][at]
        rows = slice(start, start + rows.stop - rows.start)
    assert torch.equal(own[rows], ours[rows]) and own[rows].isfinite().any()


def test_greedy_texts_are_the_same_with_it(found: Found) -> None:
    with_it, without = found.texts["with"], found.texts["without"]
    assert with_it[OFTEN][0] == without[OFTEN][0] and len(with_it[OFTEN][0]) == 12
    for number in (len(UNKNOWN), len(UNKNOWN) + 1):  # with a penalty, and without
        assert with_it[ONCE][number] == without[ONCE][number]


def test_a_seed_gives_the_same_text_in_any_batch(found: Found) -> None:
    seeded, unseeded = found.texts["with"][ONCE][-2:]
    assert seeded != unseeded
    assert (found.texts["with"][ALONE] == [seeded]) == (found.case != DRAWN_ANYHOW)


def test_it_says_what_it_does(found: Found) -> None:
    runner = "v1.worker.cpu.model_runner" if found.case.startswith("v2") else "v1.worker.cpu_model_runner"
    assert f"fused verification: kernel cpu behind vllm.{runner}'s rejection sampler" in found.log


def test_a_server_with_it_says_the_same(targets: tuple[Path, Path], tmp_path: Path) -> None:
    """`vllm serve` as it is, but for the environment variable."""
    given, how = prompts(targets[0], 4), Sampling(16, 0.0, 1.0, 0)
    answers = {}
    for name, environment in (("with", {"TRAINER_FUSED_VERIFY": 1}), ("without", {})):
        server = small_server(python=vllm_python(), max_model_len=2048,
                              environment={**FEW_PROCESSES, **environment})
        with server.serve(targets[0], tmp_path / f"{name}.log", method="ngram", k=K) as running:
            answers[name] = [answer.tokens for answer in running.complete(given, how, 4)]
            assert running.counters().accepted > 0
        told = "fused verification: kernel cpu" in (tmp_path / f"{name}.log").read_text()
        assert told == (name == "with")
    assert answers["with"] == answers["without"]


TRIED = """
import os, sys, vllm
from trainer.vllm_plugin import register
for version, switch, kernel in (each.split() for each in sys.argv[1:]):
    vllm.__version__ = version
    os.environ |= {"TRAINER_FUSED_VERIFY": switch, "TRAINER_VERIFY_KERNEL": kernel}
    try:
        print(register())
    except ValueError as error:
        print(error)
"""


def test_it_refuses_what_it_was_not_tried_with(tmp_path: Path) -> None:
    """In vLLM's own environment, which lacks the trainer's packages: an error, and not vLLM without it."""
    installation = find_installation(vllm_python())
    settings = small_server(environment={**FEW_PROCESSES, "TRAINER_FUSED_VERIFY": 1})
    variables = settings.variables(installation, True, tmp_path / "shim")
    cases = ["0.33.1 0 cpu", "0.33.1 1 cpu", "0.32.0 1 fast", "0.32.0 yes cpu", "0.32.0+cpu 1 cpu"]
    done = subprocess.run([installation.python, "-c", TRIED, *cases], env=variables, capture_output=True,
                          text=True, check=True)
    off, other, kernel, switch, on = done.stdout.splitlines()[-len(cases):]
    assert (off, on) == ("None", "None")
    assert other == (
        "TRAINER_FUSED_VERIFY=1 was tried with vLLM 0.32.0 alone, and this is vLLM 0.33.1: leave "
        "TRAINER_FUSED_VERIFY out, which gives vLLM's own verification, or install that version")
    assert kernel.startswith("TRAINER_VERIFY_KERNEL: verify=fast is not known")
    assert switch.startswith("TRAINER_FUSED_VERIFY=yes is not known; set 1")

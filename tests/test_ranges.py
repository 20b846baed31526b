"""Settings out of range, through the command line's own check: each names the setting, what was found and
what is expected, before anything is built."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trainer import pipeline
from trainer._fits import locate, mismatch, parameters_of
from trainer._paths import find
from trainer.check import check
from trainer.compose import compose_configuration
from trainer.errors import UserError
from trainer.ranges import Above, AtLeast, AtMost, Below, Bound, Distinct, require_device

CHOICES = find()
BAD = {
    "prompts.limit": (0, -1), "prompts.heldout": (-1, None), "prompts.max_bad_share": (-0.1, 1.5, "few"),
    "responses.sampling.max_new_tokens": (0, -5),
    "responses.sampling.temperature": (-0.1, float("nan")), "responses.sampling.top_p": (0, 1.01),
    "responses.sampling.seed": (-1,), "responses.more.answers": (-1,),
    "responses.more.temperature": (0,), "responses.more.top_p": (0,),
    "target.tap_layers": ([], [1, 1], [-1]), "target.max_length": (1,),
    "target_engine.dtype": ("int8", "cdouble"), "target_engine.batch": (0,),
    "target_engine.prefill_tokens": (-1,), "hidden_states.dtype": ("int8",),
    "hidden_states.probe_rows": (0,), "hidden_states.runtime.shard_gib": (0, float("inf"), "abc"),
    "hidden_states.runtime.commit_tokens": (0,), "hidden_states.source.runtime.verify": ("often",),
    "hidden_states.source.runtime.ahead": (-1,), "hardware.device": ("foo", "cuda:", "cuda:-1"),
    "hardware.processes": (0, 1.5),
    "hardware.precision": ("float16",), "hardware.attention": ("fast",), "hardware.verify": ("fast",),
    "drafter.layers": (0,), "drafter.anchors": (0,), "drafter.loss_chunk": (0,),
    "drafter.draft_vocab_size": (0, -1), "drafter.intermediate_size": (0,),
    "drafter.objective.positions.gamma": (0, -1.0, float("nan")),
    "train.epochs": (0, -1), "train.steps": (0,), "train.tokens": (0, 1, 10**12), "train.accumulate": (0,),
    "train.warmup": (-0.1, 1.5, float("nan"), float("inf")), "train.floor": (-1, float("nan")),
    "train.clip": (0, -1.0, float("nan")), "train.precision": ("float16",),
    "train.heldout_every": (0, None, "abc"), "train.acceptance.every": (0, "abc"),
    "train.acceptance.prompts": (0,), "train.acceptance.max_new_tokens": (1,), "train.acceptance.k": (0,),
    "train.acceptance.tolerance": (0,), "train.acceptance.weights": (3, "code"),
    "evaluate.turns": ("some",), "train.acceptance.dtype": ("int8",),
    "train.runtime.checkpoint_every": (0, None, "abc"), "train.runtime.log_every": (0, None),
    "train.runtime.keep_checkpoints": (0,), "optimizer.lr": (-1.0, float("nan")),
    "optimizer.momentum": (1.0,), "optimizer.betas": ([0.9], [0.9, 1.0]),
    "export.formats": ([], ["native", "native"], ["gguf"]), "export.dtype": ("int8", "float64"),
    "export.default_k": (0,), "export.probe_rows": (0,),
    "export.calibration_drafts": (1, 2.5), "evaluate.confidence": (-0.1, 1.1, "abc"),
    "evaluate.prompts": (0,), "evaluate.users": (0,),
    "evaluate.k": ([], [2, 2], [0]), "evaluate.rounds": (0,), "evaluate.warmup": (-1,),
    "evaluate.agreement": (-0.1,), "evaluate.dtype": ("int8",), "evaluate.format": ("gguf",),
    "sweep.k": ([], [2, 2], [0]), "sweep.users": ([], [1, 1], [0]), "sweep.also": (["medusa"],),
    "sweep.temperatures": ([], [-0.1]), "sweep.urls": (["a:80"],), "sweep.categories": ([], ["a", "a"]),
    "sweep.prompts": (0,), "sweep.max_new_tokens": (0,), "sweep.top_p": (0, 1.01), "sweep.seed": (-1,),
    "sweep.warmup": (-1,), "sweep.repeats": (0,), "sweep.too_long": ("keep",), "sweep.together": (1,),
    "engine.url": ("localhost:8000",), "engine.runtime.port": (-1, 65536), "engine.max_num_seqs": (0,),
    "engine.runtime.startup_timeout_s": (0,), "engine.runtime.request_timeout_s": (float("nan"),),
    "engine.runtime.threads": ("all",), "engine.runtime.log_level": ("LOUD",), "engine.dtype": ("int8",),
    "serve_command.k": (0,), "serve_command.platform": ("tpu",), "serve_command.method": ("",),
    "serve_command.speculator": ("",),
    "report.rise_tolerance": (-1.0,), "seed": (-1,), "run": ([], ["train", "train"]), "run_root": ("",),
}
OTHERS = {
    "prompts=mixture": {"prompts.languages.confidence": (-0.1, 1.5)},
    "strategy=zero2": {"strategy.stage": (0, 4)},
    "drafter=dflash": {"drafter.block_size": (1,)},
    "target_engine=vllm": {"target_engine.runtime.in_flight": (0,), "target_engine.runtime.patience_s": (0,),
                           "target_engine.runtime.answer_urls": (["x"],), "target_engine.dtype": ("int8",)},
    "hidden_states=hybrid": {"hidden_states.source.runtime.budget_gib": (-1,),
                             "hidden_states.runtime.device": ("foo",),
                             "hidden_states.source.runtime.shard_gib": (0,)},
}


def told(*settings: str) -> list[str]:
    configuration = compose_configuration(list(settings), CHOICES)
    return check(configuration, CHOICES.groups(), pipeline.Stage)


def written(value: Any) -> str:
    return str(value).lower() if isinstance(value, float) else json.dumps(value)


def cases() -> Iterator[tuple[str, ...]]:
    """Several settings in one composition: each has its own line."""
    for option, table in (("hardware=cpu", BAD), *OTHERS.items()):
        for place in range(max(map(len, table.values()))):
            yield option, *(f"{key}={written(values[place])}" for key, values in table.items()
                            if place < len(values))


@pytest.mark.parametrize("settings", [*cases()], ids=lambda settings: settings[0])
def test_each_bad_value_is_one_line_that_names_it(settings: tuple[str, ...]) -> None:
    lines = {line.split(" ", 1)[0]: line for line in told(*settings)}
    assert lines.keys() == {setting.partition("=")[0] for setting in settings[1:]}
    for line in lines.values():
        assert " (command line): must be " in line and ", but is " in line, line


def test_every_number_among_the_settings_has_a_range() -> None:
    """Of our own constructors; a new setting is seen here the moment its YAML exists."""
    free: set[str] = set()
    for group, options in CHOICES.groups().items():
        for path in options.values():
            walk(yaml.safe_load(path.read_text(encoding="utf-8")), group, free)
    assert {key for key in free if not key.startswith("optimizer.")} == {"drafter.start_layers"}


def walk(node: Any, key: str, free: set[str]) -> None:
    if not isinstance(node, dict):
        return
    if "_target_" in node:
        parameters = parameters_of(locate(node["_target_"])) or {}
        free |= {f"{key}.{name}" for name in node if name in parameters and bare(parameters[name].annotation)}
    for name, child in node.items():
        walk(child, f"{key}.{name}", free)


def bare(hint: Any) -> bool:
    """Whether some number of the annotation may be anything."""
    if get_origin(hint) is Annotated:
        return bare(get_args(hint)[0]) and not any(
            isinstance(rule, Bound) for rule in hint.__metadata__)
    return hint in (int, float) or any(bare(inner) for inner in get_args(hint))


@given(st.floats(), st.floats(allow_nan=False, allow_infinity=False))
def test_bounds(value: float, bound: float) -> None:
    finite = abs(value) < float("inf")
    for rule, holds in ((AtLeast(bound), value >= bound), (AtMost(bound), value <= bound),
                        (Above(bound), value > bound), (Below(bound), value < bound)):
        assert (mismatch(value, Annotated[float, rule]) is None) == (finite and holds)


@given(st.lists(st.integers(0, 5)))
def test_repetition(values: list[int]) -> None:
    assert Distinct().fits(values) == (len(set(values)) == len(values))


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    require_device("cpu", "train.runtime.device")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    require_device("cuda", "train.runtime.device")
    require_device("cuda:1", "train.runtime.device")
    with pytest.raises(UserError, match="runtime.device=cuda:2, but PyTorch finds 2 CUDA or ROCm devices"):
        require_device("cuda:2", "train.runtime.device")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="finds no CUDA or ROCm devices here; set hardware=cpu"):
        require_device("cuda", "train.runtime.device")

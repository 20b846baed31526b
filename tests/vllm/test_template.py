"""Ids of conversations as they are trained on against those of a real server: SmolLM2 with its own template,
200 built-in prompts, and conversations with given answers, system texts and odd blanks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs import PATIENCE, PROJECT, environment
from vllm_support import FEW, own_cores, vllm_python

pytestmark = pytest.mark.vllm
ODD = [{"turns": ["Hi", " two\n"], "answers": ["\nHello", "  yes "], "system": "Be brief."},
       {"turns": ["¿Qué tal? 你好 😀"], "answers": ["très bien, مرحبا"]},
       {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]},
                     {"role": "assistant", "content": "<|im_end|> said", "reasoning_content": "hidden"}]}]
PART = "{{_target_: trainer.data.mixture.Part, weight: {}, category: null, language: null, source: {}}}"


def test_the_ids_are_those_of_a_real_server(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ODD))
    odd = PART.format(3, f"{{_target_: trainer.data.prompts.Jsonl, path: '{path}'}}")
    builtin = PART.format(197, "{_target_: trainer.data.prompts.Builtin}")
    command = [sys.executable, str(PROJECT / "tools/check_template.py"), "--rows", "200", "target=smollm2",
               f"engine.python={vllm_python()}", f"engine.runtime.threads='{own_cores()[0]}'", *FEW,
               "engine.runtime.kv_cache_gib=1", "engine.max_model_len=1024", "prompts=mixture",
               f"+prompts.source.parts.odd={odd}", f"+prompts.source.parts.builtin={builtin}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "204 of 204 requests of 200 rows have the same ids" in done.stdout
    assert "1 of the rows with answers need a row for each answer" in done.stdout
    assert "2 of the rows with answers have one mask" in done.stdout

"""Processes of their own that tests stop, kill or let wait, forked from a server that has imported torch and
the rest already: that is most of what a small one costs."""

from __future__ import annotations

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["trainer.compose", "trainer.training.stage", "trainer.engines.transformers",
                              "trainer.evaluate.report", "trainer.hidden_states.extract",
                              "transformers.models.llama.modeling_llama", "hypothesis"])

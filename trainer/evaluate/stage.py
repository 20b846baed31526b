"""Stage `evaluate`: real draft-and-verify decoding of held-out prompts, in this process and on a real vLLM
server.

Both read the *exported* folder. In this process the target runs in float32; the server is asked with and
without the drafter for the same prompts, greedily, one draft length after the other. What must agree is a
gate: the accepted length of both walks, and the text with and without the drafter. A killed evaluation
starts over: speeds are compared within one run, on a machine in one state. """

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from trainer.architectures.base import Drafter
from trainer.data import slices
from trainer.data.chat import Chat
from trainer.data.prompts import read_prompts
from trainer.engines.base import TargetEngine
from trainer.errors import UserError
from trainer.evaluate import mix, rows
from trainer.evaluate.agreement import agreement_gates
from trainer.evaluate.decode import Selection, Verifying, decode
from trainer.evaluate.questions import (
    Question,
    Room,
    asked,
    choose,
    exported,
    later_turns,
    trained_on,
    unready,
)
from trainer.evaluate.serving import Measurement, compare, enter, measure
from trainer.export.formats import FORMATS, FormatName
from trainer.gates import Gate, require
from trainer.kernels.select import require_verify, verify
from trainer.pipeline import Stage
from trainer.progress import Progress
from trainer.ranges import Amount, Count, Distinct, Dtype, Filled, NotNegative, Share
from trainer.records import Completion, Sampling
from trainer.target import Target
from trainer.target_head import load_target_head
from trainer.training.build import MakeDrafter, draft_problem, require_drafts


@dataclass(frozen=True)
class Evaluate(Stage):
    """`prompts` held-out prompts and the later `turns` of their conversations, the draft lengths `k` (the
    first is told by slice as well, and of the mix of `weights`), `users` at a time. `server` null measures in
    this process only. With `rounds` the servers with and without the drafter are up together and take turns
    (memory for both is needed); null measures one after the other.
    `too_long` says what happens to a prompt that leaves no room for an answer. With `confidence`, drafts are
    decoded in this process once more, cut before the first position whose calibrated chance to be accepted is
    below it."""

    target: Target
    drafter: MakeDrafter
    engine: TargetEngine
    server: Any  # VllmServer, or None
    dtype: Dtype
    sampling: Sampling
    prompts: Count
    turns: Literal["first", "all"]
    weights: mix.Weights
    too_long: Literal["error", "drop"]
    k: Annotated[list[Count], Filled(), Distinct()]
    users: Count
    warmup: Amount
    rounds: Count | None
    format: FormatName
    confidence: Share | None
    agreement: NotNegative
    runtime: Verifying

    after: ClassVar[tuple[str, ...]] = ("prompts", "responses", "export")
    version: ClassVar[int] = 5
    neutral: ClassVar[Mapping[str, Any]] = {"weights": {}}

    def check(self, stages: Mapping[str, Any]) -> dict[str, str]:
        found = {f"evaluate.k.{place}": draft_problem(self.drafter, k) for place, k in enumerate(self.k)}
        problems = {key: text for key, text in found.items() if text is not None}
        problems |= {f"evaluate.{key}": text for key, text in mix.weights_problems(self.weights).items()}
        problems |= unready("evaluate", self.format, stages, "leave evaluate and report out of run=",
                            None if self.server is None else self.drafter.func)
        if self.sampling.temperature:
            problems["evaluate.sampling.temperature"] = (
                f"must be 0, since drafts are verified against the target's greedy answers, but is "
                f"{self.sampling.temperature:g} (training data: responses.sampling.temperature)")
        if self.confidence is not None and not self.drafter.func.estimates:
            problems["evaluate.confidence"] = ("must be null, since this drafter does not say how likely its "
                                               f"tokens are accepted, but is {self.confidence:g}")
        return problems

    def remarks(self, stages: Mapping[str, Any]) -> list[str]:
        heldout = stages["prompts"].heldout
        return [] if self.prompts <= heldout else [
            f"evaluate.prompts={self.prompts} is more than prompts.heldout={heldout}; all that are held out "
            "are asked"]

    def external(self) -> dict[str, Any]:
        return self.target.facts

    def preflight(self) -> None:
        self.engine.preflight()
        require_verify(self.runtime.verify, self.engine.device)
        self.target.require_length(self.engine.max_length, "evaluate.engine.max_length")
        if self.server is not None:
            require_drafts(self.drafter, self.target, {f"evaluate.k.{place}": k
                                                       for place, k in enumerate(self.k)})
            if self.server.url is None:
                self.target.require_length(self.server.longest(), "engine.max_model_len")
            self.server.preflight()

    def foresee(self, inputs: dict[str, Path]) -> None:
        if "prompts" in inputs:
            self._questions(inputs)
        if "export" in inputs:
            exported(inputs["export"])

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        folder = inputs["export"] / self.format
        facts = exported(inputs["export"])
        head = load_target_head(self.target.folder, self.target.config)
        drafter = self.drafter.func.restore(FORMATS[self.format].read(folder), self.format, head)
        questions, left_out, trained_on = self._questions(inputs)
        if trained_on:
            named = ", ".join(trained_on[:5] + ["..."] * (len(trained_on) > 5))
            print(f"evaluate: {len(trained_on)} held-out prompts were trained on and are left out ({named}): "
                  "stored answers have a split of their own", flush=True)
        base = {"model": self.target.name, "method": facts["method"], "users": self.users,
                "dtype": self.dtype, "prompts": len(questions), "possible_k": facts.get("possible_k")}
        selections = [None]
        if self.confidence is not None:
            selections.append(Selection(self.confidence, facts["confidence"]["temperatures"]))
        found, gates = self._in_process(drafter, questions, base, selections)
        if self.server is not None:
            here = {row["num_speculative_tokens"]: row for row in found
                    if row["dataset"] == "heldout" and row["engine"] == "in_process"}
            served, more = self._served(folder, drafter, questions, base, here, out)
            found, gates = found + served, gates + more
        (out / "rows.json").write_text(json.dumps(found, indent=1) + "\n")
        best = max(found, key=lambda row: (row["engine"] == "vllm", row["speedup"] or 0))
        return {"gates": require(gates), "accepted_length": best["mean_accepted_length"],
                "speedup": best["speedup"], "k": best["num_speculative_tokens"],
                "lossless": all(row["lossless"] for row in found), "prompts": len(questions),
                **({"mix": found[0]["mix"]} if self.weights else {}),
                "left_out": len(left_out), "left_out_ids": left_out[:20],
                "trained_on": len(trained_on), "trained_on_ids": trained_on[:20]}

    def _questions(self, inputs: dict[str, Path]) -> tuple[list[Question], list[str], list[str]]:
        """`prompts` of the held-out prompts with their later turns, as far as those are answered; the ids of
        those that are left out as too long, and of those that are, as answers that were stored elsewhere have
        them among the samples of training."""
        heldout = [prompt for prompt, name in read_prompts(inputs["prompts"]) if name == "heldout"]
        if not heldout:
            raise UserError("there is no held-out prompt to evaluate on; raise prompts.heldout")
        found = asked(chat := Chat.of(self.target), heldout)
        trained = trained_on(found, inputs)
        if len(trained) == len(found):
            raise UserError(f"all {len(found)} held-out prompts were trained on, since responses=stored "
                            "brings its own split; give prompts.* as in the run that made those answers, or "
                            "others")
        room = Room("evaluate", "held-out prompt", *self._limit(), "evaluate.sampling.max_new_tokens",
                    self.sampling.max_new_tokens, self.too_long)
        chosen, dropped = choose(found, self.prompts, trained, room)
        known = self.turns == "first" or "responses" in inputs
        if self.turns == "all" and known:
            later, long = later_turns(chosen, heldout, chat, inputs["responses"], room)
            chosen, found, dropped = chosen + later, found + later, dropped + long
        sure = {kind: names for kind, names in self.weights.items()
                if known or kind not in ("context", "turn")}
        mix.require_slices(sure, "evaluate.weights (train.acceptance.weights, unless set)",
                           [each.slices for each in chosen], [each.slices for each in found],
                           "evaluate.prompts")
        return chosen, dropped, trained

    def _limit(self) -> tuple[int, str]:
        """The longest sequence that both walks can take, in tokens, and the setting that says so."""
        here = self.engine.max_length, "evaluate.engine.max_length"
        if self.server is None:
            return here
        joined = self.server.url is not None
        return min(here, (self.server.longest(), "--max-model-len of engine.url" if joined
                          else "engine.max_model_len"))

    def _in_process(self, drafter: Drafter, questions: list[Question], base: dict[str, Any],
                    selections: list[Selection | None]) -> tuple[list[dict[str, Any]], list[Gate]]:
        told = {"category", *slices.differing(each.slices for each in questions)}
        made: list[dict[str, Any]] = []
        differing, check = 0, verify(self.runtime.verify)
        with self.engine.load(self.target.folder, self.target.end_ids) as engine:
            drafter.to(engine.device)
            plain = _plain(engine, questions, self.sampling)
            for selection, k in product(selections, self.k):
                groups: dict[str, rows.Tally] = {}
                parts: list[mix.Part] = []
                label = f"evaluate {rows.label(selection)}, K={k}"
                with Progress(label, total=len(questions), unit="prompts") as bar:
                    for asked_of, expected in zip(questions, plain, strict=True):
                        decoded = decode(engine, drafter, check, asked_of.ids, k,
                                         self.sampling.max_new_tokens, self.target.end_ids, selection)
                        parts.append((asked_of.slices, decoded.counts))
                        names = [slices.label(kind, asked_of.slices[kind]) for kind in told]
                        for name in ("heldout", *(f"heldout/{name}" for name in names)):
                            groups.setdefault(name, rows.Tally()).add(decoded, expected)
                        bar.advance(1, accepted=groups["heldout"].accepted_length)
                differing = max(differing, groups["heldout"].differing)
                wanted = _datasets(questions, told) if k == self.k[0] and selection is None else []
                new = [rows.in_process(base, name, k, groups[name], selection)
                       for name in ("heldout", *wanted)]
                if wanted and (mixed := mix.mixed(self.weights, parts)) is not None:
                    new[0]["mix"] = round(mixed, 4)
                made += new
        found = sorted(made, key=lambda row: row["dataset"] != "heldout")
        return found, [
            Gate("in_process_lossless", differing, 0, "<=", "the text changes with the drafter in this "
                 "process: verification or the rewind of the target's cache is wrong")]

    def _served(self, folder: Path, drafter: Drafter, questions: list[Question], base: dict[str, Any],
                expected: dict[int, dict[str, Any]], out: Path) -> tuple[list[dict[str, Any]], list[Gate]]:
        """`expected` are the rows of this process by K."""
        found, differing = [], 0
        prompts = [each.ids for each in questions]
        for k, plain, drafted, interpreted in self._measured(folder, drafter, prompts, out):
            result = compare(plain, drafted)
            differing = max(differing, result.differing)
            found.append(rows.served(base, k, plain, drafted, result.lossless, interpreted))
        return found, [
            *agreement_gates([(expected[row["num_speculative_tokens"]], row) for row in found],
                             self.agreement),
            Gate("served_lossless", differing, 0, "<=", "the server's text changes with the drafter: its "
                 "verification or attention for several query rows is wrong (compare in float32, other "
                 "attention backends)")]

    def _measured(self, folder: Path, drafter: Drafter, prompts: list[list[int]],
                  out: Path) -> Iterator[tuple[int, Measurement, Measurement, bool]]:
        """Every K with its measurements without and with the drafter, and whether the latter's kernels were
        interpreted."""
        asked = (prompts, self.sampling, self.users, self.warmup)
        together = self.rounds is not None
        with ExitStack() as stack:
            plain = self._server(out / "vllm-plain.log", elsewhere=together)
            alone = None
            if together:
                stack.push(plain)
            else:
                with plain:
                    [alone] = measure([plain], *asked, rounds=1)
            for number, k in enumerate(self.k):
                with ExitStack() as turn:
                    drafted = self._server(out / f"vllm-k{k}.log", folder, drafter, k)
                    turn.push(drafted)
                    enter([plain, drafted] if together and number == 0 else [drafted])
                    if alone is None:
                        pair = measure([plain, drafted], *asked, rounds=self.rounds)
                    else:
                        pair = [alone, *measure([drafted], *asked, rounds=1)]
                speeds = "its kernels are interpreted, slowly" if drafted.interpreted else \
                    f"{pair[1].tok_s:.1f} tokens/s, {pair[0].tok_s:.1f} without the drafter"
                print(f"evaluate on vLLM, K={k}: {speeds}; accepted length "
                      f"{pair[1].mean_accepted_length:.3f}", flush=True)
                yield k, *pair, drafted.interpreted

    def _server(self, log: Path, folder: Path | None = None, drafter: Drafter | None = None,
                k: int | None = None, elsewhere: bool = False) -> Any:
        """A server in the dtype of the measurement; `elsewhere`: not at the port of the settings, where
        another one will be."""
        print(f"evaluate on vLLM, {'plain' if k is None else f'K={k}'}: starting the server", flush=True)
        runtime = replace(self.server.runtime, port=0) if elsewhere else self.server.runtime
        described = replace(self.server, dtype=self.dtype, runtime=runtime)
        if drafter is None:
            return described.serve(self.target.folder, log)
        model, speculator = FORMATS[self.format].served(folder, self.target.folder)
        return described.serve(model, log, speculator, drafter.method, k, drafter.needs_v2)


def _datasets(questions: list[Question], kinds: Collection[str]) -> list[str]:
    """Those of the slices of these kinds, in the order in which they are told."""
    return [f"heldout/{slices.label(kind, name)}" for kind in slices.KINDS if kind in kinds
            for name in slices.ordered(kind, [each.slices[kind] for each in questions])]


def _plain(engine: TargetEngine, questions: list[Question], sampling: Sampling) -> list[Completion]:
    """The target's own answers, in groups as the engine likes them."""
    answers: list[Completion] = []
    for start in range(0, len(questions), engine.group):
        group = questions[start:start + engine.group]
        answers += engine.generate([each.ids for each in group], [each.id for each in group], sampling)
    return answers

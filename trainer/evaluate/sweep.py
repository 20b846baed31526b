"""Stage `sweep`: speed and acceptance of every draft length in every class of traffic, beside plain decoding.

A class is a kind of prompts, a number of users and a temperature; a cell is a class at one draft length, in
which a server without a drafter and one with it take turns. Cells are kept as they are measured, so that a
killed sweep goes on with the next. Nothing here judges the figures: that is what the tuner is for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from trainer.data.chat import Chat
from trainer.data.prompts import Jsonl, read_prompts
from trainer.errors import UserError
from trainer.evaluate.questions import Question, Room, asked, choose, exported, trained_on, unready
from trainer.evaluate.serving import enter, repeat
from trainer.evaluate.sweep_cells import PLAIN, Cells, Pass, Traffic, Variant, row
from trainer.evaluate.sweep_table import markdown, print_sweep
from trainer.export.formats import FORMATS, FormatName
from trainer.pipeline import Stage
from trainer.progress import Progress
from trainer.ranges import Above, Amount, AtMost, Count, Distinct, Dtype, Filled, NotNegative, Seed, Text, Url
from trainer.records import Prompt, Sampling
from trainer.target import Target
from trainer.training.build import MakeDrafter, draft_problem, require_drafts

LONGEST = 7  # of the draft lengths that are measured unless told otherwise
Asked = dict[str, list[Question]]  # by the name of the data set


class Listed(Jsonl):
    """A file of `files`."""

    setting: ClassVar[str] = "sweep.files"


@dataclass(frozen=True)
class Sweep(Stage):
    """The settings are those of conf/sweep. Servers are started for every draft length, or joined by `urls`:
    the first drafts nothing, the others in the order of `k`, method by method."""

    target: Target
    drafter: MakeDrafter
    server: Any  # VllmServer
    urls: Annotated[list[Url], Distinct()]
    dtype: Dtype
    format: FormatName
    k: Annotated[list[Count], Filled(), Distinct()] | None
    also: Annotated[list[Literal["ngram", "suffix"]], Distinct()]
    users: Annotated[list[Count], Filled(), Distinct()]
    temperatures: Annotated[list[NotNegative], Filled(), Distinct()]
    files: Annotated[list[Text], Distinct()]
    categories: Annotated[list[Text], Filled(), Distinct()] | None
    prompts: Count
    max_new_tokens: Count
    top_p: Annotated[float, Above(0), AtMost(1)]
    seed: Seed
    too_long: Literal["error", "drop"]
    warmup: Amount
    repeats: Count
    together: bool

    after: ClassVar[tuple[str, ...]] = ("prompts", "responses", "export")
    version: ClassVar[int] = 1

    def check(self, stages: Mapping[str, Any]) -> dict[str, str]:
        found = {f"sweep.k.{place}": draft_problem(self.drafter, k) for place, k in enumerate(self.k or ())}
        problems = {key: text for key, text in found.items() if text is not None}
        problems |= unready("sweep", self.format, stages,
                            None if self.files else "name files with prompts in sweep.files",
                            None if self.urls else self.drafter.func)
        names = [Path(each).stem for each in self.files]
        if len({*names}) < len(names):
            problems["sweep.files"] = ("must differ in the names of the files, which name the kinds of "
                                       f"prompts, but has {', '.join(names)}")
        if self.urls and len(self.urls) != len(self.variants):
            named = ", ".join(map(str, self.variants))
            problems["sweep.urls"] = (f"must name {len(self.variants)} servers, for {named}, but has "
                                      f"{len(self.urls)}")
        if not self.urls and self.server.url is not None:
            problems["sweep.urls"] = ("must name a server for plain decoding and one for each draft length, "
                                      "as that of engine.url is a single one, but is empty")
        for place, users in enumerate(self.users if not self.urls else ()):
            if users > self.server.max_num_seqs:
                problems[f"sweep.users.{place}"] = (
                    f"must be at most engine.max_num_seqs={self.server.max_num_seqs}, the requests that the "
                    f"server decodes together, but is {users}")
        return problems

    def external(self) -> dict[str, Any]:
        return {**self.target.facts, "files": {each: Listed(each).fingerprint() for each in self.files}}

    def preflight(self) -> None:
        require_drafts(self.drafter, self.target,
                       {f"sweep.k.{place}": k for place, k in enumerate(self.k or ())})
        if not self.urls:
            self.target.require_length(self.server.longest(), "engine.max_model_len")
            self.server.preflight(self.also)
        for url, variant in zip(self.urls, self.variants, strict=False):
            replace(self.server, url=url).require_idle(variant.k or None)

    def foresee(self, inputs: dict[str, Path]) -> None:
        if "prompts" in inputs:
            self._asked(inputs)
        if "export" in inputs:
            exported(inputs["export"])

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        possible = exported(inputs["export"]).get("possible_k")
        found, long, trained = self._asked(inputs)
        classes = [Traffic(name, users, temperature) for temperature in self.temperatures
                   for users in self.users for name in found]
        cells, drafting = Cells(out / "cells.jsonl"), self.variants[1:]
        groups = [[PLAIN, each] for each in drafting] if self.together else [[each] for each in self.variants]
        self._measure(groups, classes, found, cells, partial(self._server, inputs["export"], out))
        rows = [self._row(cells, traffic, variant, found, None if variant.method in self.also else possible)
                for variant in drafting for traffic in classes]
        (out / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")
        (out / "sweep.md").write_text(markdown(rows), encoding="utf-8")
        best = max(rows, key=lambda each: each["speedup"] or 0)
        greedy = [each["lossless"] for each in rows if each["lossless"] is not None]
        return {"rows": len(rows), "classes": len(classes), "speedup": best["speedup"],
                "k": best["num_speculative_tokens"] if best["speedup"] else None,
                "lossless": all(greedy) if greedy else None,
                "prompts": sum(map(len, found.values())), "left_out": len(long), "left_out_ids": long[:20],
                "trained_on": len(trained), "trained_on_ids": trained[:20]}

    def tell(self, folder: Path) -> None:
        print_sweep(json.loads((folder / "rows.json").read_text()))
        print(folder / "sweep.md", flush=True)

    @property
    def variants(self) -> list[Variant]:
        """All that is measured, plain decoding first."""
        return [PLAIN, *(Variant(name, k) for name in (self.drafter.func.method, *self.also)
                         for k in self.k or self._lengths())]

    def _lengths(self) -> list[int]:
        """All up to the longest that a server takes of the drafter, or else its shortest."""
        short = [k for k in range(1, LONGEST + 1)
                 if draft_problem(self.drafter, k, self.target.config) is None]
        return short or [self.drafter.func.shortest_draft(**self.drafter.keywords)]

    def _asked(self, inputs: dict[str, Path]) -> tuple[Asked, list[str], list[str]]:
        """What is asked of each kind; the ids that are left out as too long, and as trained on."""
        found: Asked = {}
        long: list[str] = []
        trained: list[str] = []
        chat = Chat.of(self.target)
        for name, prompts in self._kinds(inputs["prompts"]).items():
            questions = asked(chat, prompts)
            known = trained_on(questions, inputs)
            if len(known) == len(questions):
                raise UserError(f"all {len(questions)} prompts of {name} were trained on, which says nothing "
                                "of others; measure others (sweep.files, sweep.categories)")
            room = Room("sweep", f"prompt of {name}", *self._limit(), "sweep.max_new_tokens",
                        self.max_new_tokens, self.too_long)
            found[name], dropped = choose(questions, self.prompts, known, room)
            long, trained = long + dropped, trained + known
        if trained:
            print(f"sweep: {len(trained)} prompts were trained on and are left out ({', '.join(trained[:5])}"
                  f"{', ...' if len(trained) > 5 else ''})", flush=True)
        return found, long, trained

    def _kinds(self, folder: Path) -> dict[str, list[Prompt]]:
        """Prompts by the kind that a row names."""
        if self.files:
            return {Path(each).stem: [prompt for prompt, _ in Listed(each).all_rows()] for each in self.files}
        kinds: dict[str, list[Prompt]] = {}
        for prompt, split in read_prompts(folder):
            if split == "heldout":
                kinds.setdefault(prompt.category, []).append(prompt)
        found = {name: kinds[name] for name in self.categories or kinds if name in kinds}
        if not found:
            there = ", ".join(kinds) or "none at all"
            raise UserError(f"no held-out prompt is of sweep.categories={self.categories} (there: {there}); "
                            "set it to null for all, raise prompts.heldout, or name JSONL files in "
                            "sweep.files")
        return found

    def _limit(self) -> tuple[int, str]:
        """The longest sequence that all servers take, in tokens, and the setting that says so."""
        if not self.urls:
            return self.server.longest(), "engine.max_model_len"
        return (min(replace(self.server, url=url).longest() for url in self.urls),
                "--max-model-len of sweep.urls")

    def _measure(self, groups: Sequence[list[Variant]], classes: Sequence[Traffic], found: Asked,
                 cells: Cells, serve: Callable[[Variant], Any]) -> None:
        """All cells that are missing; the plain server stays up for all groups that have it."""
        done, total = len(cells.cells), len(groups) * len(classes)
        if done:
            print(f"sweep: {done} of {total} cells are measured already", flush=True)
        with ExitStack() as lasting:
            up: dict[Variant, Any] = {}
            for group in groups:
                missing = [each for each in classes if not cells.has(each, group)]
                if not missing:
                    continue
                with self._servers(group, up, lasting, serve) as servers, \
                        Progress(f"sweep, {group[-1]}", total, "cells", start=done) as bar:
                    warm: set[int] = set()
                    for traffic in missing:
                        passes = self._cell(group, servers, traffic, found, traffic.users not in warm)
                        warm.add(traffic.users)
                        cells.add(traffic, passes)
                        done += 1
                        bar.advance(1, data=traffic.dataset, users=traffic.users,
                                    accepted=passes[-1].mean_accepted_length)

    @contextmanager
    def _servers(self, group: list[Variant], up: dict[Variant, Any], lasting: ExitStack,
                 serve: Callable[[Variant], Any]) -> Iterator[list[Any]]:
        """The servers of a group, running; a plain one that is to be up for others, too, is left in `up`."""
        with ExitStack() as turn:
            new = {each: serve(each) for each in group if each not in up}
            print(f"sweep: {'joining' if self.urls else 'starting'} the server"
                  f"{'s' if len(new) > 1 else ''} for {', '.join(map(str, new))}", flush=True)
            for variant, server in new.items():
                (lasting if self.together and variant == PLAIN else turn).push(server)
            enter(list(new.values()))
            if self.together:
                up.setdefault(PLAIN, new.get(PLAIN))
            yield [up[each] if each in up else new[each] for each in group]

    def _cell(self, group: list[Variant], servers: list[Any], traffic: Traffic, found: Asked,
              cold: bool) -> list[Pass]:
        for server in servers:
            server.require_idle()
        sampling = Sampling(self.max_new_tokens, traffic.temperature, self.top_p, self.seed)
        requests = _requests([each.ids for each in found[traffic.dataset]], traffic.users)
        warmup = self.warmup * traffic.users if cold else 0
        measured = repeat(servers, requests, sampling, traffic.users, warmup, self.repeats)
        for server in servers:
            server.require_idle()
        return [Pass.of(variant, each, {"vllm": server.version, "attention_backend": server.attention_backend,
                                        "interpreted": server.interpreted})
                for variant, server, each in zip(group, servers, measured, strict=True)]

    def _server(self, export: Path, out: Path, variant: Variant) -> Any:
        """Not yet running. A plain one beside others is not at the port of the settings."""
        runtime, url = self.server.runtime, None
        if self.urls:
            url = self.urls[self.variants.index(variant)]
        if variant == PLAIN and self.together:
            runtime = replace(runtime, port=0)
        described = replace(self.server, dtype=self.dtype, url=url, runtime=runtime)
        log = out / f"vllm-{variant.method}{variant.k or ''}.log"
        if variant == PLAIN:
            return described.serve(self.target.folder, log)
        if variant.method in self.also:
            return described.serve(self.target.folder, log, method=variant.method, k=variant.k)
        model, speculator = FORMATS[self.format].served(export / self.format, self.target.folder)
        return described.serve(model, log, speculator, variant.method, variant.k, self.drafter.func.needs_v2)

    def _row(self, cells: Cells, traffic: Traffic, variant: Variant, found: Asked,
             possible: list[int] | None) -> dict[str, Any]:
        questions = found[traffic.dataset]
        base = {"model": self.target.name, "dtype": None if self.urls else self.dtype, "possible_k": possible,
                "prompts": len(questions), "requests": len(_requests(questions, traffic.users))}
        return row(base, traffic, *cells.pair(traffic, variant))


def _requests(prompts: Sequence[Any], users: int) -> list[Any]:
    """The prompts, some of them again, so that no user is idle: a multiple of the users."""
    return [prompts[place % len(prompts)] for place in range(-(-len(prompts) // users) * users)]

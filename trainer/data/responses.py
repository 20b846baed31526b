"""Stage `responses`: the exact target answers every prompt -> `responses.jsonl`, one row for each assistant
turn.

Token ids are stored as the engine returned them and never tokenised again. Prompts are answered in groups
whose make-up depends on the data alone, and a group is appended whole, in order, so that a killed run goes on
and ends with the same bytes as an unbroken one. Later turns see the target's own earlier answers.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from trainer.data import report
from trainer.data.answering import Answering
from trainer.data.chat import Chat
from trainer.data.history import LEFT_OUT, History, Unmatched
from trainer.data.own_prompts import OwnPrompts
from trainer.data.prompts import read_prompts
from trainer.data.response_rows import RESPONSES, Row, read_rows, read_samples
from trainer.data.slices import thinking as mode_of
from trainer.data.tally import Tally, describe
from trainer.data.thinking import Thinking
from trainer.engines.base import TargetEngine
from trainer.errors import UserError
from trainer.pipeline import Stage
from trainer.progress import Progress
from trainer.ranges import Above, Amount, AtMost
from trainer.records import Prompt, Sampling
from trainer.target import Target

TOO_LONG = "longer than target.max_length"
Placed = tuple[Prompt, str]  # with the split that it belongs to: train or heldout


@dataclass(frozen=True)
class Length:
    """How long a row is or may become: all tokens, and the supervised ones among them."""

    id: str
    tokens: int
    supervised: int


@dataclass(frozen=True)
class More:
    """Further `answers` to each training prompt: the same prompt drawn again, each with a seed of its own.
    Held-out prompts are answered once, as serving will be measured."""

    answers: Amount
    temperature: Annotated[float, Above(0)]
    top_p: Annotated[float, Above(0), AtMost(1)]

    def of(self, prompts: Sequence[Placed]) -> list[Placed]:
        """The conversations to be held again, as prompts of their own. Raises where an id is taken."""
        again = [(replace(prompt, id=f"{prompt.id}~{number}"), name) for number in range(1, self.answers + 1)
                 for prompt, name in prompts if name == "train"]
        taken = {prompt.id for prompt, _ in prompts} & {prompt.id for prompt, _ in again}
        if taken:
            raise UserError(f"prompt {min(taken)} has the id that responses.more.answers gives to a further "
                            "answer; rename it in the prompts")
        return again


@dataclass(frozen=True)
class Regenerate(Stage):
    """Asks the target, the prompts and those that it makes up (`own`). Sampling is that of the `settings`, or
    as the `target`'s generation_config.json has it where it says, as its server samples. `calls` says what a
    later turn goes on from where the target's calls are not those of which the data has results, `too_long`
    what happens to a prompt that leaves no room for an answer. `thinking` is that of the prompts."""

    target: Target
    engine: TargetEngine
    sampling: Sampling
    sampling_of: Literal["settings", "target"]
    own: OwnPrompts
    more: More
    calls: Unmatched
    too_long: Literal["error", "drop"]
    thinking: Thinking | None

    after: ClassVar[tuple[str, ...]] = ("prompts",)
    version: ClassVar[int] = 2
    idle: ClassVar[tuple[str, ...]] = (  # drafters share the answers, however their states are computed
        "target.tap_layers", "target.mask_token",
        "engine.states", "engine.states_batch", "engine.prefill_tokens")

    def external(self) -> dict[str, Any]:
        return self.target.facts

    def preflight(self) -> None:
        self.target.require_length(self.engine.max_length, "target_engine.max_length")
        self.own.require_room(Chat.of(self.target), self.engine.max_length)
        self.sampled()
        if self.thinking:
            self.thinking.require_read(Chat.of(self.target))

    def sampled(self) -> Sampling:
        """How prompts are answered."""
        return self.sampling if self.sampling_of == "settings" else \
            replace(self.sampling, **self.target.generation)

    def foresee(self, inputs: dict[str, Path]) -> None:
        if "prompts" in inputs:
            prompts = read_prompts(inputs["prompts"])
            self._too_long(Chat.of(self.target), prompts)
            self.own.require_free([prompt for prompt, _ in prompts])
            self.more.of(prompts)

    def longest(self, prompts: Sequence[Placed]) -> list[Length]:
        """Every answer as long as it may be; earlier turns' answers count in the later ones."""
        chat = Chat.of(self.target)
        found, answer = [], self.sampling.max_new_tokens
        for prompt, _ in [*prompts, *self.more.of(prompts)]:
            for turn in range(len(prompt.turns)):
                asked = len(chat.asked(prompt, [""] * turn)) + turn * answer
                total = min(asked + answer, self.engine.max_length)
                found.append(Length(f"{prompt.id}#{turn}", total, min(answer, total)))
        if self.own.prompts:
            total = min(self.own.longest(chat) + answer, self.engine.max_length)
            own = [(Prompt(name, ("",)), "train") for name in self.own.ids()]
            found += [Length(f"{prompt.id}#0", total, min(answer, total))
                      for prompt, _ in [*own, *self.more.of(own)]]
        return found

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        chat, sampling = Chat.of(self.target), self.sampled()
        history, answering = History(chat, self.calls), Answering(self.engine, out / RESPONSES)
        prompts = read_prompts(inputs["prompts"])
        dropped = self._too_long(chat, prompts)
        prompts = [(prompt, name) for prompt, name in prompts if prompt.id not in dropped]
        drawn = replace(sampling, temperature=self.more.temperature, top_p=self.more.top_p)
        with self.engine.load(self.target.folder, self.target.end_ids) as engine:
            own = self.own.draw(chat, engine, self.sampling.seed, [prompt for prompt, _ in prompts], out)
            own = self.thinking.told(own) if self.thinking else own
            prompts = [*prompts, *((prompt, "train") for prompt in own)]
            work = [(prompts, sampling), (self.more.of(prompts), drawn)]
            total = sum(len(prompt.turns) for part, _ in work for prompt, _ in part)
            with Progress("responses", total=total, unit="answers", start=answering.count) as bar:
                for groups, how in self._turns(history, work, answering.rows, engine.group):
                    answering.ask(groups, how, bar)
        answering.finish()
        tally, ended = Tally.of(answering.rows.values()), sorted(history.dropped())
        report.write(out, inputs["prompts"], tally, {TOO_LONG: sorted(dropped), LEFT_OUT: ended}, self.target,
                     sampling=asdict(sampling), calls=history.counts())
        return {**describe(tally, self.target, sorted(dropped)), "own_prompts": len(own),
                "own_left_out": self.own.prompts - len(own), "sampling": asdict(sampling),
                "calls": history.counts(), "ended_at_calls": len(ended),
                "turns_without_room": total - tally.rows - history.lost}

    def _too_long(self, chat: Chat, prompts: list[Placed]) -> set[str]:
        dropped = set()
        for prompt, _ in prompts:
            length = len(chat.asked(prompt, []))
            if length >= self.engine.max_length:
                if self.too_long == "error":
                    raise UserError(f"prompt {prompt.id} has {length} tokens, which leaves no room for an "
                                    f"answer within target_engine.max_length={self.engine.max_length}; raise "
                                    "it, or leave such prompts out with responses.too_long=drop")
                dropped.add(prompt.id)
        if len(dropped) == len(prompts):
            raise UserError(f"all {len(prompts)} prompts are longer than target_engine.max_length="
                            f"{self.engine.max_length}; raise target.max_length, which sets it")
        return dropped

    def _turns(self, history: History, work: list[tuple[list[Placed], Sampling]], done: dict[str, Row],
               size: int) -> Iterator[tuple[list[list[Row]], Sampling]]:
        """The groups of each turn of the first part, then of the next. Lazily: a later turn reads `done`."""
        for prompts, sampling in work:
            for turn in range(max((len(prompt.turns) for prompt, _ in prompts), default=0)):
                yield self._groups(history, prompts, turn, done, size), sampling

    def _groups(self, history: History, prompts: list[Placed], turn: int, done: dict[str, Row],
                size: int) -> list[list[Row]]:
        """Questions of one turn, longest first (they decide the memory), in groups of `size`."""
        chat, questions = history.chat, []
        for prompt, name in prompts:
            if turn >= len(prompt.turns):
                continue
            answered = [done.get(f"{prompt.id}#{earlier}") for earlier in range(turn)]
            if None in answered:
                continue  # an earlier turn of it had no room
            answers = history.before(prompt, answered)
            if answers is None:
                continue  # the data has no result of what it called
            ids = chat.asked(prompt, answers)
            if len(ids) >= self.engine.max_length:
                continue  # only a later turn gets here: the history outgrew the limit, its earlier turns stay
            questions.append({"id": f"{prompt.id}#{turn}", "split": name, "category": prompt.category,
                              "language": prompt.language,
                              "thinking": mode_of({**chat.template, **prompt.template}), "prompt": ids})
        questions.sort(key=lambda row: (-len(row["prompt"]), row["id"]))
        return [questions[start:start + size] for start in range(0, len(questions), size)]


@dataclass(frozen=True)
class Stored(Stage):
    """The answers that lie beside stored hidden states in `path`, so that both serve another run or machine
    together."""

    target: Target
    path: str

    after: ClassVar[tuple[str, ...]] = ()
    version: ClassVar[int] = 1

    def external(self) -> dict[str, Any]:
        try:
            return {"responses": hashlib.sha256(self._file().read_bytes()).hexdigest()}
        except OSError as error:
            raise UserError(f"{self._file()} cannot be read ({error.strerror}): responses=stored takes the "
                            "answers that lie beside stored hidden states; set hidden_states.path to such a "
                            "folder") from error

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        print(f"responses: taken from {self._file()} with its own split; prompts.* decides only what "
              "evaluate asks", flush=True)
        shutil.copyfile(self._file(), out / RESPONSES)
        tally = Tally.of(read_rows(out))
        report.write(out, None, tally, {}, self.target)
        return describe(tally, self.target, [])

    def longest(self, prompts: Sequence[Placed]) -> list[Length]:
        """The stored answers, exactly, whatever the prompts."""
        folder = self._file().parent
        return [Length(sample.id, len(sample.tokens), sample.supervised)
                for name in ("train", "heldout") for sample in read_samples(folder, name)]

    def _file(self) -> Path:
        return Path(self.path).expanduser() / RESPONSES

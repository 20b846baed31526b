"""What a reader of the report is warned of: rows that contradict the definitions or say little, and what was
left out on the way. One sentence for each engine and kind of doubt, however many rows share it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from trainer.evaluate import figures
from trainer.records import UNKNOWN

NEAR_ONE = 1.05   # an accepted length below: next to no draft is accepted, so that none can save time
FEW_DRAFTS = 200  # counted drafts below which another sample would give another accepted length
FEW_PROMPTS = 8  # to train on; with fewer, more training helps nothing
WEIGHTS_OR_LAYERS = (
    "draft weights that the engine left unset, or hidden states taken from other layers than in training"
)
SCARCE = 1 / 3  # of its share of the traffic, below which a category is hardly trained on
SOME_DRAFTS = 50  # of a slice, from which it is told to be accepted worse than the rest
COVERED = 0.8  # share of the tokens below which a draft vocabulary is the first thing to mend
LEFT_OUT = (  # stage, number in its record, what it counts
    ("prompts", "left_out", "prompts repeat a text that is held out and are not trained on"),
    ("responses", "dropped", "conversations do not fit into the longest sequence and are not trained on"),
    ("responses", "turns_without_room", "later turns do not fit into the longest sequence and are left out"),
    ("responses", "ended_at_calls", "conversations end at a call that the data has no result of"),
    ("evaluate", "left_out", "held-out prompts leave no room for an answer and were not measured"),
    ("evaluate", "trained_on", "held-out prompts were trained on and were not measured"),
)


@dataclass(frozen=True)
class Doubts:
    """`identity_tolerance`: how far 1 + the sum of acceptance by position may be from the mean accepted
    length; `rise_tolerance`: how much a position may exceed the one before; `sound`: whether all gates held,
    so that a drafter that is not accepted is rather a poor one than one that is served wrongly; `prompts`:
    how many it was trained on, where that is known."""

    identity_tolerance: float
    rise_tolerance: float
    sound: bool
    prompts: int | None

    def warnings(self, rows: list[dict]) -> list[str]:
        """The doubts of all rows, the gravest first; each names the first of the rows that it is about."""
        found: dict[tuple[str, str], list[tuple[dict, str]]] = {}
        for row in rows:
            for kind, text in self.of(row):
                found.setdefault((kind, figures.engine_of(row)), []).append((row, text))
        ordered = sorted(found.items(), key=lambda each: each[0][0] != "unaccepted")
        return [_sentence(*same[0], len(same) - 1) for _, same in ordered]

    def of(self, row: dict) -> Iterator[tuple[str, str]]:
        """Kind and words of each doubt in one row; nothing for a sound one."""
        rates, length = row["per_position_acceptance"], row["mean_accepted_length"]
        if "/" not in row["dataset"] and "confidence" not in row:  # a slice is smaller, cut drafts are fewer
            yield from self._of_drafts(row, rates, length)
        if rates and abs(1 + sum(rates) - length) > self.identity_tolerance:
            yield "identity", (
                f"the mean accepted length is {length:.3f} but 1 + the sum of acceptance by position is "
                f"{1 + sum(rates):.3f}; they are equal by definition, so one of them was counted differently "
                "(rates conditional on the position before, or counters of another workload mixed in)"
            )
        rise = max((after - before for before, after in pairwise(rates)), default=0.0)
        if rise > self.rise_tolerance:
            yield "rise", (
                f"acceptance rises by {rise:.3f} from one position to the next, which cumulative acceptance "
                "cannot do; this points at a fault of the verification kernel or at conditional rates"
                f"{_uneven(len(rates))}"
            )
        elif _flat(rates):
            yield "flat", (
                f"acceptance stays at {rates[0]:.2f} over all {len(rates)} positions; real drafts lose some "
                "at every position, so a flat curve points at a fault of the verification kernel, which "
                f"returns the same output for all positions{_uneven(len(rates))}"
            )
        if row.get("lossless") is False:
            yield "lossless", (
                "the text with the drafter differs from the text without; below float32 this happens between "
                "batch shapes without a fault, in float32 with greedy decoding it means wrong verification"
            )

    def _of_drafts(self, row: dict, rates: list[float], length: float) -> Iterator[tuple[str, str]]:
        drafts = row.get("drafts")
        if rates and length < NEAR_ONE and drafts != 0:
            few = self.prompts is not None and self.prompts < FEW_PROMPTS
            causes = [
                f"few prompts: {self.prompts} are too few to learn from (prompts.limit, or a larger source)"
                if few
                else "a drafter that is trained too little (train.epochs, train.steps, prompts.limit)",
                WEIGHTS_OR_LAYERS,
            ]
            first, second = causes if self.sound else reversed(causes)
            yield "unaccepted", (
                f"next to no draft token was accepted (accepted length {length:.2f}); the likeliest cause is "
                f"{first}{', as all gates hold' if self.sound else ''}; then {second}"
            )
        if drafts is not None and drafts < FEW_DRAFTS:
            yield "few", (
                f"only {drafts} drafts were counted, so other prompts may well give another accepted length; "
                "measure more of them (evaluate.prompts, evaluate.sampling.max_new_tokens)"
            )


def of_code(finished: dict[str, dict]) -> list[str]:
    """The stages in which code ran that came with the target's files."""
    ran = [name for name, content in finished.items() if _trusts(content.get("settings"))]
    return [f"trust_remote_code was true in {', '.join(ran)}: code from the target's files ran there, which "
            "nothing here has looked at."] if ran else []


def _trusts(node: Any) -> bool:
    if isinstance(node, dict):
        return node.get("trust_remote_code") is True or any(_trusts(each) for each in node.values())
    return isinstance(node, list) and any(_trusts(each) for each in node)


def of_training(finished: dict[str, dict]) -> list[str]:
    """What the train stage noticed of its drafter."""
    record = finished.get("train", {}).get("record", {})
    found, last = [*_of_measuring(finished.get("train", {}))], record.get("final", {})
    if unmoved := record.get("unmoved"):
        found.append(f"{len(unmoved)} trained tensors have not moved in {record['steps']} steps of training "
                     f"({', '.join(unmoved[:5])}); no gradient reaches them.")
    found += [f"The loss term {each['term']} was {each['share']:.0%} of the loss at step {each['step']}; the "
              "others hardly counted (their weights are in drafter.*)."
              for each in record.get("dominating", [])]
    vocabulary = record.get("draft_vocabulary", {"covered": 1.0})
    least = {"": vocabulary["covered"], **{f" of {name}": share for name, share
                                           in vocabulary.get("by_category", {}).items()}}
    if poor := {name: share for name, share in least.items() if share < COVERED}:
        name = "" if "" in poor else min(poor, key=poor.__getitem__)
        found.append(f"The draft vocabulary covers {poor[name]:.1%} of the tokens{name} that were "
                     "trained on, and no other token can be drafted; raise drafter.draft_vocab_size.")
    after, before = ("mix", "mix_before") if "mix" in record else ("accepted_length", "before_training")
    if record.get(after, math.inf) <= record.get(before, 0.0):
        what = "the mix of train.acceptance.weights was" if after == "mix" else "held-out prompts were"
        found.append(f"Training brought nothing: {what} accepted at "
                     f"{record[before]:.2f} before the first step and at "
                     f"{record[after]:.2f} at the best one; lower optimizer.lr, or give more "
                     "prompts (prompts.limit) and steps.")
    if last.get("overfits"):
        found.append(f"The drafter knows its training samples by heart: along stored answers its accepted "
                     f"length is {last['train_walk']:.2f} on those and {last['heldout_walk']:.2f} on others; "
                     "give more prompts (prompts.limit), or fewer epochs (train.epochs).")
    return found


def _of_measuring(train: dict) -> Iterator[str]:
    """Why nothing says whether the drafter was served as trained while it was trained."""
    if "acceptance" not in train.get("settings", {}):
        return
    record, never = train["record"], train["settings"]["acceptance"]["every"] is None
    if "accepted_length" not in record:
        why = "as train.acceptance.every is null" if never else \
            "as no held-out sample leaves room for an answer (prompts.heldout, target.max_length)"
        yield (f"Acceptance was not measured while training, {why}: no gate compared it with training's own "
               "estimate, and the weights are those of the last step.")
    elif not record["gates"]:
        yield ("Acceptance while training was measured on a single held-out prompt, of which no gate can "
               "judge a gap to training's own estimate; hold out more (prompts.heldout).")


def single_prompts(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What data sets of one prompt cannot tell."""
    if single := sorted({row["dataset"] for row in rows if row.get("prompts") == 1}):
        yield (f"One prompt of {', '.join(single)} was measured: how figures vary from prompt to prompt "
               "cannot be told, only how they repeat.")


def of_slices(rows: list[dict]) -> Iterator[str]:
    """The slices of which less than half as many drafted tokens are accepted as of all prompts."""
    for row in rows:
        whole, _, name = row["dataset"].partition("/")
        every = next((each for each in rows if each["dataset"] == whole and all(
            each.get(key) == row.get(key) for key in ("engine", "num_speculative_tokens", "users"))), None)
        if not name or every is None or row.get("drafts", 0) < SOME_DRAFTS:
            continue
        lengths = row["mean_accepted_length"], every["mean_accepted_length"]
        if lengths[0] - 1 < (lengths[1] - 1) / 2 and lengths[1] >= NEAR_ONE:
            yield (f"{figures.name_of(row)}: the accepted length is {lengths[0]:.2f} where that of all "
                   f"prompts is {lengths[1]:.2f}, so traffic of this kind gains least; train on more of it "
                   "(prompts.source), or weigh it in train.acceptance.weights.")


def of_mix(finished: dict[str, dict]) -> Iterator[str]:
    """The categories of the user's own mix of which the data has next to nothing."""
    weights = finished.get("evaluate", {}).get("settings", {}).get("weights", {}).get("category", {})
    answers = finished.get("responses", {}).get("record", {}).get("categories", {})
    for name, weight in weights.items():
        wanted, had = weight / sum(weights.values()), answers.get(name, 0) / max(1, sum(answers.values()))
        if answers and had < SCARCE * wanted:
            yield (f"{name} is {wanted:.0%} of your mix of traffic (train.acceptance.weights) and {had:.0%} "
                   "of the answers that were made to train on; give more prompts of it (prompts.source).")


def of_data(finished: dict[str, dict]) -> Iterator[str]:
    """What the data does not say of itself."""
    languages = finished.get("prompts", {}).get("record", {}).get("languages", {})
    if (count := languages.get(UNKNOWN, 0)) and count > sum(languages.values()) / 2:
        yield (f"The language of {count} of {sum(languages.values())} training prompts is not known: nothing "
               'says it ("language" of a row), and it is not detected where prompts.languages is null or a '
               "text too short, so that no slice tells one language from another.")


def left_out(finished: dict[str, dict]) -> list[str]:
    """What the stages left out of training or measuring; nothing where all took part."""
    counts = ((finished.get(stage, {}).get("record", {}).get(name), what) for stage, name, what in LEFT_OUT)
    return [f"{count} {what}." for count, what in counts if count]


def _sentence(row: dict, text: str, more: int) -> str:
    others = f" (and {more} more row{'s' if more > 1 else ''})" if more else ""
    return f"{figures.name_of(row)}, {figures.users(row)}{others}: {text}."


def power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def needs_power_of_two(backend: str) -> bool:
    """Whether an attention backend, by vLLM's name, decodes with the MLA kernels of AITER, some builds of
    which give all K + 1 queries of a request one output unless their number is a power of two."""
    return "AITER" in backend and "MLA" in backend


def _uneven(k: int) -> str:
    """What to try where verification seems wrong with drafts of `k` tokens; "" where their number is not to
    blame."""
    if power_of_two(k + 1):
        return ""
    return (f"; K + 1 = {k + 1} is no power of two, with which MLA decode kernels on ROCm are known to fail "
            f"so: try K = {2 ** (k + 1).bit_length() // 2 - 1}")


def _flat(rates: list[float]) -> bool:
    """Whether next to nothing is lost after position 1, by a drafter that does miss at position 1."""
    return len(rates) >= 3 and 0 < rates[0] < 0.9 and rates[-1] > 0.98 * rates[0]

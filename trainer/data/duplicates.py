"""Prompts that say nearly the same: left out of training beside a held-out one, or an earlier one.

Two texts are compared by the sets of five characters in a row that stand in them (small letters, blanks as
one), which needs no words and so no language: their Jaccard similarity. Candidates come from MinHash with
banding (A. Broder, 1997; Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, 3.4); those whose
signatures are far apart are let go, and each of the others is compared exactly, so that nothing is left out
that is not as near as it is said. Gives up: one pair in a hundred at the very bound may be missed, as may be
pairs among hundreds of texts that are all somewhat alike; and a question behind a long text that others share
counts as near.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.splits import Dropped, text_of
from trainer.progress import Progress
from trainer.ranges import AtLeast, AtMost
from trainer.records import Prompt

Hashes = NDArray[np.uint64]
Signatures = NDArray[np.uint32]
WIDTH = 5  # characters in a row
HASHES = 128
FOUND = 0.99  # of the pairs at the bound
SLACK = 0.2  # by which a similarity that signatures tell may be too low: four standard errors and more
CROWD = 512  # prompts of one group of a band that later ones are compared with: else work grows as the square
BLOCK = 4096  # windows that are hashed at once: 4 MiB


@dataclass(frozen=True)
class Duplicates:
    """Leaves out of training what repeats, or is as near as `similarity` to, a held-out prompt or an earlier
    one: the turns, and the system text too. Held-out prompts stay."""

    similarity: Annotated[float, AtLeast(0.5), AtMost(1)]

    def without(self, train: Sequence[Prompt],
                heldout: Sequence[Prompt]) -> tuple[list[Prompt], list[Dropped]]:
        """The training prompts that stay, in order, and the others."""
        first = {text_of(prompt): prompt.id for prompt in reversed([*heldout, *train])}
        again = {prompt.id: ("repeats", first[text_of(prompt)]) for prompt in train
                 if first[text_of(prompt)] != prompt.id}
        fresh = [*heldout, *(prompt for prompt in train if prompt.id not in again)]
        near = {fresh[number].id: ("near", fresh[other].id)
                for number, other in self._near(fresh, len(heldout)).items()}
        found, held = again | near, {prompt.id for prompt in heldout}
        dropped = [Dropped(prompt.id, f"{how} a {'held-out' if of in held else 'training'} text", of)
                   for prompt in train if prompt.id in found for how, of in [found[prompt.id]]]
        return [prompt for prompt in train if prompt.id not in found], dropped

    def _near(self, prompts: Sequence[Prompt], fixed: int) -> dict[int, int]:
        """By number the earlier prompt that stays and that it is near to; the first `fixed` all stay."""
        found: dict[int, int] = {}
        kept: dict[tuple[int, int], list[int]] = {}  # those that stay, by band and group
        signatures = _signatures(prompts)
        for number, groups in enumerate(self._groups(signatures)):
            if number >= fixed:
                others = sorted({other for group in groups for other in kept.get(group, ())})
                alike = (signatures[others] == signatures[number]).mean(axis=1)
                near = next((other for other, share in zip(others, alike, strict=True)
                             if share >= self.similarity - SLACK
                             and self._are_near(prompts[number], prompts[other])), None)
                if near is not None:
                    found[number] = near
                    continue
            for group in groups:
                members = kept.setdefault(group, [])
                if len(members) < CROWD:
                    members.append(number)
        return found

    def _groups(self, signatures: Signatures) -> Iterator[list[tuple[int, int]]]:
        """For each prompt the bands, with the group there, in which it is not alone."""
        rows, count = self._rows(), len(signatures)
        groups = []
        for start in range(0, HASHES - rows + 1, rows):
            band = np.zeros(count, dtype=np.uint64)
            for column in range(start, start + rows):
                band = _mixed(band + signatures[:, column])
            _, group, sizes = np.unique(band, return_inverse=True, return_counts=True)
            groups.append(np.where(sizes[group] > 1, group, -1).astype(np.int32))
        for row in np.stack(groups, axis=1):
            yield [(band, int(group)) for band, group in enumerate(row) if group >= 0]

    def _rows(self) -> int:
        """Hashes in a band: as many as find a pair at the bound with the chance FOUND, which is
        1 - (1 - s^rows)^bands."""
        return max(rows for rows in range(1, 9)
                   if rows == 1 or 1 - (1 - self.similarity ** rows) ** (HASHES // rows) >= FOUND)

    def _are_near(self, one: Prompt, other: Prompt) -> bool:
        return jaccard(_asked(one), _asked(other)) >= self.similarity and \
            jaccard(text_of(one)[0], text_of(other)[0]) >= self.similarity


def _signatures(prompts: Sequence[Prompt]) -> Signatures:
    """[prompts, HASHES], 512 bytes each."""
    found = np.empty((len(prompts), HASHES), dtype=np.uint32)
    with Progress("duplicates", total=len(prompts), unit="prompts") as bar:
        for number, prompt in enumerate(prompts):
            found[number] = signature(shingles(_asked(prompt)))
            bar.advance(1)
    return found


def jaccard(one: str, other: str) -> float:
    """How much two texts have in common, 0 to 1."""
    if one == other:
        return 1.0
    first, second = shingles(one), shingles(other)
    both = len(np.intersect1d(first, second, assume_unique=True))
    return both / (len(first) + len(second) - both)


def shingles(text: str) -> Hashes:
    """Different windows of WIDTH characters as hashes; a shorter text is one window."""
    plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    points = np.frombuffer(plain.encode("utf-32-le"), dtype=np.uint32).astype(np.uint64)
    points = np.pad(points, (0, max(0, WIDTH - len(points))))
    windows = len(points) - WIDTH + 1
    found = np.zeros(windows, dtype=np.uint64)
    for start in range(WIDTH):
        found = _mixed(found + points[start:start + windows])
    return np.unique(found)


def signature(found: Hashes) -> NDArray[np.uint32]:
    """The smallest of each of HASHES multiply-shift hashes of the windows."""
    best = np.full(HASHES, np.iinfo(np.uint32).max, dtype=np.uint32)
    for start in range(0, len(found), BLOCK):
        hashed = (found[start:start + BLOCK, None] * FACTORS + SHIFTS) >> np.uint64(32)
        best = np.minimum(best, hashed.min(axis=0).astype(np.uint32))
    return best


def _mixed(values: Any) -> Hashes:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014): every bit of the result hears every other."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _asked(prompt: Prompt) -> str:
    return "\n".join(prompt.turns)


FACTORS = _mixed(np.arange(HASHES, dtype=np.uint64)) | np.uint64(1)
SHIFTS = _mixed(np.arange(HASHES, 2 * HASHES, dtype=np.uint64))

"""The random numbers of verification."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.kernels.philox import ACCEPT, EMIT, philox, uniform

# Known answers of the Random123 library for philox4x32 with ten rounds.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8)),
    ((0xffffffff,) * 4, (0xffffffff,) * 2, (0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd)),
    ((0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344), (0xa4093822, 0x299f31d0),
     (0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1)),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    columns = [torch.tensor(each)[:, None].repeat(1, 3) for each in (counter, key, words)]
    assert torch.equal(philox(*columns[:2]), columns[2])


@given(st.integers(-2 ** 63, 2 ** 63 - 1), st.integers(0, 2 ** 63 - 1), st.sampled_from([ACCEPT, EMIT]),
       st.integers(0, 100))
def test_a_number_is_that_of_its_words_and_of_nothing_around_it(seed: int, position: int, stream: int,
                                                                 turn: int) -> None:
    word = 0xffffffff
    counter = (position & word, position >> 32, stream, turn)
    c, k = list(counter), [seed & word, (seed >> 32) & word]
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [second >> 32 ^ c[1] ^ k[0], second & word, first >> 32 ^ c[3] ^ k[1], first & word]
        k = [(k[0] + 0x9E3779B9) & word, (k[1] + 0xBB67AE85) & word]
    seeds, positions, turns = (torch.tensor([0, each, 5]) for each in (seed, position, turn))
    found = uniform(seeds, positions, stream, turns)
    assert found.dtype == torch.float64
    assert float(found[1]) == ((c[0] >> 5) * 2 ** 26 + (c[1] >> 6)) / 2 ** 53


def test_places_are_told_apart_and_numbers_are_even() -> None:
    places = torch.arange(20000)
    zero = torch.zeros_like(places)
    drawn = [uniform(zero, places, ACCEPT), uniform(zero, places, EMIT), uniform(places, zero, ACCEPT),
             uniform(zero, places << 32, ACCEPT), uniform(places << 32, zero, ACCEPT),
             uniform(zero, zero, ACCEPT, places)]
    together = torch.cat([each[1:] for each in drawn])
    assert len(together.unique()) == len(together)
    cells = torch.histc(together.float(), 64, 0, 1)
    assert float(((cells - cells.mean()) ** 2 / cells.mean()).sum()) < 130  # 63 degrees of freedom: p 1e-6
    assert torch.corrcoef(torch.stack([each[1:] for each in drawn])).fill_diagonal_(0).abs().max() < 0.035

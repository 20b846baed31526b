"""What processes tell each other: sums over all, the word of the first, and where they do not agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import FORKS

from trainer.errors import UserError
from trainer.strategies import meeting
from trainer.strategies.process import Group, joined
from trainer.strategies.world import World


def take_part(world: World, facts: dict[str, Any], out: Path) -> None:
    torch.set_num_threads(1)
    with joined(world, "cpu", world.size) as group:
        sums, tokens = group.total({"loss": (0.5, 2.0 * world.rank), "accepted": (1.0 + world.rank, 1.0)},
                                   10 + world.rank)
        found = {"sums": sums, "tokens": tokens, "told": group.tell(f"by {world.rank}"), "main": group.main}
        try:
            group.agree(**facts)
        except UserError as error:
            found["differs"] = str(error)
    (out / str(world.rank)).write_text(json.dumps(found))


def test_two_processes_add_up_and_hear_the_first(tmp_path: Path) -> None:
    store = meeting.host()
    worlds = [World(rank, 2, rank, "127.0.0.1", store.port, hosted=True) for rank in range(2)]
    forks = [FORKS.Process(target=take_part, args=(world, {"seed": 1, "rate": world.rank}, tmp_path))
             for world in worlds]
    for fork in forks:
        fork.start()
    for fork in forks:
        fork.join(120)
        fork.kill()
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    for rank, each in enumerate(found):
        assert each["sums"] == {"loss": [1.0, 2.0], "accepted": [3.0, 2.0]} and each["tokens"] == 21
        assert each["told"] == "by 0" and each["main"] == (rank == 0)
        assert each["differs"].startswith("process 1 of 2 has another rate than the first one: 1, not 0; ")


def test_one_that_is_alone_has_nothing_to_ask_for() -> None:
    group, sums = Group(0, 1, "cpu"), {"loss": (0.1, 3.0)}
    assert group.total(sums, 5) == (sums, 5) and group.tell("word") == "word"
    group.agree(anything=object())
    with joined(World(), "cuda", 1) as own:
        assert own == Group(0, 1, "cuda"), "the device is nobody's business here"


def test_a_first_process_that_ends_is_noticed_by_those_that_wait() -> None:
    store = meeting.host()
    world = World(1, 2, 1, "127.0.0.1", store.port, hosted=True)
    meeting.begin(meeting.part(store, world), "abc")
    assert meeting.awaited(world) == "abc"
    del store
    with pytest.raises(UserError, match="process 1 of 2 has lost the first one"):
        meeting.gather(world)

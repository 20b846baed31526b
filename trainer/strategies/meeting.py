"""Where processes find each other: a store of torch.distributed that one of them, or who started them, keeps.

It is there before anything is computed together, so that processes which have to wait until the first one has
prepared the data wait here, without a limit, and not inside a collective, which would give up."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

from trainer.errors import UserError, first_line
from trainer.strategies.world import World

PATIENCE = timedelta(minutes=30)  # for one that starts late
BEGIN = "begin"


def host() -> Any:
    """A store for processes of this machine, on a port that was free: nobody can have taken it since."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def part(whole: Any, world: World) -> Any:
    """What of a store belongs to the processes of `world`."""
    from torch.distributed import PrefixStore

    return PrefixStore(f"trainer/{world.attempt}", whole)


@cache
def store(world: World) -> Any:
    """That of the processes of `world`; the first one keeps it where nobody else does."""
    from torch.distributed import DistError, TCPStore

    keeps = world.rank == 0 and not world.hosted
    try:
        return part(TCPStore(world.address, world.port, is_master=keeps, wait_for_workers=False,
                             timeout=PATIENCE), world)
    except DistError as error:
        remedy = "set MASTER_PORT to one that is free" if keeps else "see what became of process 0"
        raise UserError(f"process {world.rank} of {world.size} cannot meet the others at {world.address}:"
                        f"{world.port} ({first_line(error)}); {remedy}, and run the same command "
                        "again") from error


def begin(meeting: Any, what: str) -> None:
    """Lets those go on that wait in `awaited`: they take part in `what`."""
    meeting.set(BEGIN, what)


def awaited(world: World) -> str:
    """What the first process has begun; "" when there is nothing to take part in."""
    from torch.distributed import DistNetworkError, DistStoreError

    while True:
        try:
            store(world).wait([BEGIN], timedelta(seconds=10))
            return store(world).get(BEGIN).decode()
        except DistNetworkError as error:
            raise _left(world) from error
        except DistStoreError:  # not yet
            continue


def gather(world: World) -> None:
    """Returns when all processes have come; raises UserError that names those that do not."""
    from torch.distributed import DistNetworkError, DistStoreError

    meeting, keys = store(world), [f"here/{rank}" for rank in range(world.size)]
    try:
        meeting.set(f"here/{world.rank}", "yes")
        meeting.wait(keys, PATIENCE)
    except DistNetworkError as error:
        raise _left(world) from error
    except DistStoreError as error:
        absent = [key.rpartition("/")[2] for key in keys if not meeting.check([key])]
        raise UserError(f"process {', '.join(absent)} of {world.size} has not come within {PATIENCE}; start "
                        "as many as hardware.processes says, and look at what those print") from error


def _left(world: World) -> UserError:
    return UserError(f"process {world.rank} of {world.size} has lost the first one, which has ended; what it "
                     "printed says why")

"""How likely a target behind real vLLM servers finds the tokens of a row, which is sent as a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import httpx

from trainer.engines.vllm_pool import Pool
from trainer.engines.vllm_request import request
from trainer.engines.vllm_server import RunningServer
from trainer.errors import UserError
from trainer.records import Sampling

ANY = Sampling(1, 0.0, 1.0, 0)  # the shortest answer; nobody reads it


def likelihoods(pool: Pool, rows: Iterable[Sequence[int]]) -> Iterator[list[float]]:
    """For each row, in order, the natural logarithms of the probabilities of its tokens but the first. Raises
    UserError for a refusal, or a server that was lost for good."""
    waiting: dict[int, list[float]] = {}
    due = 0
    for name, found in pool.as_they_come((str(index), partial(score, index, row))
                                         for index, row in enumerate(rows)):
        waiting[int(name)] = found
        while due in waiting:
            yield waiting.pop(due)
            due += 1


async def score(index: int, row: Sequence[int], server: RunningServer,
                http: httpx.AsyncClient) -> list[float]:
    """Those of one row; errors name it by `index`."""
    body = request(server.served_name, row, ANY, str(index), ()) | {"prompt_logprobs": 0}
    choice = server.client.choice(await server.client.post(http, index, body), index, body)
    try:
        return [float(each[str(token)]["logprob"])
                for each, token in zip(choice["prompt_logprobs"][1:], row[1:], strict=True)]
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(f"the server at {server.url} did not tell how likely the tokens of request {index} "
                        "are (prompt_logprobs): use vLLM 0.32 or later, without a gateway before "
                        "it.") from error

"""What is said to a running vLLM server over HTTP: who it is, completions of token ids, counters.

Only a broken connection to a living server is tried again; every refusal is a `UserError` at once, and every
loss a `ServerLost`. Requests that were already answered are with the caller by then, through `progress`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx

from trainer.engines.vllm_installation import check_version
from trainer.errors import UserError
from trainer.records import Completion

RETRY_SECONDS = (0.5, 1.0, 4.0)
DYING_SECONDS = 5.0
HEALTH_SECONDS = 5.0
CONNECT_SECONDS = 10.0
FACT_SECONDS = 30.0  # for what a server knows without computing
IDLE_SECONDS = 3.0  # the count of requests may lag behind the last answer
RUNNING = re.compile(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", re.MULTILINE)
COUNTER = re.compile(r"^vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)"
                     r"_total\{(.*)\} (\S+)$", re.MULTILINE)

Progress = Callable[[int, Completion], None]


class ServerLost(UserError):
    """The server ended, cannot be reached, or failed inside: one that comes back may answer."""


class ServedModel(NamedTuple):
    """How a server calls its model, its longest sequence in tokens, and where it loaded it from."""

    name: str
    max_length: int
    root: str


@dataclass(frozen=True)
class SpecCounters:
    """vLLM's counters of speculation since its start. `drafts` counts the steps of a request that had a draft
    to verify; `per_position[i]` those that accepted more than i tokens. All zero and () without a drafter."""

    drafts: int
    draft_tokens: int
    accepted: int
    per_position: tuple[int, ...]

    def __sub__(self, earlier: SpecCounters) -> SpecCounters:
        pairs = zip(self.per_position, earlier.per_position, strict=True)
        return SpecCounters(self.drafts - earlier.drafts, self.draft_tokens - earlier.draft_tokens,
                            self.accepted - earlier.accepted, tuple(now - then for now, then in pairs))


class VllmClient:
    """Speaks to the server at `url`. `death` says why a started one is gone, or None while it lives."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float,
                 death: Callable[[], ServerLost | None] | None) -> None:
        self.url = url
        self.death = death
        self.options: dict[str, Any] = {
            "base_url": url,
            "headers": {"Authorization": f"Bearer {api_key}"} if api_key else {},
            "timeout": httpx.Timeout(timeout_s, connect=CONNECT_SECONDS),
            "verify": not url.startswith("http://"),  # loading certificates takes longer than a request
            # a proxy is for the outside world; it would swallow the loopback interface
            "trust_env": not url.startswith(("http://127.", "http://localhost")),
        }

    def healthy(self) -> bool:
        """Whether the server answers and its engine is up; never raises for a server that does not."""
        try:
            with httpx.Client(**self.options) as client:
                return client.get("/health", timeout=HEALTH_SECONDS).status_code == 200
        except httpx.TransportError:
            return False

    def version(self) -> str:
        """vLLM's version, checked to be new enough."""
        version = self._get_json("/version").get("version", "of unknown version")
        check_version(version, f"the server at {self.url}")
        return version

    def model(self, name: str) -> ServedModel:
        """The model served as `name`, or the only one there is."""
        try:
            models = {model["id"]: model for model in self._get_json("/v1/models")["data"]}
        except (KeyError, TypeError) as error:
            raise self._stranger("/v1/models") from error
        if name not in models and len(models) != 1:
            raise UserError(f"the server at {self.url} serves {', '.join(models)}, and which of them is the "
                            f"target is not clear: serve it alone or with --served-model-name {name}.")
        found = models.get(name) or next(iter(models.values()))
        if not isinstance(found.get("max_model_len"), int):
            raise self._stranger("/v1/models")
        return ServedModel(found["id"], found["max_model_len"], str(found.get("root") or found["id"]))

    def counters(self) -> SpecCounters:
        """Counters since the server's start, read until they rest: they may lag behind the last answer."""
        before, now = None, self._scrape()
        for _ in range(20):
            if now == before:
                break
            time.sleep(0.05)
            before, now = now, self._scrape()
        return now

    def require_idle(self) -> None:
        """Raises UserError while the server answers, or is asked by, anybody."""
        deadline = time.monotonic() + IDLE_SECONDS
        while requests := self._requests():
            if time.monotonic() >= deadline:
                raise UserError(f"the server at {self.url} has {requests} requests of others to answer, and "
                                "what is measured beside them says nothing: wait until it is idle, or give "
                                "another one, then run the same command again.")
            time.sleep(0.1)

    def require_drafts(self, k: int | None) -> None:
        """Raises UserError unless the server drafts `k` tokens a step; None: nothing."""
        positions = len(self.counters().per_position)
        if positions == (k or 0):
            return
        found = f"drafts {positions} tokens a step" if positions else "counts no drafts in its /metrics"
        if k is None:
            raise UserError(f"the server at {self.url} {found} where plain decoding was expected, the "
                            "baseline: start it without --speculative-config.")
        raise UserError(f"the server at {self.url} {found} where {k} were expected: start it with "
                        f"--speculative-config and num_speculative_tokens={k}, and without "
                        "--disable-log-stats.")

    def _requests(self) -> int:
        """How many it answers or keeps waiting."""
        found = RUNNING.findall(self._get("/metrics").text)
        if not found:
            raise UserError(f"the server at {self.url} does not count its requests in /metrics "
                            "(vllm:num_requests_running), so nothing can be measured: use vLLM 0.32 or "
                            "later, without --disable-log-stats.")
        return sum(int(float(count)) for count in found)

    def _scrape(self) -> SpecCounters:
        totals = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
        positions: dict[int, int] = {}
        for name, labels, value in COUNTER.findall(self._get("/metrics").text):
            if name == "accepted_tokens_per_pos":
                position = int(labels.split('position="')[1].split('"')[0])
                positions[position] = positions.get(position, 0) + int(float(value))
            else:
                totals[name] += int(float(value))
        return SpecCounters(totals["drafts"], totals["draft_tokens"], totals["accepted_tokens"],
                            tuple(positions[place] for place in sorted(positions)))

    def _get(self, path: str) -> httpx.Response:
        try:
            with httpx.Client(**self.options) as client:
                answer = client.get(path, timeout=FACT_SECONDS)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._dead(DYING_SECONDS) or self._silent(error) from error
        if answer.status_code != 200:
            raise UserError(f"the server at {self.url} answered {path} with {answer.status_code} where a "
                            "vLLM server answers 200: check engine.url, and VLLM_API_KEY if it asks for a "
                            "key.")
        return answer

    def _get_json(self, path: str) -> dict[str, Any]:
        return self._body(self._get(path))

    def _body(self, answer: httpx.Response) -> dict[str, Any]:
        try:
            body = answer.json()
        except ValueError as error:
            raise self._stranger(answer.request.url.path) from error
        if not isinstance(body, dict):
            raise self._stranger(answer.request.url.path)
        return body

    def _silent(self, error: Exception) -> ServerLost:
        reason = str(error) or type(error).__name__
        return ServerLost(f"the server at {self.url} does not answer ({reason}): check that it runs and that "
                          "this is its address (engine.url or target_engine.runtime), then run the same "
                          "command again.")

    def _stranger(self, path: str) -> UserError:
        return UserError(f"the server at {self.url} does not answer {path} as vLLM does: check that this "
                         "(engine.url or target_engine.runtime) is the address of a vLLM server.")

    def complete(self, bodies: Sequence[dict[str, Any]], concurrency: int,
                 progress: Progress | None) -> list[Completion]:
        """Answers the requests in order, at most `concurrency` of them in flight."""
        return asyncio.run(self._complete_all(bodies, concurrency, progress))

    async def _complete_all(self, bodies: Sequence[dict[str, Any]], concurrency: int,
                            progress: Progress | None) -> list[Completion]:
        answers: dict[int, Completion] = {}
        waiting = iter(range(len(bodies)))
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)

        async def work(client: httpx.AsyncClient) -> None:
            for index in waiting:
                answers[index] = await self.complete_one(client, index, bodies[index])
                if progress is not None:
                    progress(index, answers[index])

        async with httpx.AsyncClient(**self.options, limits=limits) as client:
            workers = [asyncio.ensure_future(work(client)) for _ in range(min(concurrency, len(bodies)))]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
        return [answers[index] for index in range(len(bodies))]

    async def complete_one(self, client: httpx.AsyncClient, index: int, body: dict[str, Any]) -> Completion:
        """The answer to one request, checked; errors name it by `index`."""
        start = time.perf_counter()
        answer = await self.post(client, index, body)
        seconds = time.perf_counter() - start
        choice = self.choice(answer, index, body)
        if choice["finish_reason"] not in ("stop", "length"):
            raise UserError(f"the server at {self.url} ended request {index} with "
                            f"{choice['finish_reason']!r} where \"stop\" or \"length\" was expected: see its "
                            "log, then run the same command again.")
        return Completion(tuple(choice["token_ids"]), choice["finish_reason"], seconds)

    def choice(self, answer: dict[str, Any], index: int, body: dict[str, Any]) -> dict[str, Any]:
        """The one answer in it. Raises UserError unless it is of the model and the token ids that were sent,
        with token ids of its own."""
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict) \
                or answer.get("model") != body["model"] or "finish_reason" not in choices[0]:
            raise UserError(f"the server at {self.url} answered request {index} to model {body['model']} "
                            f"with {len(choices) if isinstance(choices, list) else 'no'} choices of model "
                            f"{answer.get('model')} where one was expected: see that vLLM itself listens "
                            "there, and nothing before it.")
        if choices[0].get("token_ids") is None or choices[0].get("prompt_token_ids") != body["prompt"]:
            raise UserError(f"the server at {self.url} did not give back the token ids of request {index}, "
                            "so answers cannot be stored exactly: use vLLM 0.32 or later, without a gateway "
                            "before it.")
        return choices[0]

    async def post(self, client: httpx.AsyncClient, index: int, body: dict[str, Any]) -> dict[str, Any]:
        """What the server says to a request for a completion, as it is."""
        for pause in (*RETRY_SECONDS, None):
            try:
                answer = await client.post("/v1/completions", json=body)
            except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
                raise UserError(f"request {index} had no answer from {self.url} within the time of "
                                "engine.runtime.request_timeout_s: raise it, or send fewer at "
                                "once.") from error
            except httpx.TransportError as error:
                reason = await asyncio.to_thread(self._dead, pause or DYING_SECONDS)
                if reason is not None or pause is None:
                    raise reason or self._silent(error) from error
                await asyncio.sleep(pause)
                continue
            if answer.status_code == 200:
                return self._body(answer)
            reason = await asyncio.to_thread(self._dead, DYING_SECONDS) if answer.is_server_error else None
            kind = ServerLost if answer.is_server_error else UserError
            raise reason or kind(f"the server at {self.url} refused request {index} "
                                 f"({len(body['prompt'])} prompt tokens, {body['max_tokens']} to answer) "
                                 f"with {answer.status_code}: {_message(answer)}")
        raise AssertionError("the last attempt returns or raises")

    def _dead(self, patience: float) -> ServerLost | None:
        """Why the server is gone, waiting up to `patience` seconds for it to go; None if it lives on."""
        deadline = time.monotonic() + patience
        while self.death is not None:
            if (reason := self.death()) is not None or time.monotonic() >= deadline:
                return reason
            time.sleep(0.1)
        return None


def _message(answer: httpx.Response) -> str:
    """The server's own words, whatever shape they come in."""
    try:
        body = answer.json()
    except ValueError:
        return answer.text.strip()[:400] or answer.reason_phrase
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:400]

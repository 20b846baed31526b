"""Hands out the hidden states that vLLM captures (method `extract_hidden_states`), one file a request.

This module runs inside vLLM's processes and imports nothing of the trainer; a server loads it with

    --kv-transfer-config '{"kv_connector": "HiddenStatesConnector", "kv_connector_module_path": "<module>",
        "kv_role": "kv_producer", "kv_connector_extra_config": {"folder": "<folder>", "layers": [2, 9, 30]}}'

`layers` are those of the speculative configuration, ascending, the number of layers at the end. A request
gets a file only if its `kv_transfer_params` say `"hidden_states": true`. The answer's `kv_transfer_params`
give the bare name of the file in `folder`, chosen here, and facts to check it by; the file may appear a
moment after the answer. It holds `states` [rows, layers, hidden] and `tokens` [rows] int64 and appears by a
rename, so it is complete as soon as it is there; `<name>.failed` with a reason appears in its stead if it
cannot be written.

The reader removes what it has read. A name begins with the 8 hexadecimal digits that the request gave as
`"reader"`, so a reader that stops can remove all that is its own. What is left by one that was killed goes
when it is an hour old: whichever server uses the folder removes it, at its start and while it works.

One request's way: the scheduler side learns that it has finished, keeps its blocks and hands their ids to the
workers with the next step; the worker of tensor-parallel rank 0 copies them before that step computes
anything, gives them back once they are copied, and writes in a thread. Requests that were aborted or failed
keep nothing; one that was preempted comes here once, when it has finished after all.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec, KVCacheConfig
from vllm.v1.request import Request, RequestStatus

FORMAT = 2
WRITERS = 4
STALE_SECONDS = 3600.0  # a file this old was left by a reader that is gone: readers wait for minutes at most
SWEEP_SECONDS = 600.0  # between two looks for such files
READER = re.compile(r"[0-9a-f]{8}")
NOBODY = "0" * 8
OURS = re.compile(r"[0-9a-f]{32}\.safetensors(\.partial|\.failed)?")
COMPLETE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
logger = init_logger(f"vllm.{__name__}")


@dataclass
class Job:
    """A finished request: its tokens, and the blocks that hold their states in order."""

    request: str
    name: str
    tokens: list[int]
    blocks: list[int]


@dataclass
class Jobs(KVConnectorMetadata):
    """What the scheduler side tells the workers with a step."""

    jobs: list[Job] = field(default_factory=list)


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Both sides in one class, as vLLM has it: one object beside the scheduler, one in every worker."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole,
                 kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer, model = vllm_config.kv_transfer_config, vllm_config.model_config
        settings = transfer.kv_connector_extra_config
        unknown = sorted(set(settings) - {"folder", "layers"})
        if unknown or "folder" not in settings or "layers" not in settings:
            raise ValueError("HiddenStatesConnector takes kv_connector_extra_config with folder and layers, "
                             f"found {sorted(settings)}")
        self.folder = Path(settings["folder"])
        self.facts = {"format": FORMAT, "layers": list(settings["layers"]),
                      "hidden_size": model.get_hidden_size(),
                      "dtype": str(model.dtype).removeprefix("torch."),
                      "model_layers": model.get_total_num_hidden_layers(),
                      "vocabulary": model.get_vocab_size(),
                      # what of a row's states depends on other requests
                      "max_num_seqs": vllm_config.scheduler_config.max_num_seqs,
                      "prefix_caching": bool(vllm_config.cache_config.enable_prefix_caching)}
        _check_layers(self.facts, vllm_config)
        self.engine = str(transfer.engine_id)
        self.mark = hashlib.blake2b(self.engine.encode(), digest_size=4).hexdigest()
        self.group = _group_of_states(kv_cache_config)
        self.block = kv_cache_config.kv_cache_groups[self.group].kv_cache_spec.block_size
        self.finished: list[Job] = []
        self.named = 0
        self.swept = -math.inf
        self.cache: Tensor | None = None
        self.copying: dict[str, torch.cuda.Event | None] = {}
        self.stream: torch.cuda.Stream | None = None
        self.writers: ThreadPoolExecutor | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()

    def get_finished_count(self) -> int:
        """One worker alone speaks for a request; vLLM would wait for all of them for ever."""
        return 1

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str:
        """All layers of a token lie together, so a block is copied in one piece."""
        return "LBNHC"

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False  # nothing is ever loaded

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        pass

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        groups: list[list[int]] = [[]] * self.group + [block_ids]
        return self.request_finished_all_groups(request, tuple(groups))

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) \
            -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks must stay, and what the answer says; see the module."""
        wanted = (request.kv_transfer_params or {}).get("hidden_states")
        if wanted is not True or request.status not in COMPLETE:
            return False, None
        tokens = request.prompt_token_ids
        blocks = block_ids[self.group] if self.group < len(block_ids) else []
        if not tokens:
            return False, {"error": "the request has no token ids"}
        if (kept := len(blocks) * self.block) < len(tokens):
            return False, {"error": f"only {kept} states are kept for {len(tokens)} tokens"}
        self._sweep()
        name = self._name(request)
        self.finished.append(Job(request.request_id, name, list(tokens), list(blocks)))
        return True, {"file": name, "rows": len(tokens), **self.facts}

    def _name(self, request: Request) -> str:
        """A name that no other file has: whose it is, from which server, and a hash."""
        self.named += 1
        reader = str((request.kv_transfer_params or {}).get("reader"))
        unique = hashlib.blake2b(f"{self.engine}/{self.named}/{request.request_id}".encode(), digest_size=8)
        owner = reader if READER.fullmatch(reader) else NOBODY
        return f"{owner}{self.mark}{unique.hexdigest()}.safetensors"

    def _sweep(self) -> None:
        if (now := time.monotonic()) - self.swept >= SWEEP_SECONDS:
            self.swept = now
            _remove(self.folder, lambda path: path.stat().st_mtime < time.time() - STALE_SECONDS)

    def build_connector_meta(self, scheduler_output: Any) -> Jobs:
        jobs, self.finished = self.finished, []
        return Jobs(jobs)

    # The workers' side.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        group = self._kv_cache_config.kv_cache_groups[self.group]
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", dict.fromkeys(group.layer_names,
                                                                             group.kv_cache_spec))
        names = [name for name in kv_caches if isinstance(specs.get(name), HiddenStateCacheSpec)]
        if not names or get_tensor_model_parallel_rank() != 0:
            return  # of several workers the one that computes the last layers has them, on every rank alike
        self.cache = kv_caches[names[0]]  # [blocks, layers, tokens of a block, hidden]
        expected = [len(self.facts["layers"]), self.block, self.facts["hidden_size"]]
        if len(names) > 1 or list(self.cache.shape[1:]) != expected:
            raise ValueError(f"hidden states lie as {tuple(self.cache.shape)} in {names}, and [blocks, "
                             f"{', '.join(map(str, expected))}] in one layer was expected: this vLLM stores "
                             "them in a way that HiddenStatesConnector does not know")
        self.writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="hidden-states")

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """The first thing that a worker does in a step, hence the earliest moment to copy."""
        if self.writers is None or not isinstance(kv_connector_metadata, Jobs):
            return
        for job in kv_connector_metadata.jobs:
            states, copied = self._copy(job)
            self.copying[job.request] = copied
            self.writers.submit(_write, self.folder / job.name, states, job.tokens, copied,
                                self.facts).add_done_callback(_tell)

    def _copy(self, job: Job) -> tuple[Tensor, torch.cuda.Event | None]:
        """States [rows, layers, hidden] in the host's memory, complete after the event (None: at once)."""
        assert self.cache is not None
        by_token, rows = self.cache.transpose(1, 2), len(job.tokens)
        if not self.cache.is_cuda:
            blocks = torch.tensor(job.blocks, device=self.cache.device)
            return by_token.index_select(0, blocks).flatten(0, 1)[:rows].cpu(), None
        if self.stream is None:
            self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())  # the step that wrote the states
        with torch.cuda.stream(self.stream):
            blocks = torch.tensor(job.blocks, pin_memory=True).to(self.cache.device, non_blocking=True)
            gathered = by_token.index_select(0, blocks).flatten(0, 1)[:rows]
            states = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
            states.copy_(gathered, non_blocking=True)
            copied = torch.cuda.Event(blocking=True)
            copied.record()
        return states, copied

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, None]:
        """The requests whose blocks can be given back."""
        done = {request for request, copied in self.copying.items() if copied is None or copied.query()}
        for request in done:
            del self.copying[request]
        return done or None, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def shutdown(self) -> None:
        """The workers end first and write what they have; then the scheduler's side removes what this server
        wrote and nobody fetched. vLLM does not always come here: see the module for what happens then."""
        if self.writers is not None:
            self.writers.shutdown(wait=True)
        if self.role == KVConnectorRole.SCHEDULER:
            _remove(self.folder, lambda path: path.name.startswith(self.mark, len(NOBODY)))


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the bytes of a contiguous tensor in the host's memory."""
    return zlib.crc32(tensor.view(torch.uint8).numpy())


def _write(path: Path, states: Tensor, tokens: list[int], copied: torch.cuda.Event | None,
           facts: dict[str, Any]) -> None:
    if copied is not None:
        copied.synchronize()
    tensors = {"states": states, "tokens": torch.tensor(tokens, dtype=torch.int64)}
    described = {**facts, "rows": len(tokens), "bytes": sum(each.nbytes for each in tensors.values()),
                 "crc32": {name: checksum(tensor) for name, tensor in tensors.items()}}
    partial = path.with_name(f"{path.name}.partial")
    try:
        save_file(tensors, partial, metadata={name: json.dumps(fact) for name, fact in described.items()})
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        logger.error("hidden states could not be written to %s: %s", path, error)
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        with suppress(OSError):
            path.with_name(f"{path.name}.failed").write_text(str(error))


def _tell(written: Future[None]) -> None:
    """What a thread raises would be lost otherwise."""
    if (error := written.exception()) is not None:
        logger.error("a writer of hidden states failed", exc_info=error)


def _check_layers(facts: dict[str, Any], config: VllmConfig) -> None:
    """Raises ValueError unless the layers are those that vLLM captures, and can mean what they should."""
    speculation, layers, count = config.speculative_config, facts["layers"], facts["model_layers"]
    captured = [] if speculation is None or speculation.method != "extract_hidden_states" else list(
        getattr(speculation.draft_model_config.hf_config, "eagle_aux_hidden_state_layer_ids", None) or [])
    if layers != captured:
        raise ValueError(f"HiddenStatesConnector is to hand out layers {layers}, but --speculative-config "
                         f"with method extract_hidden_states captures {captured}: give both the same list")
    if layers != sorted(set(layers)) or layers[0] < 0 or layers[-1] != count:
        raise ValueError(f"layers {layers} must ascend and end with {count}, the state after the last layer")


def _group_of_states(config: KVCacheConfig) -> int:
    """Index of the group of cache layers that the states are in: one of their own, or the only one."""
    groups: Sequence[Any] = config.kv_cache_groups
    found = [index for index, group in enumerate(groups)
             if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
    if len(found) != 1 and len(groups) != 1:
        raise ValueError(f"{len(found)} of {len(groups)} groups of cache layers hold hidden states, and one "
                         "was expected: this model is not supported by method extract_hidden_states")
    return found[0] if found else 0


def _remove(folder: Path, condition: Callable[[Path], bool]) -> None:
    with suppress(OSError):  # whoever reads there will say so
        for path in folder.iterdir():
            with suppress(OSError):  # somebody else was faster
                if OURS.fullmatch(path.name) and condition(path):
                    path.unlink()

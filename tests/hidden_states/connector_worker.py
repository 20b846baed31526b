"""What the connector does when it is called as vLLM calls it; run by vLLM's interpreter.

    PYTHONPATH=CONNECTOR_FOLDER python connector_worker.py MODEL OUTPUT_FOLDER

Configuration, requests and cache specifications are vLLM's own; only the engine around them is missing, so
that every case can be made on purpose. The findings go to OUTPUT_FOLDER/found.json.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}

import speculator_trainer_states as connector
import torch
from safetensors import safe_open
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.request import Request, RequestStatus

model, output = sys.argv[1], Path(sys.argv[2])
LAYERS, HIDDEN, BLOCK, BLOCKS = [1, 3], 64, 4, 40
found: dict[str, Any] = {}


def config(captured: list[int] = LAYERS, caching: bool = False, **extra: Any) -> VllmConfig:
    extra = {"folder": str(output / "states"), "layers": LAYERS} | extra
    return EngineArgs(
        model=model, dtype="float32", max_model_len=128, max_num_seqs=2, enforce_eager=True,
        enable_prefix_caching=caching,
        speculative_config={"method": "extract_hidden_states", "num_speculative_tokens": 1,
                            "draft_model_config": {"hf_config": {
                                "eagle_aux_hidden_state_layer_ids": captured}}},
        kv_transfer_config={"kv_connector": "HiddenStatesConnector", "kv_role": "kv_producer",
                            "kv_connector_module_path": "speculator_trainer_states",
                            "kv_connector_extra_config": extra}).create_engine_config()


def groups() -> KVCacheConfig:
    attention = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32)
    states = HiddenStateCacheSpec(block_size=BLOCK, num_kv_heads=len(LAYERS), head_size=HIDDEN,
                                  dtype=torch.float32)
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[
        KVCacheGroupSpec(["attention"], attention), KVCacheGroupSpec(["cache_only"], states)])


def request(name: str, tokens: list[int], status: RequestStatus, asks: Any = True,
            reader: Any = "0123abcd") -> Request:
    extra = {} if asks is None else {"kv_transfer_params": {"hidden_states": asks, "reader": reader}}
    made = Request(request_id=name, prompt_token_ids=tokens, pooling_params=None,
                   sampling_params=SamplingParams(max_tokens=1, extra_args=extra))
    made.status = status
    return made


def waited(path: Path) -> Path:
    deadline = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)
    return path


class Clock:
    """The time, so many seconds later for who looks for stale files."""

    time = time.time

    def __init__(self, later: float) -> None:
        self.now = scheduler.swept + later

    def monotonic(self) -> float:
        return self.now


def refused(**changes: Any) -> str:
    try:
        KVConnectorFactory.create_connector(config(**changes), KVConnectorRole.SCHEDULER, groups())
    except ValueError as error:
        return str(error)
    return "accepted"


folder = output / "states"
folder.mkdir()
old, young, foreign = (folder / name for name in (f"{0:032x}.safetensors", f"{1:032x}.safetensors.partial",
                                                  "notes.safetensors"))
for path in (old, young, foreign):
    path.write_text("")
for path in (old, foreign):
    os.utime(path, (time.time() - 5000,) * 2)
given = config()
scheduler = KVConnectorFactory.create_connector(given, KVConnectorRole.SCHEDULER, groups())
worker = KVConnectorFactory.create_connector(given, KVConnectorRole.WORKER, groups())
found["kept at the start"] = sorted(path.name for path in folder.iterdir())
connector.get_tensor_model_parallel_rank = lambda: 1
worker.register_kv_caches({"cache_only": torch.zeros(BLOCKS, len(LAYERS), BLOCK, HIDDEN)})
found["rank 1 writes"] = worker.writers is not None
connector.get_tensor_model_parallel_rank = lambda: 0
worker.register_kv_caches({"attention": torch.zeros(1)})
found["a worker without the layer writes"] = worker.writers is not None

# The cache as vLLM lays it out: a token's layers together; every number says where it lies.
cache = torch.arange(BLOCKS * BLOCK * len(LAYERS) * HIDDEN).float().view(BLOCKS, BLOCK, len(LAYERS), HIDDEN)
worker.register_kv_caches({"attention": torch.zeros(1), "cache_only": cache.transpose(1, 2)})

cases = {
    "aborted": request("a", [1, 2], RequestStatus.FINISHED_ABORTED),
    "failed": request("b", [1, 2], RequestStatus.FINISHED_ERROR),
    "ignored": request("c", [1, 2], RequestStatus.FINISHED_IGNORED),
    "not asked": request("d", [1, 2], RequestStatus.FINISHED_LENGTH_CAPPED, asks=None),
    "asked in vain": request("e", [1, 2], RequestStatus.FINISHED_LENGTH_CAPPED, asks="/etc/passwd"),
    "too few blocks": request("f", list(range(9)), RequestStatus.FINISHED_LENGTH_CAPPED),
}
found["answers"] = {name: scheduler.request_finished_all_groups(each, ([0], [5, 6]))
                    for name, each in cases.items()}
found["jobs of these"] = len(scheduler.build_connector_meta(None).jobs)

generator, rows = torch.Generator().manual_seed(0), []
for number in range(30):
    length = int(torch.randint(1, 33, (1,), generator=generator))
    needed = -(-length // BLOCK) + number % 2  # at times a block more than is needed
    blocks = torch.randperm(BLOCKS, generator=generator)[:needed].tolist()
    tokens = torch.randint(0, 300, (length,), generator=generator).tolist()
    stopped = RequestStatus.FINISHED_STOPPED if number % 2 else RequestStatus.FINISHED_LENGTH_CAPPED
    keeps, facts = scheduler.request_finished_all_groups(request("same id", tokens, stopped), ([], blocks))
    worker.handle_preemptions(scheduler.build_connector_meta(None))
    cache_before = cache.clone()
    cache.fill_(-1)  # the step goes on and may use the blocks as soon as they are given back
    done = worker.get_finished({"same id"})
    path = waited(folder / facts["file"])
    with safe_open(path, "pt") as file:
        states, ids, described = file.get_tensor("states"), file.get_tensor("tokens"), file.metadata()
    cache.copy_(cache_before)
    expected = torch.stack([cache[blocks[row // BLOCK], row % BLOCK] for row in range(length)])
    sums = json.loads(described["crc32"])
    rows.append({"keeps": keeps, "facts": facts, "done": [sorted(done[0] or ()), done[1]],
                 "states": torch.equal(states, expected), "tokens": ids.tolist() == tokens,
                 "sums": sums == {"states": connector.checksum(states), "tokens": connector.checksum(ids)},
                 "described": [json.loads(described[name]) for name in ("rows", "layers", "bytes")]
                 == [length, LAYERS, states.nbytes + ids.nbytes]})
found["rows"] = rows
found["nothing more to give back"] = worker.get_finished(set())
ends = RequestStatus.FINISHED_STOPPED
names = [scheduler.request_finished_all_groups(request("h", [1], ends, reader=reader), ([], [0]))[1]["file"]
         for reader in ("89abcdef", "89abcdef", "89ABCDEF", "../../../", "", None, 7, "89abcdef0")]
found["whose"] = [name[:8] for name in names]
found["all different"] = len(set(names)) == len(names) and all(map(connector.OURS.fullmatch, names))
scheduler.build_connector_meta(None)

left = folder / f"{2:032x}.safetensors"  # by a reader that was killed an hour ago
for later, looks in ((connector.SWEEP_SECONDS - 1, "in between"), (connector.SWEEP_SECONDS, "after a while")):
    left.write_text("")
    os.utime(left, (time.time() - connector.STALE_SECONDS - 1,) * 2)
    connector.time = Clock(later)
    scheduler.request_finished_all_groups(request("i", [1], ends), ([], [0]))
    found[f"stale file {looks}"] = left.exists()
connector.time = time
scheduler.build_connector_meta(None)
caching = KVConnectorFactory.create_connector(config(caching=True), KVConnectorRole.SCHEDULER, groups())
found["with prefix caching"] = caching.facts["prefix_caching"]
found["partial files"] = sorted(path.name for path in folder.glob("*.partial") if path != young)

_, facts = scheduler.request_finished_all_groups(
    request("g", [1], RequestStatus.FINISHED_STOPPED), ([], [0]))
(folder / f"{facts['file']}.partial").mkdir()  # where the file is to be written
worker.handle_preemptions(scheduler.build_connector_meta(None))
worker.shutdown()
(folder / f"{facts['file']}.partial").rmdir()
found["blocks of a failed write"] = sorted(worker.get_finished({"g"})[0])
found["what it says"] = {path.name == f"{facts['file']}.failed": path.read_text()
                         for path in folder.glob("*.failed")}
scheduler.shutdown()
found["kept at the end"] = sorted(path.name for path in folder.iterdir())
found["refused"] = {"other layers": refused(captured=[2, 3]), "a path more": refused(path="/etc"),
                    "no last layer": refused(captured=[1, 2], layers=[1, 2]),
                    "no order": refused(captured=[3, 1], layers=[3, 1])}
(output / "found.json").write_text(json.dumps(found))

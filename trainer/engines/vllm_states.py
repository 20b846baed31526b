"""Hidden states from a vLLM server that runs our connector: one request, one file, every fact checked.

The connector writes the file as `.partial` and renames it, so that a file with its final name is complete.
The answer may come first, so the reader looks for the name until a deadline, with growing pauses. A lock on
the file would spare the pauses, but network folders do not carry locks reliably, and there one would be
granted before the file is written. What has been read is removed, and in the end all that bears this
reader's name; what comes even later is left to the servers, see the connector.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shlex
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import httpx
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.engines.vllm_client import ServerLost
from trainer.engines.vllm_server import RunningServer, VllmServer
from trainer.errors import UserError
from trainer.records import HiddenStates

CONNECTOR = Path(__file__).resolve().parents[1] / "hidden_states/vllm_connector.py"
MODULE = "speculator_trainer_states"  # the connector's name in a server, where no `trainer` can be imported
FORMAT = 2  # of the connector's files
PROBE = (0, 1, 2)  # token ids that every vocabulary has
MATCHED = ("model_layers", "hidden_size", "vocabulary", "dtype")
FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05


@dataclass(frozen=True)
class Shape:
    """What the target's states look like, by its config.json: `model_layers` is the id of the last state,
    `limit` the model's longest sequence, where it says."""

    model_layers: int
    hidden_size: int
    vocabulary: int
    dtype: str
    limit: int | None = None

    @classmethod
    def read(cls, folder: Path, dtype: str) -> Self:
        config = json.loads((folder / "config.json").read_text())
        config = config.get("text_config", config)
        return cls(config["num_hidden_layers"], config["hidden_size"], config["vocab_size"], dtype,
                   config.get("max_position_embeddings"))

    def with_room(self, length: int) -> int:
        """The longest sequence of a server for rows of `length` tokens: one more, since vLLM lets drafters
        rest near the end without a word, and to it the capture is a drafter; no more than the model has."""
        return length + (self.limit != length)

    def bytes_per_token(self, layers: int) -> int:
        return layers * self.hidden_size * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class Facts:
    """What an answer says about its file."""

    file: str
    rows: int
    layers: list[int]
    hidden_size: int
    dtype: str
    model_layers: int
    vocabulary: int
    max_num_seqs: int
    prefix_caching: bool
    format: int


def with_connector(settings: VllmServer, folder: Path, module_folder: Path, layers: Sequence[int],
                   batch: int) -> VllmServer:
    """The settings of a server that writes the states after `layers` (ascending, the last one included) of up
    to `batch` rows at a time to `folder`; `module_folder` holds the connector, see `place_connector`."""
    speculation = {"method": "extract_hidden_states", "num_speculative_tokens": 1,
                   "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}}
    transfer = {"kv_connector": "HiddenStatesConnector", "kv_connector_module_path": MODULE,
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"folder": str(folder), "layers": list(layers)}}
    search = filter(None, [str(module_folder), settings.environment.get("PYTHONPATH")])
    return replace(settings, max_num_seqs=batch,
                   environment={**settings.environment, "PYTHONPATH": os.pathsep.join(search)},
                   arguments=[*settings.arguments, "--no-enable-prefix-caching",
                              "--speculative-config", json.dumps(speculation),
                              "--kv-transfer-config", json.dumps(transfer)])


def place_connector(folder: Path) -> Path:
    """Puts the connector, alone and under its own name, into `folder`, for a server's PYTHONPATH."""
    folder.mkdir(parents=True, exist_ok=True)
    path, source = folder / f"{MODULE}.py", CONNECTOR.read_bytes()
    if not path.is_file() or path.read_bytes() != source:
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_bytes(source)
        partial.rename(path)
    return folder


def start_command(settings: VllmServer, model: Path) -> str:
    """What to type to start such a server by hand."""
    words = settings.command("vllm", model, 8000)
    return (f"PYTHONPATH={shlex.quote(settings.environment['PYTHONPATH'])} vllm "
            f"{shlex.join(words[words.index('serve'):])}")


class StatesReader:
    """Asks for hidden states of tokens and takes over their files from `folder`. Servers compute `batch` rows
    at a time; `remedy` says how to start one that has what this one lacks; a file may come `wait_s` seconds
    after the answer."""

    def __init__(self, folder: Path, shape: Shape, layers: Sequence[int], batch: int, remedy: str,
                 wait_s: float) -> None:
        self.folder, self.shape, self.layers = folder, shape, sorted({*layers, shape.model_layers})
        self.expected = {name: getattr(shape, name) for name in MATCHED}
        self.expected |= {"max_num_seqs": batch, "prefix_caching": False}
        self.remedy, self.wait_s = remedy, wait_s
        self.name = secrets.token_hex(4)
        # a bare name that begins with ours: no server can make us read or remove others
        self.ours = re.compile(rf"{self.name}[0-9a-f]{{24}}\.safetensors")

    async def ask(self, server: RunningServer, http: httpx.AsyncClient, index: int, tokens: Sequence[int],
                  tap_layers: Sequence[int]) -> HiddenStates:
        """The states of one row; ServerLost when trying again may help, UserError when it cannot."""
        body = {"model": server.served_name, "prompt": list(tokens), "max_tokens": 1, "temperature": 0.0,
                "return_token_ids": True, "kv_transfer_params": {"hidden_states": True, "reader": self.name}}
        answer = await server.client.post(http, index, body)
        server.client.choice(answer, index, body)
        facts = self.facts(answer.get("kv_transfer_params"), len(tokens), server.url)
        path = self.folder / facts.file
        try:
            await self.wait(path, server)
            return await asyncio.to_thread(self.read, path, facts, tokens, tap_layers)
        finally:
            self._remove(path)

    async def probe(self, server: RunningServer) -> None:
        """One small request all the way, before anything heavy is asked."""
        async with httpx.AsyncClient(**server.client.options) as http:
            await self.ask(server, http, 0, PROBE, self.layers)

    def clear(self) -> None:
        """Removes what was written for this reader and not fetched, as when a request was given up."""
        with suppress(OSError):  # in the end: the folder may be gone
            for path in self.folder.glob(f"{self.name}*.safetensors*"):
                path.unlink(missing_ok=True)

    def facts(self, given: Any, rows: int, url: str) -> Facts:
        """The facts of an answer. Raises UserError unless they are those of the target and of all rows."""
        where = f"the server at {url}"
        if not isinstance(given, dict) or "file" not in given and "error" not in given:
            raise UserError(f"{where} gave no hidden states with its answer, so it does not run the "
                            f"connector of this project: {self.remedy}")
        if "error" in given:
            raise UserError(f"{where} cannot hand out hidden states: {given['error']}; {self.remedy}")
        try:
            facts = Facts(**given)
        except TypeError as error:
            raise UserError(f"{where} runs another version of the connector ({error}): "
                            f"{self.remedy}") from error
        if facts.format != FORMAT or not self.ours.fullmatch(str(facts.file)):
            raise UserError(f"{where} runs another version of the connector (format {facts.format}, file "
                            f"{facts.file!r}) where format {FORMAT} was expected: {self.remedy}")
        differing = [f"{name} {getattr(facts, name)} where {value} was expected"
                     for name, value in self.expected.items() if getattr(facts, name) != value]
        if differing:
            raise UserError(f"{where} does not serve the target as target_engine has it "
                            f"({'; '.join(differing)}): "
                            f"{self.remedy}")
        if not isinstance(facts.layers, list) or any(layer not in facts.layers for layer in self.layers):
            raise UserError(f"{where} captures the states after layers {facts.layers} where {self.layers} "
                            f"are needed: {self.remedy}")
        if facts.rows != rows:
            raise UserError(f"{where} has {facts.rows} rows of hidden states for {rows} tokens, as happens "
                            f"when a prefix comes from a cache: {self.remedy}")
        return facts

    async def wait(self, path: Path, server: RunningServer) -> None:
        """Returns when the file is there. The folder is listed rather than the name looked up: a network
        folder remembers for a while that a name was missing."""
        pause, deadline = FIRST_PAUSE, time.monotonic() + self.wait_s
        while True:
            names = self._listed()
            if path.name in names:
                return
            failed = path.with_name(f"{path.name}.failed")
            if failed.name in names:
                reason = failed.read_text(errors="replace").strip() or "it does not say why"
                failed.unlink(missing_ok=True)
                raise UserError(f"the server at {server.url} could not write hidden states to {path.parent}: "
                                f"{reason}; free space there, or lower target_engine.runtime.in_flight.")
            if (death := server.death()) is not None:
                raise death
            if time.monotonic() > deadline:
                if not await asyncio.to_thread(server.client.healthy):
                    raise ServerLost(f"the server at {server.url} was lost before it wrote {path}: see its "
                                     "log, start it and run the same command again.")
                raise UserError(f"{path} did not appear within target_engine.runtime.file_wait_s="
                                f"{self.wait_s:g} s after the answer of {server.url}: see that the server "
                                "writes, and may write, to this very folder (target_engine.runtime."
                                "shared_folder), or raise the time if the folder is slow.")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _listed(self) -> set[str]:
        try:
            return set(os.listdir(self.folder))
        except OSError as error:
            raise UserError(f"{self.folder} cannot be read ({error.strerror}): see that it is mounted here "
                            "(target_engine.runtime.shared_folder).") from error

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{path} cannot be removed ({error.strerror}), so hidden states would fill "
                            f"{self.folder}: give this user the right to write there.") from error

    def read(self, path: Path, facts: Facts, tokens: Sequence[int],
             tap_layers: Sequence[int]) -> HiddenStates:
        """The states in the file, compared with what it says about itself and with what was asked."""
        try:
            with safe_open(path, "pt") as file:
                described = {name: json.loads(text) for name, text in (file.metadata() or {}).items()}
                states, ids = file.get_tensor("states"), file.get_tensor("tokens")
        except FileNotFoundError as error:
            raise ServerLost(f"{path} was removed before it was read, as by a server that stops: see that it "
                             "runs, and run the same command again.") from error
        except (OSError, SafetensorError, ValueError) as error:
            raise _bad(path, f"is torn or no file of the connector ({error})") from error
        expected = (facts.rows, len(facts.layers), facts.hidden_size)
        if tuple(states.shape) != expected or states.dtype != getattr(torch, facts.dtype):
            raise _bad(path, f"holds states {tuple(states.shape)} in {states.dtype} where {expected} in "
                             f"{facts.dtype} was expected")
        sums = {"states": _checksum(states), "tokens": _checksum(ids)}
        if described.get("crc32") != sums or described.get("layers") != facts.layers:
            raise _bad(path, f"is damaged: checksums {sums} and layers {facts.layers} were expected, and it "
                             f"says {described.get('crc32')} and {described.get('layers')}")
        if ids.tolist() != list(tokens):
            raise _bad(path, "holds the states of other tokens than were sent")
        places = [facts.layers.index(layer) for layer in tap_layers]
        last = states[:, facts.layers.index(facts.model_layers)].clone()
        return HiddenStates(states.index_select(1, torch.tensor(places)).flatten(1), last)


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy())


def _bad(path: Path, what: str) -> UserError:
    return UserError(f"{path} {what}: see that the folder and the server are sound, then run the same "
                     "command again.")

"""The engine over vLLM servers, against servers that misbehave: order, bounds, checks, patience."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from peer import CONFIG, DEADLY, VOCABULARY, Peer, states_of, until
from vllm_support import kill_worker, small_server

from trainer._paths import find
from trainer.compose import compose_configuration
from trainer.engines import vllm_client, vllm_pool, vllm_process
from trainer.engines.vllm_engine import VllmEngine, VllmEngineRuntime
from trainer.errors import UserError
from trainer.hidden_states.base import Manifest
from trainer.hidden_states.online import Online
from trainer.hidden_states.prefetch import Prefetch
from trainer.pipeline import build
from trainer.records import HiddenStates, Sample, Sampling

ROWS = [[number, number + 1, number + 2] for number in range(12)]
TAPS = [1, 2]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_client, "RETRY_SECONDS", (0.01,))
    monkeypatch.setattr(vllm_pool, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(vllm_pool, "LONGEST_PAUSE", 0.1)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


@pytest.fixture
def peer(shared: Path) -> Iterator[Peer]:
    with Peer(shared) as running:
        yield running


def engine(target: Path, *peers: Peer, answers: bool = False, **changes: Any) -> VllmEngine:
    urls = [each.url for each in peers]
    runtime = {"answer_urls": urls if answers else [], "state_urls": [] if answers else urls,
               "shared_folder": str(peers[0].folder) if peers else None, "in_flight": 2, "patience_s": 0.6,
               "file_wait_s": 0.4, "logs": str(target / "logs"), **changes}
    made = VllmEngine(small_server(), "float32", 8, 1, 64, False, VllmEngineRuntime(**runtime))
    return made.load(target, [9])


def ask(given: VllmEngine, rows: list[list[int]] = ROWS, taps: list[int] = TAPS) -> list[HiddenStates]:
    with given:
        return list(given.hidden_states(rows, taps))


def same(found: list[HiddenStates], rows: list[list[int]], taps: list[int]) -> bool:
    return len(found) == len(rows) and all(
        torch.equal(each.taps, states_of(row, taps).flatten(1))
        and torch.equal(each.last, states_of(row, [3])[:, 0]) for each, row in zip(found, rows, strict=True))


class TestInOrder:
    def test_taps_and_last(self, target: Path, peer: Peer) -> None:
        for taps in ([1, 2], [2], [1, 3], [3], [1, 2, 3]):
            assert same(ask(engine(target, peer), ROWS, taps), ROWS, taps)
        found = ask(engine(target, peer))[0]
        assert found.taps.dtype == torch.float32 and found.taps.is_contiguous() and found.last.is_contiguous()

    @settings(max_examples=12)
    @given(some.integers(0, 2**32), some.integers(1, 3), some.integers(1, 4), some.integers(0, 20))
    def test_whatever_arrives_first(self, tmp_path_factory: pytest.TempPathFactory, seed: int, servers: int,
                                    in_flight: int, count: int) -> None:
        home, drawn = tmp_path_factory.mktemp("order"), random.Random(seed)
        (home / "config.json").write_text(json.dumps(CONFIG))
        rows = [[drawn.randrange(VOCABULARY) for _ in range(drawn.randint(1, 9))] for _ in range(count)]
        with ExitStack() as stack:
            peers = [stack.enter_context(Peer(home)) for _ in range(servers)]
            for each in peers:
                each.act = lambda number, body: time.sleep(drawn.choice([0, 0, 0.02]))
                each.late = drawn.choice([0, 0.01])
            assert same(ask(engine(home, *peers, in_flight=in_flight), rows), rows, TAPS)
            assert all(each.peak <= in_flight for each in peers)
            assert sum(len(each.seen) for each in peers) == count + servers, "a probe for each"
        assert not list(home.glob("*.safetensors*")), "what was read is removed"

    def test_rows_are_asked_for_as_they_are_fetched(self, target: Path, peer: Peer) -> None:
        rows = [[number] for number in range(40)]
        with engine(target, peer) as asked:
            found = asked.hidden_states(rows, TAPS)
            next(found)
            time.sleep(0.3)
            assert len(peer.seen) <= 1 + 2 * 2 + 1, "the probe, the room, and the one that was fetched"
            assert same(list(found), rows[1:], TAPS)

    def test_all_slots_are_used(self, target: Path, peer: Peer) -> None:
        meeting = threading.Barrier(3, timeout=5)
        peer.act = lambda number, body: (number and meeting.wait(), None)[1]  # 0 is the probe
        rows = [[number] for number in range(9)]
        assert same(ask(engine(target, peer, in_flight=3), rows), rows, TAPS)

    def test_from_several_threads(self, target: Path, peer: Peer) -> None:
        with engine(target, peer) as asked, ThreadPoolExecutor(6) as threads:
            found = list(threads.map(lambda row: next(asked.hidden_states([row], TAPS)), ROWS))
        assert same(found, ROWS, TAPS) and peer.peak <= 2

    def test_an_abandoned_iterator_cancels(self, target: Path, peer: Peer) -> None:
        with engine(target, peer) as asked:
            found = asked.hidden_states([[1]] * 50, TAPS)
            next(found)
            found.close()
            until(lambda: peer.now == 0)
            seen = len(peer.seen)
            assert same(list(asked.hidden_states(ROWS, TAPS)), ROWS, TAPS)
            assert seen <= 6 and len(peer.seen) <= seen + 2 + len(ROWS)

    def test_what_was_not_fetched_is_removed_in_the_end(self, target: Path, peer: Peer, shared: Path) -> None:
        """Of ours: neither what was given up, nor what a killed server left half-written."""
        (shared / f"{1:032x}.safetensors").write_text("of another reader")
        release = threading.Event()
        peer.act = lambda number, body: (number > 2 and release.wait(20), None)[1]
        with engine(target, peer) as asked:
            found = asked.hidden_states(ROWS, TAPS)
            next(found)
            until(lambda: peer.now == 2)
            found.close()
            release.set()  # the answers that nobody awaits any more
            until(lambda: len(list(shared.glob("*.safetensors"))) == 3)
            reader = peer.seen[0]["kv_transfer_params"]["reader"]
            (shared / f"{reader}{1:024x}.safetensors.partial").write_text("")
            (shared / f"{reader}{2:024x}.safetensors.failed").write_text("")
        assert [path.name for path in shared.glob("*safetensors*")] == [f"{1:032x}.safetensors"]

    def test_leaving_does_not_wait_for_a_server_that_hangs(self, target: Path, peer: Peer) -> None:
        release = threading.Event()
        peer.act = lambda number, body: (number and body["prompt"] != ROWS[0] and release.wait(20), None)[1]
        with engine(target, peer) as asked:
            found = asked.hidden_states(ROWS, TAPS)
            next(found)
            until(lambda: peer.now == 2)
            began = time.monotonic()
        assert time.monotonic() - began < 2
        release.set()


def put(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda answer: answer["kv_transfer_params"].update(changes)


def put_choice(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda answer: answer["choices"][0].update(changes)


BAD_ANSWERS = {
    "none": (lambda answer: answer.pop("kv_transfer_params"), r"gave no hidden states .*start it with "
             r"`PYTHONPATH=\S+/connector vllm serve .*--max-num-seqs 1 .*--no-enable-prefix-caching "
             r".*extract_hidden_states.*--kv-transfer-config .*"
             r"\"layers\": \[1, 2, 3\].*` .*run the same command again"),
    "not a dict": (lambda answer: answer.update(kv_transfer_params=[1]), "gave no hidden states"),
    "error": (put(error="only 2 states are kept"), "cannot hand out hidden states: only 2 states are kept"),
    "a fact more": (put(colour="red"), "another version of the connector .*colour"),
    "a fact less": (lambda answer: answer["kv_transfer_params"].pop("rows"), "another version .*rows"),
    "format": (put(format=1), "another version of the connector .format 1"),
    "a path": (put(file="../target/config.json"), r"another version .*\.\./target/config\.json"),
    "another's file": (put(file=f"{1:032x}.safetensors"), "another version .*00001.safetensors"),
    "an absolute path": (put(file="/etc/passwd"), "another version .*'/etc/passwd'"),
    "no name": (put(file=7), "another version"),
    "rows": (put(rows=2), "has 2 rows of hidden states for 3 tokens"),
    "layers": (put(layers=[2, 3]), r"captures the states after layers \[2, 3\] where \[1, 2, 3\] are needed"),
    "no last layer": (put(layers=[1, 2]), r"captures the states after layers \[1, 2\] where"),
    "no layers": (put(layers=None), "captures the states after layers None"),
    "hidden size": (put(hidden_size=8), "hidden_size 8 where 4 was expected"),
    "depth": (put(model_layers=2), "model_layers 2 where 3 was expected"),
    "vocabulary": (put(vocabulary=51), "vocabulary 51 where 50 was expected"),
    "dtype": (put(dtype="bfloat16"), "dtype bfloat16 where float32 was expected"),
    "rows together": (put(max_num_seqs=32), "as target_engine has it .max_num_seqs 32 where 1 was expected.*"
                      ": start it with"),
    "prefix caching": (put(prefix_caching=True), "prefix_caching True where False was expected.: start it"),
    "other ids": (put_choice(prompt_token_ids=[5, 5, 5]), "did not give back the token ids of request"),
    "no ids": (put_choice(token_ids=None), "did not give back the token ids"),
    "other model": (lambda answer: answer.update(model="another"), "choices of model another where one"),
    "no choices": (lambda answer: answer.update(choices=[]), "with 0 choices"),
    "odd choices": (lambda answer: answer.update(choices="x"), "with no choices"),
}


class TestBadAnswers:
    @pytest.mark.parametrize("case", BAD_ANSWERS)
    def test_each_is_told(self, target: Path, peer: Peer, case: str) -> None:
        peer.change, expected = BAD_ANSWERS[case]
        with pytest.raises(UserError, match=expected):
            ask(engine(target, peer))
        assert len(peer.seen) == 1, "nothing heavy was asked after the first answer"
        assert (target / "config.json").exists()

    @pytest.mark.parametrize("case", ["none", "rows", "hidden size", "other ids"])
    def test_each_is_told_later_too(self, target: Path, peer: Peer, case: str) -> None:
        change, expected = BAD_ANSWERS[case]
        peer.change = lambda answer: change(answer) if len(peer.seen) > 5 else None
        with engine(target, peer) as asked:
            found = asked.hidden_states(ROWS, TAPS)
            next(found)
            with pytest.raises(UserError, match=expected):
                list(found)

    @pytest.mark.parametrize("said", ["<html>", "[1, 2]", "\xff"])
    def test_no_json(self, target: Path, peer: Peer, said: str) -> None:
        peer.act = lambda number, body: said
        with pytest.raises(UserError, match="does not answer /v1/completions as vLLM does"):
            ask(engine(target, peer))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


def fail(path: Path) -> None:
    path.unlink()
    path.with_suffix(".safetensors.failed").write_text("No space left on device")


class Other(Peer):
    """Writes what another request would get."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.layers, self.spoil = folder, [1, 2, 3], lambda path: None


class OtherLayers(Other):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.layers = [0, 1, 3]


def rewritten(kind: type[Other], tokens: list[int]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        final = path.with_name("rewritten")
        kind(path.parent).write(final, tokens)
        final.rename(path)

    return spoil


BAD_FILES = {
    "torn": (lambda path: path.write_bytes(path.read_bytes()[:-20]), "is torn or no file of the connector"),
    "empty": (lambda path: path.write_bytes(b""), "is torn or no file"),
    "no tensors": (lambda path: path.write_bytes(b"\2\0\0\0\0\0\0\0{}"), "is torn or no file"),
    "one bit": (flip, r"is damaged: checksums \{'states': \d+, 'tokens': \d+\} and layers"),
    "other tokens": (rewritten(Other, [7, 8, 9]), "holds the states of other tokens than were sent"),
    "more rows": (rewritten(Other, [0, 1, 2, 3]), r"holds states \(4, 3, 4\) .*where \(3, 3, 4\)"),
    "other layers": (rewritten(OtherLayers, [0, 1, 2]), r"is damaged: .*\[0, 1, 3\]"),
    "could not write": (fail, "could not write hidden states to .*: No space left on device; free space"),
    "never": (Path.unlink, r"did not appear within target_engine.runtime.file_wait_s=0.4 s after the answer"),
}


class TestBadFiles:
    @pytest.mark.parametrize("case", BAD_FILES)
    def test_each_is_told(self, target: Path, peer: Peer, shared: Path, case: str) -> None:
        peer.spoil, expected = BAD_FILES[case]
        with pytest.raises(UserError, match=expected):
            ask(engine(target, peer))
        assert not [path for path in shared.iterdir() if path.is_file()], "nothing is left behind"

    def test_a_slow_writer_is_waited_for(self, target: Path, peer: Peer) -> None:
        peer.late = 0.25
        assert same(ask(engine(target, peer), ROWS[:4]), ROWS[:4], TAPS)

    def test_a_partial_file_is_never_read(self, target: Path, peer: Peer, shared: Path) -> None:
        peer.spoil = lambda path: path.rename(path.with_name(path.stem + ".safetensors.partial"))
        with pytest.raises(UserError, match="did not appear"):
            ask(engine(target, peer))

    def test_a_folder_that_went_away(self, target: Path, peer: Peer, shared: Path) -> None:
        with engine(target, peer) as asked:
            found = asked.hidden_states(ROWS, TAPS)
            next(found)
            peer.act = lambda number, body: shutil.rmtree(shared, ignore_errors=True)
            with pytest.raises(UserError, match="cannot be read|did not appear|was removed|does not answer"):
                list(found)


class TestPatience:
    @pytest.mark.parametrize("trouble", ["drop", 500, 503])
    def test_trouble_that_passes(self, target: Path, peer: Peer, trouble: Any,
                                 capsys: pytest.CaptureFixture[str]) -> None:
        peer.act = lambda number, body: trouble if 2 <= number < 8 else None
        assert same(ask(engine(target, peer, patience_s=30)), ROWS, TAPS)
        said = capsys.readouterr().err
        assert "Trying again for up to 30 s (target_engine.runtime.patience_s)" in said and peer.url in said
        assert said.count("Trying again") <= 3, "once for an outage, not once for a request"

    @pytest.mark.parametrize("trouble", ["drop", 500])
    def test_trouble_that_stays(self, target: Path, peer: Peer, trouble: Any) -> None:
        peer.act = lambda number, body: trouble if number > 3 else None
        with engine(target, peer) as asked:
            found = asked.hidden_states(ROWS, TAPS)
            next(found)
            began = time.monotonic()
            with pytest.raises(UserError, match="not come back within target_engine.runtime.patience_s=0.6 s:"
                               " the server at http"):
                list(found)
            assert 0.4 < time.monotonic() - began < 10

    def test_a_refusal_is_not_repeated(self, target: Path, peer: Peer) -> None:
        peer.act = lambda number, body: 400 if number == 1 else None
        with pytest.raises(UserError, match=r"refused request 0 \(3 prompt tokens, .* with 400: as told"):
            ask(engine(target, peer, in_flight=1))
        assert len(peer.seen) <= 3

    def test_a_server_that_is_gone(self, target: Path, peer: Peer) -> None:
        with engine(target, peer) as asked:
            found = asked.hidden_states(ROWS * 5, TAPS)
            next(found)
            peer.act = lambda number, body: "drop"
            peer.http.shutdown()
            peer.http.server_close()
            with pytest.raises(UserError, match="patience_s=0.6 s: .*does not answer .*run the same command"):
                list(found)

    def test_a_server_that_is_gone_before_it_wrote(self, target: Path, peer: Peer) -> None:
        """It answered, then neither file nor health; when it is back, the row is asked for again."""
        turns = iter([False] * 4 + [True])

        def lose_one(path: Path) -> None:
            if next(turns, False):
                path.unlink()
                peer.health = 503
                threading.Timer(0.5, setattr, (peer, "health", 200)).start()

        peer.spoil = lose_one
        assert same(ask(engine(target, peer, patience_s=30, file_wait_s=0.2)), ROWS, TAPS)
        assert len(peer.seen) == 1 + len(ROWS) + 1

    def test_an_interrupt_does_not_wait_for_a_lost_server(self, target: Path, peer: Peer) -> None:
        """As when training is stopped while all rows ahead are waiting for a server to come back."""
        peer.act = lambda number, body: "drop" if number > 3 else None
        samples = [Sample(str(number), (number,), (True,)) for number in range(9)]
        facts = SimpleNamespace(identity="t", template_hash="h", folder=target, end_ids=[9])
        Manifest("t", "h", TAPS, 4, "float32", "native", "all", "vllm").write(target)
        source = Online(target, TAPS, facts, engine(target, peer, patience_s=600, in_flight=3))
        with pytest.raises(KeyboardInterrupt), closing(source), \
                closing(Prefetch(lambda number: source.get(samples[number]), source.ahead, 9)) as ready, \
                source.in_use():
            ready.get(0)
            until(lambda: len(peer.seen) > 5)
            began = time.monotonic()
            raise KeyboardInterrupt
        assert time.monotonic() - began < 5
        seen = len(peer.seen)
        with pytest.raises(CancelledError):
            source.get(samples[8])
        assert len(peer.seen) == seen, "nothing is started or asked afterwards"

    def test_its_return_is_told(self, target: Path, peer: Peer, capsys: pytest.CaptureFixture[str]) -> None:
        peer.act = lambda number, body: 500 if number == 2 else None
        assert same(ask(engine(target, peer, in_flight=1)), ROWS, TAPS)
        assert f"the server at {peer.url} answers again" in capsys.readouterr().err

    def test_a_machine_that_is_gone(self, target: Path, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nobody refuses the connection: it is not made. That is a loss, not a request that takes long."""
        monkeypatch.setattr(vllm_client, "CONNECT_SECONDS", 0.2)
        with engine(target, peer, in_flight=1) as asked, ExitStack() as stack:
            found = asked.hidden_states(ROWS * 5, TAPS)
            next(found)
            peer.act = lambda number, body: "drop"
            until(lambda: peer.now == 0)
            port = peer.http.server_port
            peer.http.shutdown()
            peer.http.server_close()
            deaf = stack.enter_context(socket.socket())
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            deaf.bind(("127.0.0.1", port))
            deaf.listen(0)
            for _ in range(4):  # what it would take at all is used up
                caller = stack.enter_context(socket.socket())
                caller.setblocking(False)
                caller.connect_ex(("127.0.0.1", port))
            with pytest.raises(UserError, match="patience_s=0.6 s: .*does not answer"):
                list(found)

    def test_another_server_takes_over(self, target: Path, peer: Peer, shared: Path) -> None:
        with Peer(shared) as second:
            second.act = lambda number, body: "drop" if number > 1 else None
            assert same(ask(engine(target, peer, second, patience_s=30)), ROWS, TAPS)
            assert len(second.seen) > 2

    def test_a_request_that_takes_too_long(self, target: Path, peer: Peer) -> None:
        peer.act = lambda number, body: time.sleep(3) if number else None
        slow = engine(target, peer)
        slow.settings = small_server(dtype="float32", runtime__request_timeout_s=0.3)
        with pytest.raises(UserError, match="no answer from .* engine.runtime.request_timeout_s"):
            ask(slow)


class TestJoining:
    def test_too_short(self, target: Path, shared: Path) -> None:
        with Peer(shared, max_model_len=64) as short, \
                pytest.raises(UserError, match="takes sequences of 64 tokens, and 65 are needed: "):
            ask(engine(target, short))

    def test_another_model(self, target: Path, shared: Path, tmp_path: Path) -> None:
        other = tmp_path / "other"
        other.mkdir()
        (other / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 5, "torch_dtype": "x"}))
        for answers in (True, False):
            with Peer(shared, root=str(other)) as strange, \
                    engine(target, strange, answers=answers) as given, \
                    pytest.raises(UserError, match="config.json differs .* in rope_theta: serve the target"):
                given.generate([[1]], ["a"], Sampling(1, 0.0, 1.0, 0)) if answers else \
                    next(given.hidden_states(ROWS, TAPS))

    def test_the_same_model(self, target: Path, shared: Path) -> None:
        with Peer(shared, root=str(target)) as fine:
            assert same(ask(engine(target, fine)), ROWS, TAPS)

    @pytest.mark.parametrize("root", ["owner/model", "x" * 5000, "/root/\0"])
    def test_a_model_that_is_not_to_be_seen_from_here(self, target: Path, shared: Path, root: str) -> None:
        with Peer(shared, root=root) as fine:
            assert same(ask(engine(target, fine)), ROWS, TAPS)

    def test_it_accepts_and_says_nothing(self, target: Path, peer: Peer,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
        """As at the end of a tunnel to nowhere; the hour that an answer may take is not waited for."""
        monkeypatch.setattr(vllm_client, "FACT_SECONDS", 0.2)
        monkeypatch.setattr(vllm_client, "HEALTH_SECONDS", 0.2)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            with pytest.raises(UserError, match=f"{url} does not answer .timed out.: check that it runs"):
                ask(engine(target, peer, state_urls=[url]))

    def test_not_healthy(self, target: Path, peer: Peer) -> None:
        peer.health = 503
        with pytest.raises(UserError, match=r"the server to join at http\S+ is not healthy"):
            ask(engine(target, peer))

    @pytest.mark.parametrize("models", [[1], {"data": [{"id": "x"}]}, {"data": [[]]}, {}])
    def test_not_vllm(self, target: Path, peer: Peer, models: Any) -> None:
        peer.models = models
        with pytest.raises(UserError, match="does not answer /v1/models as vLLM does"):
            ask(engine(target, peer))

    def test_no_folder(self, target: Path, peer: Peer, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="nothing says where their files appear: set .*shared_folder"):
            ask(engine(target, peer, shared_folder=None))
        with pytest.raises(UserError, match="shared_folder=.*nowhere is no folder that can be read and"):
            ask(engine(target, peer, shared_folder=str(tmp_path / "nowhere")))
        assert peer.seen == []

    def test_another_folder_than_the_server_writes_to(self, target: Path, peer: Peer, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        with pytest.raises(UserError, match="did not appear within .* writes, and may write, to this very "
                           "folder .target_engine.runtime.shared_folder"):
            ask(engine(target, peer, shared_folder=str(tmp_path / "other")))
        assert len(peer.seen) == 1, "nothing heavy was asked"

    def test_more_layers_than_before(self, target: Path, shared: Path) -> None:
        with Peer(shared, layers=[0, 1, 2, 3]) as able, engine(target, able) as asked:
            assert same(list(asked.hidden_states(ROWS, [1])), ROWS, [1])
            assert same(list(asked.hidden_states(ROWS, [0, 2])), ROWS, [0, 2])
            assert same(list(asked.hidden_states(ROWS, [1])), ROWS, [1])
            assert len(able.seen) == 3 * len(ROWS) + 2, "joined twice: the second time for all the layers"


class TestAnswers:
    SAMPLING = Sampling(max_new_tokens=5, temperature=0.0, top_p=1.0, seed=3)

    def test_in_order_and_within_the_longest_sequence(self, target: Path, peer: Peer) -> None:
        peer.act = lambda number, body: time.sleep(0.03 * (number % 3))
        prompts = [[number] * (1 + number % 4) for number in range(10)] + [[7] * 61]
        keys = [f"k{number}" for number in range(len(prompts))]
        with engine(target, peer, answers=True) as asked:
            found = asked.generate(prompts, keys, self.SAMPLING)
        assert [each.tokens for each in found] == [
            tuple(token + 1 for token in prompt)[:3 if len(prompt) == 61 else 5] for prompt in prompts]
        by_length = {len(body["prompt"]): body for body in peer.seen}
        assert by_length[61]["max_tokens"] == 3 and by_length[1]["max_tokens"] == 5
        assert by_length[1]["stop_token_ids"] == [9] and len({body["seed"] for body in peer.seen}) == 11
        assert all("kv_transfer_params" not in body for body in peer.seen) and peer.peak <= 2

    def test_the_next_group_begins_while_the_last_one_drains(self, target: Path, peer: Peer) -> None:
        slow, behind = [5], [[20], [21], [22]]
        peer.act = lambda number, body: until(lambda: len(peer.seen) > 5) if body["prompt"] == slow else None
        groups = [{"a": [1], "b": slow, "c": [2]}, {str(prompt): prompt for prompt in behind}]
        with engine(target, peer, answers=True) as asked:
            found = [*asked.completions(groups, self.SAMPLING)]
        names = [name for name, _ in found]
        assert sorted(names) == sorted(["a", "b", "c", *map(str, behind)])
        assert names.index("b") > names.index(str(behind[0])), "handed over as they come"
        assert peer.peak == 2

    def test_groups_are_fetched_as_their_answers_are(self, target: Path, peer: Peer) -> None:
        fetched = itertools.count()
        groups = ({f"{next(fetched)}": [1 + number % 9]} for number in itertools.count())
        with engine(target, peer, answers=True) as asked:
            answers = asked.completions(groups, self.SAMPLING)
            for number in range(1, 11):
                next(answers)
                until(lambda: peer.now == 0)
                assert len(peer.seen) <= number + 2 * 2, "twice as many as are in flight, at most"
            answers.close()
        assert next(fetched) <= 10 + 2 * 2

    def test_what_came_before_a_refusal_is_handed_over(self, target: Path, peer: Peer) -> None:
        peer.act = lambda number, body: 400 if number == 3 else None
        found = []
        with engine(target, peer, answers=True, in_flight=1) as asked, \
                pytest.raises(UserError, match="refused request 3"):
            for name, _ in asked.completions([{str(token): [token] for token in range(8)}], self.SAMPLING):
                found.append(name)
        assert found == ["0", "1", "2"]

    def test_no_room(self, target: Path, peer: Peer) -> None:
        with engine(target, peer, answers=True) as asked, \
                pytest.raises(UserError, match="a prompt has 64 tokens but target_engine.max_length is 64"):
            asked.generate([[1] * 64], ["a"], self.SAMPLING)
        assert peer.seen == []

    def test_trouble_that_passes(self, target: Path, peer: Peer) -> None:
        peer.act = lambda number, body: "drop" if number in (1, 2, 3, 4, 5, 6) else None
        with engine(target, peer, answers=True, patience_s=30) as asked:
            assert len(asked.generate(ROWS, [str(row) for row in ROWS], self.SAMPLING)) == len(ROWS)

    def test_likelihoods_in_order(self, target: Path, peer: Peer) -> None:
        peer.act = lambda number, body: time.sleep(0.03 * (number % 3))
        with engine(target, peer, answers=True) as asked:
            found = [*asked.likelihoods(iter(ROWS))]
        assert found == [[-float(token) for token in row[1:]] for row in ROWS]
        assert all(body["max_tokens"] == 1 and body["prompt_logprobs"] == 0 for body in peer.seen)

    @pytest.mark.parametrize("given", [None, [None], [None, {"1": {}}, {"2": {}}], [None, None, None],
                                       [None, {"7": {"logprob": 0.0}}, {"8": {"logprob": 0.0}}]])
    def test_likelihoods_that_are_none(self, target: Path, peer: Peer, given: Any) -> None:
        peer.change = put_choice(prompt_logprobs=given)
        with engine(target, peer, answers=True) as asked, \
                pytest.raises(UserError, match="did not tell how likely the tokens of request 0 are"):
            [*asked.likelihoods(ROWS[:1])]

    def test_all_of_the_sampling_is_said(self, target: Path, peer: Peer) -> None:
        """What is not, a server takes from the model's own file."""
        how = Sampling(5, 0.7, 0.9, 3, top_k=20, min_p=0.1, repetition_penalty=1.2)
        with engine(target, peer, answers=True) as asked:
            for sampling in (self.SAMPLING, how):
                asked.generate(ROWS[:1], ["a"], sampling)
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        assert [[body[name] for name in names] for body in peer.seen] == [
            [0.0, 1.0, 0, 0.0, 1.0], [0.7, 0.9, 20, 0.1, 1.2]]

    def test_an_end_that_is_none(self, target: Path, peer: Peer) -> None:
        peer.change = put_choice(finish_reason="abort")
        with engine(target, peer, answers=True) as asked, \
                pytest.raises(UserError, match="ended request 0 with 'abort'"):
            asked.generate(ROWS[:1], ["a"], self.SAMPLING)


def test_leaving_ends_a_start_in_another_thread(target: Path, tmp_path: Path) -> None:
    """A large target takes minutes to load; an interrupt must not wait for it."""
    asked = starting(target, "exec sleep 600")

    def process() -> Any:
        return asked._starting and asked._starting.members[0].server.process

    with ThreadPoolExecutor(1) as thread:
        with asked:
            found = thread.submit(lambda: next(asked.hidden_states(ROWS, TAPS)))
            until(process)
            group, began = process().pid, time.monotonic()
        assert time.monotonic() - began < 5
        with pytest.raises(UserError, match="the start of the vLLM server was given up"):
            found.result()
    assert vllm_process.members(group) == []
    assert not list((target / "logs").glob("*.metadata"))


class TestStarted:
    """With a peer in place of vLLM: it is there in a second, and dies as vLLM does."""

    def test_killed_and_started_again(self, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with starting(target, PEER) as asked:
            found = asked.hidden_states(ROWS, TAPS)
            first = next(found)
            kill(asked)
            assert same([first, *found], ROWS, TAPS)
        assert logs(target) == ["states-1.log", "states-2.log"]
        said = capsys.readouterr().err
        assert "the vLLM server ended with signal SIGKILL" in said and "answers again" in said

    def test_what_cannot_start_again_is_tried_once(self, target: Path) -> None:
        """Not once for every request that waits for it: each start of a large target takes minutes."""
        with starting(target, f"[ -e broken ] && sleep 1 && exit 1; {PEER}", patience_s=0.5) as asked:
            found = asked.hidden_states(ROWS, TAPS)
            next(found)
            (target / "logs/broken").touch()
            kill(asked)
            with pytest.raises(UserError, match="patience_s=0.5 s: the vLLM server ended with exit code 1"):
                list(found)
        assert logs(target)[:2] == ["states-1.log", "states-2.log"]
        assert len(logs(target)) <= 3, "a late request may begin a start, which is broken off"

    def test_what_a_server_dies_of_is_not_asked_for_ever(self, target: Path) -> None:
        with starting(target, PEER) as asked, \
                pytest.raises(UserError, match="3 servers, one after the other, ended before they answered: "
                                               "the vLLM server ended with exit code 1"):
            list(asked.hidden_states([*ROWS[:2], [DEADLY]], TAPS))
        assert logs(target) == [f"states-{number}.log" for number in (1, 2, 3)]


PEER = f'exec {sys.executable} {Path(__file__).with_name("peer.py")} "$@"'


def starting(target: Path, script: str, **changes: Any) -> VllmEngine:
    """An engine whose interpreter of vLLM has what it needs, and runs `script` in the folder of the logs."""
    (target / "model.safetensors").touch()
    (target / "tokenizer.json").touch()
    says = json.dumps({"found": True, "versions": {"vllm": "0.32"}, "prefix": "/nowhere"})
    python = target / "python"
    python.write_text(f"#!/bin/sh\n[ $1 = -c ] && echo '{says}' && exit\n{script}\n")
    python.chmod(0o755)
    made = engine(target, in_flight=4, **{"patience_s": 60.0, "file_wait_s": 5.0, **changes})
    made.settings = replace(made.settings, python=str(python))
    return made


def kill(asked: VllmEngine) -> None:
    pool, _ = asked._states
    kill_worker(pool.members[0].server.process.pid)


def logs(target: Path) -> list[str]:
    return sorted(path.name for path in (target / "logs").glob("*.log"))


@pytest.mark.parametrize("row", [[], [1] * 65])
def test_rows_that_do_not_fit(target: Path, peer: Peer, row: list[int]) -> None:
    with pytest.raises(UserError, match=rf"a row has {len(row)} tokens where 1 to 64 were expected"):
        ask(engine(target, peer), [[1], row])


def test_its_origin(target: Path, peer: Peer) -> None:
    assert engine(target, peer).origin == "vllm 0.32.0"
    peer.http.shutdown()
    peer.http.server_close()
    with pytest.raises(UserError, match="does not answer"):
        _ = engine(target, peer).origin


def test_what_it_cannot_do(target: Path, peer: Peer) -> None:
    with pytest.raises(UserError, match="cannot read a sequence step by step .*TransformersEngine"):
        engine(target, peer).session(TAPS)
    runtime = engine(target, peer).runtime
    with pytest.raises(UserError, match="target_engine.server.url=http://x is not used, .*state_urls"):
        VllmEngine(small_server(url="http://x"), "float32", 8, 1, 64, False, runtime)


def test_the_configuration_makes_it() -> None:
    configuration = compose_configuration(["recipe=smoke", "target_engine=vllm", "target.max_length=99",
                                           "target_engine.runtime.in_flight=3", "run_root=/r"], find())
    made = build(configuration.settings["target_engine"])
    assert isinstance(made, VllmEngine) and (made.group, made.max_length, made.dtype) == (256, 99, "bfloat16")
    assert made.states_batch == 1, "the same bits in every mode, unless told otherwise"
    assert (made.runtime.in_flight, made.runtime.logs) == (3, "/r/target_engine")
    assert made.settings.dtype == "bfloat16"
    stage = configuration.settings["hidden_states"]
    assert stage["engine"]["_target_"].endswith("VllmEngine") and stage["dtype"] == "bfloat16"

"""A model repository on the Hub: what is put there, through `huggingface_hub`, arrives whole or not at all.

Large files go first, each on its own; then one commit names all files, and gets a tag that depends on their
content alone. Whatever is interrupted is asked again, here or by the next run, and what the Hub has is not
sent again. The token is the one that `huggingface_hub` finds (HF_TOKEN, or `hf auth login`): no setting
holds it, and no message.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from trainer._weight_files import INDEX
from trainer.errors import UserError, first_line
from trainer.progress import Progress
from trainer.ranges import Count, Like, NotNegative, Text

REPOSITORY = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
PASSING = (408, 409, 412, 423, 425, 429, 500, 502, 503, 504)  # what may be otherwise a moment later
CARD = "README.md"
Found = TypeVar("Found")


@dataclass(frozen=True)
class HubRuntime:
    """How often something is asked, and the seconds before it is asked again; twice as long every time."""

    attempts: Count
    pause_s: NotNegative


@dataclass(frozen=True)
class HubRepository:
    """`branch` is made where there is none; `license` stands in the card."""

    repo: Annotated[str, Like(REPOSITORY, "like user/name")] | None
    private: bool
    branch: Text
    license: Text
    runtime: HubRuntime

    def require_access(self) -> None:
        """Raises unless the Hub knows the token, and it may write where the repository is."""
        from huggingface_hub import HfApi

        who = self._ask(HfApi().whoami)
        if who.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise UserError(f"the token of {who['name']} may read the Hub alone, and export.hub.repo="
                            f"{self.repo} is to be written; give HF_TOKEN one that may write")
        spaces = [who["name"], *(each["name"] for each in who.get("orgs", []))]
        if who.get("type") == "user" and self._space.lower() not in map(str.lower, spaces):
            raise UserError(f"export.hub.repo={self.repo} is of {self._space}, but the token for the Hub is "
                            f"of {', '.join(spaces)}; name a repository there, or set HF_TOKEN to another")

    def upload(self, files: Mapping[str, Path], title: str, prefix: str) -> dict[str, Any]:
        """Puts the files, by their paths in the repository, onto the branch, in one commit named `title`; a
        tag begins with `prefix`. Files of weights that an earlier upload left there and this one lacks go.
        What came of it, JSON-able."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        api, repo, sizes = HfApi(), self.repo, {name: path.stat().st_size for name, path in files.items()}
        assert repo is not None, "the stage's check asks for it"
        self._ask(lambda: api.create_repo(repo, private=self.private, exist_ok=True))
        private = self._require_visibility(api)
        if CARD in files:
            self._ask(lambda: self._require_card(files[CARD]))
        if self.branch != "main":
            self._ask(lambda: api.create_branch(repo, branch=self.branch, exist_ok=True))

        def additions() -> list[Any]:
            return [CommitOperationAdd(name, str(path)) for name, path in files.items()]

        adding = additions()

        def commit() -> Any:
            nonlocal adding
            there = api.list_repo_files(repo, revision=self.branch)
            gone = [name for name in there if _weights(name) and name not in files]
            try:
                return api.create_commit(repo, [*adding, *map(CommitOperationDelete, gone)],
                                         commit_message=title, revision=self.branch)
            except BaseException:
                adding = additions()  # it may have been done all the same: then nothing is left to change
                raise

        with _bars(), Progress("upload", total=sum(map(_kib, sizes.values())), unit="KiB") as bar:
            for each in adding:
                self._ask(lambda each=each: api.preupload_lfs_files(
                    repo, [each], revision=self.branch, free_memory=False))
                bar.advance(_kib(sizes[each.path_in_repo]), file=each.path_in_repo)
            made = self._ask(commit)
        sums = {each.path_in_repo: each.upload_info.sha256.hex() for each in adding}
        digest = hashlib.sha256(json.dumps(sorted(sums.items())).encode()).hexdigest()[:12]
        tag = f"{prefix}-{digest}"
        self._ask(lambda: api.create_tag(repo, tag=tag, revision=made.oid, exist_ok=True))
        return {"repo": repo, "branch": self.branch, "commit": made.oid, "tag": tag, "private": private,
                "url": f"{api.endpoint}/{repo}",
                "files": {name: {"bytes": sizes[name], "sha256": sums[name]} for name in files}}

    @property
    def _space(self) -> str:
        return str(self.repo).partition("/")[0]

    def _require_visibility(self, api: Any) -> bool:
        """Whether the repository is private; raises where it is not and should be."""
        private = bool(self._ask(lambda: api.repo_info(self.repo)).private)
        if self.private and not private:
            raise UserError(f"export.hub.repo={self.repo} is public, and export.hub.private=true; make it "
                            "private on the Hub, name another one, or set export.hub.private=false")
        return private

    def _require_card(self, path: Path) -> None:
        """Raises unless the Hub takes the card; asked before anything large is sent."""
        from huggingface_hub import ModelCard
        from yaml import YAMLError

        try:
            ModelCard(path.read_text(encoding="utf-8")).validate()
        except (ValueError, YAMLError) as error:
            said = str(error)
            with suppress(ValueError, KeyError, TypeError):
                said = "; ".join(each["message"] for each in json.loads(said)["errors"])
            raise UserError(f"export.hub.repo={self.repo}: the Hub refuses the card ({_clean(said)}); set "
                            "export.hub.license to an identifier that it knows, or mend README.md where "
                            "upload.folder has its own") from error

    def _ask(self, call: Callable[[], Found]) -> Found:
        """What the call gives, asked again while the Hub is busy or cannot be reached."""
        from huggingface_hub.errors import HTTPError

        pause = self.runtime.pause_s
        for number in range(1, self.runtime.attempts + 1):
            try:
                return call()
            except UserError:
                raise
            except (HTTPError, OSError, RuntimeError, ValueError) as error:
                status, reason = _answer(error), _cleaned(error)
                passing = status in PASSING if status else _unreachable(error)
                if not passing or number == self.runtime.attempts:
                    # a traceback would have the library's words, which may quote the token or addresses
                    raise UserError(self._told(error, status, reason, number)) from None
            print(f"upload: the Hub {f'answers {status}' if status else 'cannot be reached'} ({reason}); "
                  f"asking again in {pause:g} s", flush=True)
            time.sleep(pause)
            pause *= 2
        raise AssertionError("the last attempt returns or raises")

    def _told(self, error: BaseException, status: int | None, reason: str, attempts: int) -> str:
        from huggingface_hub import constants
        from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

        place, again = f"export.hub.repo={self.repo}", "run the same command again: what has arrived stays"
        if isinstance(error, LocalTokenNotFoundError):
            return (f"{place} needs a token for the Hub, and there is none; log in with `hf auth login`, or "
                    "set HF_TOKEN")
        if isinstance(error, OfflineModeIsEnabled):
            return f"{place} cannot be reached, since HF_HUB_OFFLINE is set; unset it"
        known = {401: ("the Hub does not accept the token", "log in again with `hf auth login`, or set "
                       f"HF_TOKEN to a token that may write to {self._space}"),
                 403: ("the token may not write there", "give it the right to, take another one, or name a "
                       "repository of yours"),
                 404: ("there is no such repository that the token sees", "check the name and the token"),
                 409: (f"somebody else is changing it, {attempts} times now", again),
                 412: (f"somebody else is changing it, {attempts} times now", again),
                 429: ("the Hub takes no more requests for now", f"wait a while, then {again}")}
        if status in known:
            found, remedy = known[status]
            return f"{place}: {found} ({status}: {reason}); {remedy}"
        if status:
            times = f", asked {attempts} times" if attempts > 1 else ""
            return f"{place}: the Hub answers {status} ({reason}){times}; later {again}"
        if _unreachable(error):
            return (f"{place}: the Hub ({constants.ENDPOINT}) cannot be reached ({reason}), asked {attempts} "
                    f"times; check the network and HF_ENDPOINT, then {again}")
        return f"{place} could not be written ({reason}); mend that, then {again}"


@contextmanager
def _bars() -> Iterator[None]:
    """The library's own bars, by bytes, on a terminal alone; the folder's files are counted besides."""
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _weights(name: str) -> bool:
    return name == INDEX or name.endswith(".safetensors")


def _kib(size: int) -> int:
    return -(-size // 1024)


def _answer(error: BaseException | None) -> int | None:
    """The status with which the Hub answered; None where it did not."""
    while error is not None:
        if (response := getattr(error, "response", None)) is not None:
            return response.status_code
        error = error.__cause__
    return None


def _unreachable(error: BaseException | None) -> bool:
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

    while error is not None:
        if isinstance(error, (HTTPError, ConnectionError)) and not isinstance(error, OfflineModeIsEnabled):
            return _answer(error) is None
        error = error.__cause__
    return False


def _cleaned(error: BaseException) -> str:
    """What it says, in a line: the server's own words where there are any."""
    inner: BaseException | None = error
    while inner is not None:
        if message := getattr(inner, "server_message", None):
            return _clean(message)
        error, inner = inner, inner.__cause__
    return _clean(f"{type(error).__name__}: {first_line(error)}")


def _clean(text: str) -> str:
    """A line without the token, whoever put it there, and without addresses, which may hold signatures."""
    from huggingface_hub import get_token

    token = get_token()
    text = text.replace(token, "***") if token else text
    return " ".join(word for word in text.split() if "?" not in word or "://" not in word)[:300]

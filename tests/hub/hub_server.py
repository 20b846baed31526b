"""A Hub on the loopback, in a process of its own: as much of the Hub's HTTP as uploads and downloads of
models ask for, over real connections.

    python hub_server.py     prints its port

Repositories are commits of whole trees (path -> kind, content); files of weights, and all above 1 MB, go to
the large-file store, those of more than `PART` bytes in parts. What is asked is kept (GET /_asked, /_held),
and faults can be ordered (POST /_faults): dicts with `method`, `path` (a regular expression) and `times`, and
one of `status` (with `message`), `cut` (the connection ends after so many bytes of the body), `hold` (nothing
more is read after so many), or `lost` (it is done, and answered with this status all the same). For tokens
see `TOKENS`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

PART = 1 << 20
LICENSES = ("apache-2.0", "mit", "gemma", "llama3.1", "other", "unknown")
TOKENS = {"hf_writes": ("tester", "write"), "hf_reads": ("tester", "read"), "hf_other": ("somebody", "write")}
ORGANISATIONS = {"tester": ["lab"], "somebody": []}


class Store:
    """What lasts: blobs by sha256, parts of those that come in parts, and repositories."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.blobs: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.repos: dict[str, Repository] = {}
        self.faults: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.held = 0


class Repository:
    def __init__(self, private: bool) -> None:
        self.private = private
        self.commits: dict[str, dict[str, dict[str, Any]]] = {}
        self.refs: dict[str, str] = {}
        self.titles: list[str] = []
        self.commit("main", {".gitattributes": regular(b"*.safetensors filter=lfs\n")}, "initial commit")

    def commit(self, branch: str, tree: dict[str, dict[str, Any]], title: str) -> str:
        sha = hashlib.sha1(json.dumps([branch, title, len(self.commits)]).encode()).hexdigest()
        self.commits[sha], self.refs[branch] = tree, sha
        self.titles.append(title)
        return sha

    def find(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)


def regular(content: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    return {"lfs": False, "oid": oid, "size": len(content), "content": content}


class Refused(Exception):
    def __init__(self, status: int, message: str, code: str | None = None, **more: Any) -> None:
        self.status, self.code, self.content = status, code, {"error": message, **more}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store
    server: ThreadingHTTPServer

    def log_message(self, *arguments: Any) -> None:
        return

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def answer(self) -> None:
        split = urlsplit(self.path)
        path, query = unquote(split.path), parse_qs(split.query)
        fault = self.fault(path)
        if fault and ("cut" in fault or "hold" in fault):
            self.body(fault.get("cut", fault.get("hold")))
            if "hold" in fault:
                self.store.held += 1
                threading.Event().wait()  # until the process ends
            self.close_connection = True
            self.connection.close()
            return
        body = self.body()
        if not path.startswith("/_"):
            with self.store.lock:
                self.store.asked.append({"method": self.command, "path": self.path, "bytes": len(body)})
        try:
            if fault and "status" in fault:
                raise Refused(fault["status"], fault.get("message", "ordered by the test"))
            found = self.route(path, query, body)
            if fault and "lost" in fault:
                raise Refused(fault["lost"], "done, but the answer was lost")
        except Refused as refused:
            headers = {"X-Error-Code": refused.code} if refused.code else {}
            self.send(refused.status, refused.content, headers)
            return
        if found is not None:
            self.send(200, found)

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = answer

    def fault(self, path: str) -> dict[str, Any] | None:
        with self.store.lock:
            for fault in self.store.faults:
                if fault["times"] and fault["method"] == self.command and re.search(fault["path"], path):
                    fault["times"] -= 1
                    return fault
        return None

    def body(self, limit: int | None = None) -> bytes:
        """The whole body, or its first bytes alone."""
        if "chunked" in (self.headers.get("Transfer-Encoding") or ""):
            content = b""
            while size := int(self.rfile.readline().strip() or b"0", 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content
        length = int(self.headers.get("Content-Length") or 0)
        return self.rfile.read(length if limit is None else min(limit, length))

    def send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        given = {"Content-Type": "application/json", "Content-Length": str(len(raw)), **(headers or {})}
        for name, value in given.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def route(self, path: str, query: dict[str, list[str]], body: bytes) -> Any:
        """The JSON to answer with; None where the answer was sent."""
        if path == "/_asked":
            return self.store.asked
        if path == "/_held":
            return self.store.held
        if path == "/_faults":
            self.store.faults = json.loads(body)
            return {}
        if path == "/_repos":
            return {name: {"private": repo.private, "refs": repo.refs, "titles": repo.titles}
                    for name, repo in self.store.repos.items()}
        if path.startswith("/lfs/"):
            return self.large(path, query, body)
        user, role = self.user()
        if path == "/api/whoami-v2":
            if user is None:
                raise Refused(401, "Invalid credentials in Authorization header")
            return {"type": "user", "name": user, "orgs": [{"name": each} for each in ORGANISATIONS[user]],
                    "auth": {"type": "access_token", "accessToken": {"displayName": "x", "role": role}}}
        if path == "/api/validate-yaml":
            return self.validated(json.loads(body)["content"])
        if path == "/api/repos/create":
            return self.create(json.loads(body), user, role)
        for pattern, method in ROUTES:
            if match := re.fullmatch(pattern, path):
                repo = self.repository(match[1], user)
                if self.command in ("POST", "PUT"):
                    self.require_write(match[1], user, role)
                return getattr(self, method)(match[1], repo, *match.groups()[1:], body)
        raise Refused(404, f"nothing at {path}", "EntryNotFound")

    def user(self) -> tuple[str | None, str | None]:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in TOKENS:
            raise Refused(401, f"Invalid credentials in Authorization header ({token})")
        return TOKENS.get(token, (None, None))

    def require_write(self, name: str, user: str | None, role: str | None) -> None:
        space = name.partition("/")[0]
        if user is None:
            raise Refused(401, "Invalid username or password.")
        if role != "write" or space not in (user, *ORGANISATIONS[user]):
            raise Refused(403, f"you do not have the rights to write to {space}")

    def repository(self, name: str, user: str | None) -> Repository:
        repo = self.store.repos.get(name)
        if repo is None or (repo.private and user not in (name.partition("/")[0], "tester")):
            raise Refused(401 if user is None else 404, "Repository not found", "RepoNotFound")
        return repo

    def create(self, wanted: dict[str, Any], user: str | None, role: str | None) -> Any:
        name = f"{wanted.get('organization') or user}/{wanted['name']}"
        self.require_write(name, user, role)
        told = {"url": f"{self.base}/{name}", "name": name, "id": "1"}
        if name in self.store.repos:
            raise Refused(409, "You already created this model repo", **told)
        self.store.repos[name] = Repository(wanted.get("visibility") == "private")
        return told

    def validated(self, card: str) -> Any:
        found = re.search(r"^license: (.*)$", card, re.MULTILINE)
        if found and found[1] not in LICENSES:
            message = f'"license" must be one of [{", ".join(LICENSES)}]'
            raise Refused(400, "Invalid card", errors=[{"message": message}], warnings=[])
        return {"errors": [], "warnings": []}

    def info(self, name: str, repo: Repository, revision: str | None, body: bytes) -> Any:
        sha = self.sha(repo, revision or "main")
        return {"_id": "1", "id": name, "modelId": name, "sha": sha, "private": repo.private, "tags": [],
                "downloads": 0, "likes": 0, "siblings": [{"rfilename": path} for path in repo.commits[sha]]}

    def sha(self, repo: Repository, revision: str) -> str:
        sha = repo.find(revision)
        if sha is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha

    def tree(self, name: str, repo: Repository, revision: str, body: bytes) -> Any:
        files = repo.commits[self.sha(repo, revision)]
        return [{"type": "file", "path": path, "size": file["size"], "oid": file["oid"],
                 **({"lfs": {"oid": file["oid"], "size": file["size"], "pointerSize": 130}}
                    if file["lfs"] else {})} for path, file in files.items()]

    def preupload(self, name: str, repo: Repository, revision: str, body: bytes) -> Any:
        files, there = json.loads(body)["files"], repo.commits[self.sha(repo, revision)]
        return {"files": [{"path": each["path"], "shouldIgnore": False,
                           "uploadMode": "lfs" if each["size"] > 1_000_000
                           or each["path"].endswith(".safetensors") else "regular",
                           "oid": there.get(each["path"], {}).get("oid")} for each in files]}

    def batch(self, name: str, repo: Repository, body: bytes) -> Any:
        objects = []
        for each in json.loads(body)["objects"]:
            oid, size, place = each["oid"], each["size"], f"{self.base}/lfs/{each['oid']}"
            actions = {"upload": {"href": place, "header": {}},
                       "verify": {"href": f"{place}/verify", "header": {}}}
            if size > PART:
                actions["upload"] = {"href": f"{place}/complete", "header": {
                    "chunk_size": str(PART), **{f"{number + 1:05d}": f"{place}?part={number + 1}"
                                                for number in range(-(-size // PART))}}}
            objects.append({"oid": oid, "size": size,
                            **({} if oid in self.store.blobs else {"actions": actions})})
        return {"transfer": "basic", "objects": objects}

    def large(self, path: str, query: dict[str, list[str]], body: bytes) -> Any:
        _, _, oid, *what = path.split("/")
        with self.store.lock:
            if what == ["verify"]:
                if len(self.store.blobs.get(oid, b"")) != json.loads(body)["size"]:
                    raise Refused(422, "it is not here")
                return {}
            if what == ["complete"]:
                parts = self.store.parts.pop(oid)
                body = b"".join(parts[each["partNumber"]] for each in json.loads(body)["parts"])
            elif "part" in query:
                self.store.parts.setdefault(oid, {})[int(query["part"][0])] = body
                self.send(200, b"", {"ETag": f'"{query["part"][0]}"'})
                return None
            if hashlib.sha256(body).hexdigest() != oid:
                raise Refused(400, "the content is not what was announced")
            self.store.blobs[oid] = body
        return {}

    def committed(self, name: str, repo: Repository, branch: str, body: bytes) -> Any:
        lines = [json.loads(line) for line in body.splitlines()]
        files = dict(repo.commits[self.sha(repo, branch)])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = regular(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.store.blobs:
                    raise Refused(400, f"{value['path']} points to a large file that is not here")
                files[value["path"]] = {"lfs": True, "oid": value["oid"], "size": value["size"]}
            else:
                del files[value["path"]]
        sha = repo.commit(branch, files, lines[0]["value"]["summary"])
        return {"success": True, "commitOid": sha, "commitUrl": f"{self.base}/{name}/commit/{sha}",
                "hookOutput": "", "pullRequestUrl": None}

    def branched(self, name: str, repo: Repository, branch: str, body: bytes) -> Any:
        if branch in repo.refs:
            raise Refused(409, "Reference already exists")
        repo.refs[branch] = repo.refs["main"]
        return {}

    def tagged(self, name: str, repo: Repository, revision: str, body: bytes) -> Any:
        tag = json.loads(body)["tag"]
        if tag in repo.refs:
            raise Refused(409, "Tag reference exists already")
        repo.refs[tag] = self.sha(repo, revision)
        return {}

    def resolved(self, name: str, repo: Repository, revision: str, path: str, body: bytes) -> Any:
        sha = self.sha(repo, revision)
        file = repo.commits[sha].get(path)
        if file is None:
            raise Refused(404, "Entry not found", "EntryNotFound")
        content = self.store.blobs[file["oid"]] if file["lfs"] else file["content"]
        headers = {"X-Repo-Commit": sha, "ETag": f'"{file["oid"]}"', "Accept-Ranges": "bytes"}
        status, asked = 200, re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if asked:
            start, status = int(asked[1]), 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            content = content[start:]
        self.send(status, content, headers)
        return None


NAME, REVISION = r"([\w.-]+/[\w.-]+)", r"(.+)"
ROUTES = ((rf"/api/models/{NAME}/preupload/{REVISION}", "preupload"),
          (rf"/api/models/{NAME}/commit/{REVISION}", "committed"),
          (rf"/api/models/{NAME}/branch/{REVISION}", "branched"),
          (rf"/api/models/{NAME}/tag/{REVISION}", "tagged"),
          (rf"/api/models/{NAME}/tree/{REVISION}", "tree"),
          (rf"/api/models/{NAME}(?:/revision/{REVISION})?", "info"),
          (rf"/{NAME}\.git/info/lfs/objects/batch", "batch"),
          (rf"/{NAME}/resolve/([^/]+)/(.+)", "resolved"))


def main() -> None:
    Handler.store = Store()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()

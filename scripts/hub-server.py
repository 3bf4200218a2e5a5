#!/usr/bin/env python3
"""Serves a folder in the protocol of the Hugging Face Hub, for tests: scripts/hub-server.py FOLDER [TOKEN [CERTIFICATE KEY]]

FOLDER/models/owner/name and FOLDER/datasets/owner/name are repositories with one commit, named `main`. Files of 1 KiB or
more are in LFS. With TOKEN, every request needs it. With a certificate for 127.0.0.1 and its key, in files, the
connections are encrypted. The first line of the output is the address.
"""

import hashlib
import http.server
import json
import pathlib
import re
import ssl
import sys
import urllib.parse

ROOT = pathlib.Path(sys.argv[1])
TOKEN = sys.argv[2] if len(sys.argv) > 2 else None
LFS = 1024
# Files per answer of the interface. With the Hub's own limit, every test would get a single page.
PAGE = 2


def git_blob(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def entry(repo, path):
    content = path.read_bytes()
    found = {"type": "file", "path": path.relative_to(repo).as_posix(), "size": len(content), "oid": git_blob(content)}
    if len(content) >= LFS:
        found["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return found


def commit(repo):
    paths = sorted(path for path in repo.rglob("*") if path.is_file())
    return hashlib.sha1(json.dumps([entry(repo, path) for path in paths]).encode()).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def repository(self, kind, name):
        repo = (ROOT / kind / name).resolve()
        return repo if repo.is_dir() and repo.is_relative_to(ROOT.resolve()) else None

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(url.query)
        if TOKEN and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, b"{}", X_Error_Message="Invalid credentials in Authorization header")
        api = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/(revision|tree)/([^/]+)(?:/(.*))?", url.path)
        if api:
            kind, name, what, revision, path = api.groups()
            repo = self.repository(kind, name)
            if repo is None or urllib.parse.unquote(revision) not in ("main", commit(repo)):
                return self.answer(404, b"{}", X_Error_Code="RepoNotFound")
            if what == "revision":
                files = [{"rfilename": path.relative_to(repo).as_posix()} for path in repo.rglob("*") if path.is_file()]
                return self.answer(200, json.dumps({"id": name, "sha": commit(repo), "siblings": files}).encode())
            folder = repo / urllib.parse.unquote(path or "")
            if not folder.is_dir():
                return self.answer(404, b"{}", X_Error_Code="EntryNotFound")
            paths = sorted(path for path in folder.rglob("*") if path.is_file())
            at = int(query.get("cursor", ["0"])[0])
            headers = {}
            if at + PAGE < len(paths):
                host = self.headers["Host"]
                headers["Link"] = f'<{scheme}://{host}{url.path}?recursive=true&cursor={at + PAGE}>; rel="next"'
            page = [entry(repo, path) for path in paths[at : at + PAGE]]
            return self.answer(200, json.dumps(page).encode(), Content_Type="application/json", **headers)
        file = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", url.path)
        if file:
            dataset, name, revision, path = file.groups()
            repo = self.repository("datasets" if dataset else "models", name)
            path = repo / urllib.parse.unquote(path) if repo else None
            if path is None or not path.is_file() or urllib.parse.unquote(revision) not in ("main", commit(repo)):
                return self.answer(404, b"", X_Error_Code="EntryNotFound")
            content, found = path.read_bytes(), entry(repo, path)
            tag = found.get("lfs", found)["oid"]
            headers = {"ETag": f'"{tag}"', "X_Repo_Commit": commit(repo), "Accept_Ranges": "bytes"}
            bounds = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if not bounds:
                return self.answer(200, content, **headers)
            start = int(bounds[1])
            end = min(int(bounds[2]) + 1 if bounds[2] else len(content), len(content))
            headers["Content_Range"] = f"bytes {start}-{end - 1}/{len(content)}"
            return self.answer(206, content[start:end], **headers)
        return self.answer(404)

    do_HEAD = do_GET


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
scheme = "http"
if len(sys.argv) > 4:
    scheme, context = "https", ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[3], sys.argv[4])
    server.socket = context.wrap_socket(server.socket, server_side=True)
print(f"{scheme}://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()

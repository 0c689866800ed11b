"""A small chat server of faults: it answers deterministically, fails by seed, and counts every request.

As a program (`python faultserver.py '{"faults": 0.1}'`) it prints its port and serves until it is ended. It speaks chat completions, files and batches;
`GET /stats` says what it saw.
"""
import asyncio
import hashlib
import json
import os
import re
import sys
import time
from email.utils import formatdate

KINDS = ("429", "429_seconds", "429_date", "429_ms", "500", "503", "cut", "torn", "null", "slow", "malformed", "no_choices")
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 429: "Too Many Requests", 500: "Server Error", 503: "Unavailable"}


def digest(*parts) -> int:
    return int.from_bytes(hashlib.md5("\x1f".join(map(str, parts)).encode()).digest()[:6], "big")


def right_answer(messages, sample: int = 0) -> str:
    "What the server says to messages; a test knows it too."
    h = hashlib.md5(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:10]
    return f"answer {h} é" if not sample else f"sample {sample} {h}"


def count_tokens(messages) -> int:
    return sum(len(m["content"].split()) + 2 for m in messages)


class Server:
    def __init__(self, faults=0.0, seed=7, slow_s=2.0, key="", refuse=(), context=0, one_choice=False, reasoning=False, usage=True, capacity=0, delay_s=0.0, kinds=KINDS + 2 * tuple(k for k in KINDS if k not in ("slow", "429_date")),
                 model="toy-1", lost=0.0, bad_lines=0.0, polls=2, fail_batch=False, dead_after=0, quota_after=0, lose_reply=False, no_system=False, page=False):
        self.__dict__.update({k: v for k, v in locals().items() if k != "self"})
        self.stats = dict(requests=0, tries={}, served=0, faults={}, most=0, busy=0, sent={}, batches=0, files=0)
        self.flying, self.attempts, self.files, self.batches = 0, {}, {}, {}

    def completion(self, d) -> tuple[int, dict]:
        if d.get("model") != self.model:
            return 404, dict(error=dict(message=f"The model {d.get('model')!r} does not exist", code="model_not_found"))
        for w in self.refuse:
            if w in d:
                return 400, dict(error=dict(message=f"Unsupported parameter: '{w}' is not supported with this model.", param=w, code="unsupported_parameter"))
        if self.no_system and d["messages"][0]["role"] == "system":
            return 400, dict(message="System role not supported", type="BadRequestError", param=None, code=400)
        n_in = count_tokens(d["messages"])
        if self.context and n_in > self.context:
            return 400, dict(error=dict(message=f"This model's maximum context length is {self.context} tokens. However, your messages resulted in {n_in} tokens.", code="context_length_exceeded"))
        n = 1 if self.one_choice else d.get("n", 1)
        if self.reasoning:
            choices = [dict(index=0, finish_reason="length", message=dict(role="assistant", content=None))]
        else:
            warm = d.get("temperature", 1) > 0
            choices = [dict(index=i, finish_reason="stop", message=dict(role="assistant", content=right_answer(d["messages"], d["seed"] + i if warm else 0))) for i in range(n)]
        out = dict(id="c", object="chat.completion", created=0, model=self.model + "-2025", system_fingerprint="fp_1", choices=choices)
        if self.usage:
            out["usage"] = dict(prompt_tokens=n_in, completion_tokens=3 * n, total_tokens=n_in + 3 * n, prompt_tokens_details=dict(cached_tokens=n_in // 2))
        return 200, out

    def fault(self, body: bytes) -> str:
        "The fault of this attempt at this body, '' for none."
        h = hashlib.md5(body).hexdigest()
        k = self.attempts[h] = self.attempts.get(h, 0) + 1
        if digest(self.seed, h, k) / 2**48 >= self.faults:
            return ""
        return self.kinds[digest("kind", self.seed, h, k) % len(self.kinds)]

    async def chat(self, body: bytes, w):
        s = self.stats
        s["requests"] += 1
        d = json.loads(body)
        for word in d:
            s["sent"][word] = s["sent"].get(word, 0) + 1
        self.flying += 1
        s["most"] = max(s["most"], self.flying)
        try:
            if self.capacity and self.flying > self.capacity:
                s["busy"] += 1
                return self.reply(w, 429, dict(error=dict(message="busy")))
            if self.quota_after and s["requests"] > self.quota_after:
                return self.reply(w, 429, dict(error=dict(message="You exceeded your current quota", code="insufficient_quota")))
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if self.page:
                return self.reply(w, 200, b"<html>It works!</html>")
            kind = self.fault(body) if self.faults else ""
            if kind:
                s["faults"][kind] = s["faults"].get(kind, 0) + 1
                return await self.misbehave(kind, d, w)
            status, out = self.completion(d)
            s["served"] += status == 200
            self.reply(w, status, out)
        finally:
            self.flying -= 1

    async def misbehave(self, kind, d, w):
        if kind.startswith("429"):
            told = {"429": {}, "429_seconds": {"Retry-After": "0.05"}, "429_date": {"Retry-After": formatdate(time.time() + 1, usegmt=True)}, "429_ms": {"retry-after-ms": "30", "Retry-After": "9"}}[kind]
            return self.reply(w, 429, dict(error=dict(message="slow down")), **told)
        if kind in ("500", "503"):
            return self.reply(w, int(kind), dict(error=dict(message="oops")))
        if kind == "cut":
            return w.close()
        out = self.completion(d)[1]
        if kind == "torn":
            data = json.dumps(out).encode()
            w.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data[: len(data) // 2])
            return w.close()
        if kind == "slow":
            await asyncio.sleep(self.slow_s)
        if kind == "null":
            out["choices"][0]["message"]["content"] = None
        if kind == "no_choices":
            out["choices"] = []
        self.reply(w, 200, out if kind != "malformed" else json.dumps(out)[:-20].encode())

    def reply(self, w, status, d, **headers):
        if not status:
            return w.close()
        data = d if isinstance(d, bytes) else json.dumps(d).encode()
        head = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
        w.write(f"HTTP/1.1 {status} {REASONS.get(status, 'X')}\r\nContent-Type: application/json\r\n{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    # files and batches

    def upload(self, head, body) -> dict:
        mark = re.search(rb"boundary=\"?([^\s\";]+)", head)[1]
        part = next(p for p in body.split(b"--" + mark) if b'name="file"' in p)
        fid = f"file-{len(self.files)}"
        self.files[fid] = part.split(b"\r\n\r\n", 1)[1].removesuffix(b"\r\n")
        self.stats["files"] += 1
        return dict(id=fid, object="file", purpose="batch", bytes=len(self.files[fid]), filename="x.jsonl", created_at=0, status="processed")

    def make_batch(self, d) -> dict:
        self.stats["batches"] += 1
        bid = f"batch_{len(self.batches)}"
        self.batches[bid] = dict(id=bid, object="batch", status="validating", input_file_id=d["input_file_id"], endpoint=d["endpoint"], completion_window="24h", metadata=d.get("metadata"), created_at=0,
                                 output_file_id=None, error_file_id=None, polls=0, request_counts=dict(total=0, completed=0, failed=0))
        return self.batches[bid]

    def poll(self, b) -> dict:
        b["polls"] += 1
        if b["polls"] >= self.polls and b["status"] == "validating":
            if self.fail_batch:
                return b | dict(status="failed", errors=dict(data=[dict(code="invalid_json_line", message="line 3 is no JSON", line=3)]))
            good, bad = [], []
            for line in self.files[b["input_file_id"]].decode().splitlines():
                r = json.loads(line)
                roll = digest("line", self.seed, r["custom_id"]) / 2**48
                if roll < self.lost:
                    continue
                if roll < self.lost + self.bad_lines:
                    bad.append(dict(id="r", custom_id=r["custom_id"], response=dict(status_code=500, request_id="q", body=dict(error=dict(message="oops"))), error=None))
                    continue
                status, body = self.completion(r["body"])
                good.append(dict(id="r", custom_id=r["custom_id"], response=dict(status_code=status, request_id="q", body=body), error=None))
            good.sort(key=lambda r: digest("order", r["custom_id"]))
            text = [json.dumps(r) for r in good]
            if self.lost and good:
                text += [text[0], '{"custom_id": "torn', json.dumps(good[0] | dict(custom_id="a stranger"))]
            self.files["out" + b["id"]], self.files["err" + b["id"]] = "\n".join(text).encode(), "\n".join(map(json.dumps, bad)).encode()
            b.update(status="completed", output_file_id="out" + b["id"] if good else None, error_file_id="err" + b["id"] if bad else None, request_counts=dict(total=len(good) + len(bad), completed=len(good), failed=len(bad)))
        return b

    def route(self, method, path, head, body):
        if path == "/stats":
            return 200, self.stats | dict(attempts=len(self.attempts))
        if path == "/v1/models":
            return 200, dict(object="list", data=[dict(id=self.model, object="model", created=0, owned_by="x")])
        if path == "/v1/files" and method == "POST":
            return 200, self.upload(head, body)
        if m := re.fullmatch(r"/v1/files/([\w-]+)/content", path):
            return (200, self.files[m[1]]) if m[1] in self.files else (404, dict(error=dict(message="no such file")))
        if path == "/v1/batches" and method == "POST":
            made = self.make_batch(json.loads(body))
            return (200, made) if not self.lose_reply else (0, b"")
        if path.startswith("/v1/batches?") or path == "/v1/batches":
            return 200, dict(object="list", data=list(self.batches.values()), has_more=False)
        if m := re.fullmatch(r"/v1/batches/(\w+)", path):
            return (200, self.poll(self.batches[m[1]])) if m[1] in self.batches else (404, dict(error=dict(message="no such batch")))
        return 404, dict(error=dict(message="no such path"))

    async def serve(self, r, w):
        try:
            while not w.is_closing():
                head = await r.readuntil(b"\r\n\r\n")
                method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
                m = re.search(rb"content-length: *(\d+)", head, re.I)
                body = await r.readexactly(int(m[1])) if m else b""
                m = re.search(rb"authorization: *bearer +(\S+)", head, re.I)
                if self.key and path != "/stats" and (m is None or m[1].decode() != self.key):
                    self.stats["requests"] += 1
                    self.reply(w, 401, dict(error=dict(message=f"Incorrect API key provided: {m[1].decode() if m else ''}", code="invalid_api_key")))
                elif path == "/v1/chat/completions":
                    await self.chat(body, w)
                else:
                    self.reply(w, *self.route(method, path, head, body))
                if self.dead_after and self.stats["requests"] >= self.dead_after:
                    await w.drain()
                    os._exit(0)
                await w.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            w.close()


async def main(options):
    server = await asyncio.start_server(Server(**options).serve, "127.0.0.1", options.pop("port", 0), limit=1 << 26)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}))

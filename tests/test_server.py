"""Servers: the engine against a server of faults in a process of its own, and against a real llama.cpp server."""
import json
import os
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

import histchrono.models.server as server
from histchrono.core.errors import HistError, InputError
from histchrono.core.paths import cache_dir
from histchrono.models.lanes import NoServer
from histchrono.models.prices import Budget, BudgetStop, Price
from histchrono.models.registry import get
from histchrono.models.serverbatch import BatchEngine
from histchrono.models.server import KeyRefused, ServerEngine, open_server
from histchrono.models.wire import Key

sys.path.insert(0, str(Path(__file__).parent))
from faultserver import count_tokens, right_answer  # noqa: E402

SECRET = "sk-very-secret-0123456789"


class Running:
    def __init__(self, process, port):
        self.process, self.port, self.at = process, port, f"http://127.0.0.1:{port}/v1"

    def stats(self) -> dict:
        return json.load(urllib.request.urlopen(f"http://127.0.0.1:{self.port}/stats", timeout=5))


@contextmanager
def fault_server(**options):
    p = subprocess.Popen([sys.executable, str(Path(__file__).with_name("faultserver.py")), json.dumps(options)], stdout=subprocess.PIPE, text=True)
    try:
        yield Running(p, int(p.stdout.readline()))
    finally:
        p.kill()
        p.wait()


def turns(chains: int, depth: int = 5) -> dict:
    "Prompts of chains whose turn t begins with turn t - 1."
    out = {}
    for c in range(chains):
        said = [dict(role="system", content="Answer with a name only.")]
        for t in range(depth):
            said = said + [dict(role="user", content=f"Chain {c}: who held office {t}, and where is Ågård?")]
            out[f"{c}/{t}"] = said
            said = said + [dict(role="assistant", content=f"name {c} {t}")]
    return out


def check(prompts, got, tokens=1) -> list[str]:
    "Every key once, every answer its own; the keys that failed."
    keys = [k for k, _ in got]
    assert sorted(keys) == sorted(prompts)
    for k, c in got:
        assert c.status in ("ok", "error")
        if c.status == "ok":
            assert c.text == right_answer(prompts[k]) and c.prompt_tokens >= tokens * count_tokens(prompts[k]) and c.finish_reason == "stop"
        else:
            assert c.text is None and c.finish_reason not in ("stop", "")
    return [k for k, c in got if c.status == "error"]


def test_drill_of_faults():
    "5,000 turns with one request in ten failing: all right or marked; a second pass asks only the errors and leaves none."
    prompts, start = turns(1000), time.monotonic()
    with fault_server(faults=0.1, slow_s=1.5, key=SECRET) as s:
        engine = ServerEngine([s.at], "toy-1", key=Key(SECRET, "TOY_KEY"), timeout_s=0.7, tries=2, base_s=0.02)
        got = list(engine.stream(prompts))
        failed = check(prompts, got)
        stats = s.stats()
        assert stats["requests"] == engine.usage()["requests"] and set(stats["faults"]) == {"429", "429_seconds", "429_date", "429_ms", "500", "503", "cut", "torn", "null", "slow", "malformed", "no_choices"}
        assert 5 <= len(failed) < 200, len(failed)  # about one in a hundred
        assert sum(c.prompt_tokens for _, c in got) == engine.usage()["prompt_tokens"]
        again = ServerEngine([s.at], "toy-1", key=Key(SECRET, "TOY_KEY"), timeout_s=0.7, tries=8, base_s=0.02)
        assert check({k: prompts[k] for k in failed}, list(again.stream({k: prompts[k] for k in failed}))) == []
        assert len(failed) <= again.usage()["requests"] == s.stats()["requests"] - stats["requests"] < 2 * len(failed)
        shown = f"{engine!r} {vars(engine)} {vars(engine.dispatch)} {engine.identity} {engine.machine} {engine.usage()} {got}"
        assert SECRET not in shown
    assert time.monotonic() - start < 40
    print(f"{len(failed)} errors after two tries, {engine.usage()}, {time.monotonic() - start:.1f} s")


def test_capacity_is_found():
    "A server that holds 12 questions: the engine finds that out, and refusals stay few."
    prompts = turns(300)
    with fault_server(capacity=12, delay_s=0.005) as s:
        engine = ServerEngine([s.at], "toy-1", base_s=0.02, concurrency=64)
        assert check(prompts, list(engine.stream(prompts))) == []
        stats = s.stats()
    assert 8 <= stats["most"] <= 30 and stats["busy"] < 0.2 * stats["requests"], stats


def test_retry_after_is_obeyed():
    prompts = turns(2, 1)
    with fault_server(faults=1.0, kinds=["429_date"]) as s:
        engine, start = ServerEngine([s.at], "toy-1", tries=2, base_s=0.001), time.monotonic()
        assert {c.finish_reason for _, c in engine.stream(prompts)} == {"http_429"}
        assert time.monotonic() - start > 0.3  # a date has whole seconds: up to one of them is lost
    with fault_server(faults=1.0, kinds=["429_ms"]) as s:
        engine, start = ServerEngine([s.at], "toy-1", tries=3, base_s=0.001), time.monotonic()
        list(engine.stream(prompts))
        assert 0.06 < time.monotonic() - start < 5


def test_wrong_key_is_one_line_without_the_key(capfd):
    with fault_server(key="another") as s:
        engine = ServerEngine([s.at], "toy-1", key=Key(SECRET, "TOY_KEY"))
        with pytest.raises(KeyRefused) as e:
            list(engine.stream(turns(20)))
        assert "set TOY_KEY" in str(e.value) and "\n" not in str(e.value) and s.stats()["requests"] == 1
        text = "".join(map(str, [*e.value.args, *capfd.readouterr()]))
        assert SECRET not in text and "secret" not in text


def test_key_never_shows_in_a_traceback_with_locals():
    "A failing program with every local variable printed."
    code = f"""
import os, sys, traceback
os.environ['TOY_KEY'] = {SECRET!r}
from histchrono.models.server import ServerEngine
from histchrono.models.wire import read_key
e = ServerEngine(['http://127.0.0.1:9/v1'], 'toy-1', key=read_key('TOY_KEY'), base_s=0.001)
try: list(e.stream({{'a': [dict(role='user', content='hi')]}}))
except Exception as x:
    print(''.join(traceback.TracebackException.from_exception(x, capture_locals=True).format()))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "no server answers" in out.stdout and SECRET not in out.stdout + out.stderr


def test_budget_stops_and_keeps():
    prompts = turns(100)
    with fault_server(delay_s=0.002) as s:
        engine, got = ServerEngine([s.at], "toy-1", budget=Budget(Price(10, 5, 20, "EUR"), max_cost=0.05)), []
        with pytest.raises(BudgetStop, match=r"0.0\d+ of 0.05 EUR spent on \d+ answers, which are kept; run again"):
            for x in engine.stream(prompts):
                got.append(x)
        used = engine.usage()
        assert 0.9 * 0.05 < used["cost"] < 1.1 * 0.05 and s.stats()["served"] == len(got) == len({k for k, _ in got}) < 500
        cost = sum((c.prompt_tokens - c.cached_tokens) * 10 + c.cached_tokens * 5 + c.completion_tokens * 20 for _, c in got) / 1e6
        assert used["cost"] == pytest.approx(cost)
        rest = {k: v for k, v in prompts.items() if k not in dict(got)}
        assert check(rest, list(ServerEngine([s.at], "toy-1", budget=Budget(max_tokens=10**7)).stream(rest))) == []
    with fault_server(usage=False) as s:
        with pytest.raises(HistError, match="reports no usage"):
            list(ServerEngine([s.at], "toy-1", budget=Budget(max_tokens=100)).stream(prompts))
        assert check(turns(1), list(ServerEngine([s.at], "toy-1").stream(turns(1))), tokens=0) == []


def test_several_addresses_and_a_dead_one():
    prompts = turns(200)
    with fault_server() as a, fault_server() as b, fault_server(dead_after=150) as c:
        engine = ServerEngine([a.at, b.at, c.at], "toy-1", base_s=0.02, patience_s=0.3, timeout_s=5)
        assert check(prompts, list(engine.stream(prompts))) == []
        assert c.process.wait(5) == 0 and engine.usage()["addresses"] == 2
        n = [x.stats()["requests"] for x in (a, b)]
        assert min(n) > 300 and sum(n) >= 850
    with fault_server() as a:
        engine = ServerEngine([a.at, "http://127.0.0.1:9/v1"], "toy-1", base_s=0.02)  # nobody at port 9
        assert check(prompts, list(engine.stream(prompts))) == []
    start = time.monotonic()
    with pytest.raises(NoServer, match="correct settings.ini"):
        list(ServerEngine(["http://127.0.0.1:9/v1", "http://no-such-host.invalid/v1"], "toy-1", base_s=0.02).stream(prompts))
    assert time.monotonic() - start < 20


def test_server_dies_in_the_middle():
    "What was answered is given out before the error."
    prompts, got = turns(100), []
    with fault_server(dead_after=200) as s:
        with pytest.raises(NoServer, match="everything answered is kept"):
            for x in ServerEngine([s.at], "toy-1", base_s=0.02, patience_s=0.3).stream(prompts):
                got.append(x)
    assert 150 <= len(got) <= 200 and all(c.text == right_answer(prompts[k]) for k, c in got)


def test_refused_words_are_learnt_once():
    prompts = turns(40)
    with fault_server(refuse=["max_tokens", "temperature", "top_k", "repetition_penalty"]) as s:
        engine = ServerEngine([s.at], "toy-1")
        before = dict(engine.identity)
        got = list(engine.stream(prompts))
        assert s.stats()["requests"] == len(prompts) + 4 and engine.identity == before
        assert {c.notes for _, c in got} == {("max_completion_tokens", "no_temperature")}
        assert engine.machine == dict(served=["toy-1-2025"], fingerprints=["fp_1"], refused=["max_tokens", "repetition_penalty", "temperature", "top_k"], addresses=1)
        assert s.stats()["sent"]["max_completion_tokens"] >= len(prompts)


def test_a_long_prompt_is_its_own_error():
    prompts = turns(20)
    prompts["long"] = [dict(role="user", content="word " * 500)]
    with fault_server(context=200) as s:
        got = dict(ServerEngine([s.at], "toy-1").stream(prompts))
        assert (got["long"].status, got["long"].finish_reason, got["long"].text) == ("error", "too_long", None)
        assert sum(c.status == "ok" for c in got.values()) == 100 and s.stats()["requests"] == 101


def test_a_server_that_refuses_everything_says_why():
    with fault_server(context=1, key=SECRET) as s:
        with pytest.raises(HistError, match="refused the first 20 requests .too_long: This model's maximum context length is 1 tokens"):
            list(ServerEngine([s.at], "toy-1", key=Key(SECRET)).stream(turns(100)))
        assert s.stats()["requests"] < 90  # those in flight come in


def test_null_content_with_length_is_final():
    with fault_server(reasoning=True) as s:
        got = dict(ServerEngine([s.at], "toy-1").stream(turns(2)))
        assert {(c.text, c.status, c.finish_reason) for c in got.values()} == {(None, "ok", "length")} and s.stats()["requests"] == 10


@pytest.mark.parametrize("one_choice", [False, True])
def test_candidates(one_choice):
    prompts = turns(10)
    with fault_server(one_choice=one_choice, faults=0.1, slow_s=1.5) as s:
        engine = ServerEngine([s.at], "toy-1", candidates=4, base_s=0.02, timeout_s=0.7)
        got = dict(engine.stream(prompts))
        assert check(prompts, list(got.items())) == []
        for k, c in got.items():
            assert c.candidates == (c.text, *(right_answer(prompts[k], 42 + i) for i in (1, 2, 3))), c
    assert engine.identity["candidates"] == 4


def test_no_credit_ends_the_run():
    got = []
    with fault_server(quota_after=30) as s:
        with pytest.raises(HistError, match="credit is used up"):
            for x in ServerEngine([s.at], "toy-1").stream(turns(100)):
                got.append(x)
        assert len(got) == 30


def test_by_name(tmp_path, monkeypatch):
    from histchrono.core.settings import load

    ini, demo = tmp_path / "settings.ini", load("demo")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(InputError, match="set the environment variable OPENAI_API_KEY"):
        open_server(get("GPT-4"), demo)
    with pytest.raises(InputError, match="settings.ini"):
        open_server(get("DeepSeek-V3"), demo, ini=ini)
    with fault_server(key=SECRET) as s:
        ini.write_text(f"[servers]\nGPT-4 = {s.at} as=toy-1\n[prices]\ncurrency = EUR\ntoy-1 = 1, 0.5, 2\n")
        with pytest.raises(KeyRefused, match="wants a key"):
            list(open_server(get("GPT-4"), demo, ini=ini).stream(turns(1)))
        monkeypatch.setenv("OPENAI_API_KEY", SECRET)
        engine = open_server(get("GPT-4"), demo, ini=ini, max_cost=1.0)
        assert check(turns(3), list(engine.stream(turns(3)))) == [] and engine.usage()["cost"] > 0
        assert not any(x in json.dumps(engine.identity) for x in (SECRET, "127.0.0.1"))
    with pytest.raises(InputError, match=r"\[prices\]"):
        open_server(get("GPT-4"), demo, max_cost=1.0)


def test_speed():
    "What the engine itself takes, against a server that answers at once."
    prompts = turns(1600)
    with fault_server() as s:
        engine, start = ServerEngine([s.at], "toy-1"), time.perf_counter()
        assert check(prompts, list(engine.stream(prompts))) == []
        rate = len(prompts) / (time.perf_counter() - start)
    print(f"{rate:,.0f} prompts/s")
    assert rate > 500  # 2,000 and more on two free cores


def test_the_stand_in_speaks_the_real_protocol():
    "The official client understands the server of faults."
    openai = pytest.importorskip("openai", reason="the openai client is not installed")
    with fault_server() as s:
        client = openai.OpenAI(base_url=s.at, api_key="x", max_retries=0)
        said = client.chat.completions.create(model="toy-1", messages=turns(1)["0/0"], temperature=0, seed=42)
        assert said.choices[0].message.content == right_answer(turns(1)["0/0"]) and said.usage.prompt_tokens == count_tokens(turns(1)["0/0"])
        assert client.models.list().data[0].id == "toy-1"
        line = dict(custom_id="a", method="POST", url="/v1/chat/completions", body=dict(model="toy-1", messages=turns(1)["0/0"], seed=1, temperature=0))
        f = client.files.create(file=("x.jsonl", json.dumps(line).encode()), purpose="batch")
        b = client.batches.create(input_file_id=f.id, endpoint="/v1/chat/completions", completion_window="24h")
        while b.status != "completed":
            b = client.batches.retrieve(b.id)
        assert right_answer(turns(1)["0/0"]) in json.loads(client.files.content(b.output_file_id).text)["response"]["body"]["choices"][0]["message"]["content"]


def batch(s, folder, **how):
    engine = ServerEngine([s.at], "toy-1", key=Key(SECRET, "TOY_KEY"), base_s=0.02, **how)
    return BatchEngine(engine, folder, poll_s=0.02)


def test_batch_is_joined_by_id(tmp_path):
    "Answers in another order, 5 % lost, 5 % errors, doubles, strangers and torn lines: nothing is shifted; a second run asks only the errors."
    prompts = turns(100)
    with fault_server(key=SECRET, lost=0.05, bad_lines=0.05, refuse=["top_k"]) as s:
        engine = batch(s, tmp_path)
        engine.lines = 200  # three files
        failed = check(prompts, list(engine.stream(prompts)))
        stats = s.stats()
        assert stats["batches"] == 3 and 10 <= len(failed) <= 45 and stats["requests"] == engine.usage()["requests"] and engine.machine["odd_lines"] == 9
        assert 10 <= stats["requests"] - 2 <= 45  # the first question, its refusal, and those that were lost
        kept = "".join(p.read_text() for p in tmp_path.iterdir())
        assert SECRET not in kept and s.at not in kept
        again = batch(s, tmp_path)
        rest = {k: prompts[k] for k in failed}
        still = check(rest, list(again.stream(rest)))
        assert s.stats()["batches"] == 4 and set(still) <= set(failed)  # the same lines fail by seed, but they were asked anew
        assert check(rest, list(again.inner.stream(rest))) == []


def test_batch_survives_kill_and_lost_reply(tmp_path):
    prompts, code = turns(20), """
import sys, json
sys.path.insert(0, sys.argv[1])
from test_server import *
class S: at = sys.argv[2]
list(batch(S, sys.argv[3]).stream(turns(20)))
"""
    with fault_server(key=SECRET, polls=10**9) as s:
        p = subprocess.Popen([sys.executable, "-c", code, str(Path(__file__).parent), s.at, str(tmp_path)])
        end = time.monotonic() + 60
        while not any('"batch": "batch_0"' in f.read_text() for f in tmp_path.glob("batch_*.json")) and time.monotonic() < end:
            time.sleep(0.02)
        p.kill()
        p.wait()
        b = batch(s, tmp_path)
        b.patience_s = 0
        with pytest.raises(HistError, match="not handed in twice"):
            list(b.stream(prompts))
        assert s.stats()["batches"] == 1
    for f in tmp_path.iterdir():
        f.unlink()
    with fault_server(key=SECRET, lose_reply=True) as s:  # the batch is made, and the reply is lost
        assert check(prompts, list(batch(s, tmp_path).stream(prompts))) == [] and s.stats()["batches"] == 1
        state = next(tmp_path.glob("batch_*.json"))
        state.write_text(json.dumps(json.loads(state.read_text()) | dict(batch="")))  # ended between making and writing
        left = dict(list(prompts.items())[1:])
        assert check(left, list(batch(s, tmp_path).stream(left))) == [] and s.stats()["batches"] == 1 and s.stats()["requests"] == 1


def test_batch_refusals(tmp_path):
    prompts = turns(20)
    with fault_server(key=SECRET, fail_batch=True) as s:
        with pytest.raises(HistError, match="was not accepted .line 3 is no JSON"):
            list(batch(s, tmp_path).stream(prompts))
        assert not list(tmp_path.glob("batch_*.json"))
    with fault_server(key=SECRET) as s:
        with pytest.raises(InputError, match="more than the budget"):
            list(batch(s, tmp_path, budget=Budget(max_tokens=1000)).stream(prompts))
        assert s.stats()["files"] == 0
        got = list(batch(s, tmp_path, budget=Budget(Price(1, 1, 1, "EUR"), max_cost=1)).stream(prompts))
        assert check(prompts, got) == []
    with pytest.raises(InputError, match="without it"):
        BatchEngine(ServerEngine(["http://x"], "toy-1", candidates=3), tmp_path)
    with fault_server(key="another") as s:
        with pytest.raises(KeyRefused):
            list(batch(s, tmp_path / "new").stream(prompts))


def test_no_system_role_and_consecutive_questions():
    "A template without a system role, and one that wants alternation: folded and merged as on this machine, and noted."
    q = [dict(role="system", content="S"), dict(role="user", content="Q1"), dict(role="user", content="Q2")]
    with fault_server(no_system=True) as s:
        (_, c), = ServerEngine([s.at], "toy-1").stream(dict(a=q))
        assert c.text == right_answer([dict(role="user", content="S\n\nQ1\n\nQ2")]) and c.notes == ("merged", "system_folded")


def test_a_page_instead_of_an_interface():
    with fault_server(page=True) as s:
        with pytest.raises(NoServer, match="bad_json"):
            list(ServerEngine([s.at], "toy-1", base_s=0.001).stream(turns(100)))
        assert s.stats()["requests"] < 50


def test_stopping_early_leaves_nothing():
    import threading

    with fault_server(delay_s=0.2) as s:
        before, start = threading.active_count(), time.monotonic()
        for _ in ServerEngine([s.at], "toy-1").stream(turns(100)):
            break
        assert time.monotonic() - start < 3 and threading.active_count() == before


LLAMA = """
import sys, time, xllamacpp as x
p = x.CommonParams()
p.model.path, p.n_ctx, p.n_parallel, p.cpuparams.n_threads, p.port, p.hostnames = sys.argv[1], 8192, 4, 2, int(sys.argv[2]), ['127.0.0.1']
s = x.Server(p)
print('address', s.listening_address, flush=True)
sys.stdin.read()
"""


def test_a_real_llama_cpp_server(tmp_path):
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    weights = sorted(cache_dir("SmolLM2-135M-Instruct").glob("*.gguf"))
    if not weights:
        pytest.skip("the weights are not here: histchrono fetch SmolLM2-135M-Instruct")
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with open(tmp_path / "log", "w") as log:
        p = subprocess.Popen([sys.executable, "-c", LLAMA, str(weights[0]), str(port)], stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        end = time.monotonic() + 60
        while "address" not in (tmp_path / "log").read_text() and time.monotonic() < end and p.poll() is None:
            time.sleep(0.1)
        ini = tmp_path / "settings.ini"
        ini.write_text(f"[servers]\nDeepSeek-V3 = http://127.0.0.1:{port}\n")
        from histchrono.core.settings import load

        engine = open_server(get("DeepSeek-V3"), load("demo"), ini=ini)
        ask = lambda *history: [dict(role="system", content="Answer with a name only."), *(dict(role=("user", "assistant")[i % 2], content=h) for i, h in enumerate(history))]
        prompts = {"fr": ask("What is the capital of France?"), "fr2": ask("What is the capital of France?", "Paris", "And of Italy?"), "us": ask("Who was the president of the United States in 1998?"), "jp": ask("What is the capital of Japan?")}
        got = dict(engine.stream(prompts))
        assert set(got) == set(prompts) and all(c.status == "ok" and c.text and 0 < c.completion_tokens <= 24 and c.prompt_tokens > 10 for c in got.values()), got
        assert "Paris" in got["fr"].text and "Clinton" in got["us"].text, got
        assert {k: c.text for k, c in engine.stream(prompts)} == {k: c.text for k, c in got.items()}  # greedy: the same again
        assert engine.usage()["cached_tokens"] > 0 and engine.usage()["requests"] == 8
        print({k: c.text for k, c in got.items()}, engine.machine, engine.usage())
    finally:
        p.kill()
        p.wait()
    assert os.path.exists(weights[0])

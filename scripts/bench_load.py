"""The load of scripts/bench: clients in a closed and in an open loop, and sessions that consolidate meanwhile."""

import asyncio
import http.client
import json
import statistics
import subprocess
import threading
import time
from pathlib import Path

from bench_systems import binary
from bench_workloads import context, messages

ROOT = Path(__file__).resolve().parent.parent
# Sessions that consolidate while the latency of others is measured, and the time that a model needs.
CONSOLIDATING_SESSIONS = 50
MODEL_SECONDS = 2.0
DUE_MESSAGES = 101  # consolidation.threshold is 100


def wrk(address, workload, connections, seconds, threads=1):
    """Runs clients in a closed loop and returns the report of scripts/bench.lua.

    One thread of wrk is faster than precis. A second one takes more time of the two cores than it adds requests.
    """
    command = ["wrk", f"--threads={threads}", f"--connections={connections}", f"--duration={seconds}s", "--timeout=10s",
        f"--script={ROOT / 'scripts/bench.lua'}", f"http://{address}", "--", workload.file]  # fmt: skip
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(result.stdout.splitlines()[-1])


def run_reference(server, workload, connections, seconds):
    # A server that only sends a prepared response is faster than one thread of wrk.
    report = wrk(server.address, workload, connections, seconds, threads=2)
    return {
        "system": server.name, "workload": workload.name, "connections": connections,
        "rate": (report["requests"] - report["rejected"]) / report["seconds"],
        "p50_ms": report["p50_ms"], "p99_ms": report["p99_ms"],
    }  # fmt: skip


def run_precis(service, postgres, workload, connections, seconds, is_indexed=True):
    """Returns the figures of a closed loop, with the CPU time until the search index has caught up, if there is one."""
    statuses = service.statuses()
    cpu, database_cpu = service.cpu_seconds(), postgres.server_cpu_seconds()
    report = wrk(service.address, workload, connections, seconds)
    ended_at = time.monotonic()
    if workload.sessions and is_indexed:
        service.wait_for_index()
    index_seconds = time.monotonic() - ended_at
    cpu, database_cpu = service.cpu_seconds() - cpu, postgres.server_cpu_seconds() - database_cpu
    counts = {status: count - statuses.get(status, 0) for status, count in service.statuses().items()}
    rejected = {status: count for status, count in counts.items() if status >= "4" and count}
    accepted = report["requests"] - report["rejected"]
    run = {
        "system": service.name, "workload": workload.name, "connections": connections,
        "rate": accepted / report["seconds"], "p50_ms": report["p50_ms"], "p99_ms": report["p99_ms"],
        "rejected": rejected, "broken": report["broken"], "index_seconds": index_seconds,
        "cpu_precis_us": cpu / max(accepted, 1) * 1e6,
    }  # fmt: skip
    if service is postgres:
        run["cpu_database_us"] = database_cpu / max(accepted, 1) * 1e6
    return run


def run_open_loop(service, workload, load, capacity, seconds):
    """Sends a multiple of the capacity, and returns the outcomes, the memory and the time to recover."""
    memory, ended = [], threading.Event()

    def sample():
        while not ended.wait(0.5):
            memory.append(service.memory_mib())

    alone = recovery_latency(service, workload)
    sampler = threading.Thread(target=sample)
    sampler.start()
    command = [binary("examples/open_loop"), service.address, workload.file, str(load * capacity), str(seconds)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    recovered = time_to_recover(service, workload, alone)
    ended.set()
    sampler.join()
    outcome = json.loads(result.stdout)
    outcome.update(system=service.name, workload=workload.name, load=load, capacity=capacity, seconds=seconds)
    outcome.update(recovery_seconds=recovered, memory_mib=memory)
    return outcome


def probe(service, workload, connection):
    """Returns status and duration of one request."""
    path, body = workload.requests[0]
    started_at = time.monotonic()
    status, _ = service.request("POST", path, body, connection)
    return status, time.monotonic() - started_at


def recovery_latency(service, workload):
    """Returns the 99th percentile of one client alone."""
    connection = service.connect()
    latencies = sorted(probe(service, workload, connection)[1] for _ in range(500))
    connection.close()
    return latencies[495]


def time_to_recover(service, workload, alone):
    """Returns the time until one client is served without rejections and slow responses. Looks for three seconds."""
    connection = service.connect()
    start, recovered = time.monotonic(), 0.0
    while time.monotonic() < start + 3:
        before = time.monotonic() - start
        status, latency = probe(service, workload, connection)
        # A single slow response may be caused by the machine and is ignored.
        if (status != 200 or latency > 2 * alone) and before - recovered < 0.3:
            recovered = time.monotonic() - start
        time.sleep(0.002)
    connection.close()
    return recovered


class ModelServer:
    """A model with the chat completions API, which answers every prompt after the same time."""

    CHUNKS = (
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "They discussed the "}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"content": "plan and the next steps."}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 6000, "completion_tokens": 8, "total_tokens": 6008}},
    )

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.server = self.loop.run_until_complete(asyncio.start_server(self.serve, "127.0.0.1"))
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def base_url(self):
        return "http://{}:{}/v1".format(*self.server.sockets[0].getsockname())

    async def serve(self, reader, writer):
        base = {"id": "bench", "object": "chat.completion.chunk", "created": 0, "model": "bench"}
        events = [json.dumps({**base, **chunk}) for chunk in self.CHUNKS] + ["[DONE]"]
        body = "".join(f"data: {event}\n\n" for event in events)
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {len(body)}\r\n\r\n"
        try:
            while True:
                request = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                await reader.readexactly(int(request.split("content-length:")[1].split("\r\n")[0]))
                await asyncio.sleep(MODEL_SECONDS)
                writer.write((head + body).encode())
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            writer.close()

    def settings(self):
        """Returns settings with this model as the only one."""
        return f"""
            [llm.providers.bench]
            base_url = "{self.base_url()}"
            [llm.models.bench]
            provider = "bench"
            model = "bench"
            retries = 0
            max_concurrent_calls = {CONSOLIDATING_SESSIONS}
            [llm.pools.default]
            models = ["bench"]
            """

    def stop(self):
        async def close():
            self.server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(close(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class ConsolidatingSessions:
    """Clients that append to their own session until it must be consolidated, and wait for that, again and again."""

    def __init__(self, service):
        self.service, self.outcomes, self.ended = service, [], threading.Event()
        self.exchange = messages("consolidating", 1, DUE_MESSAGES)
        self.threads = [threading.Thread(target=self.run, args=(n,)) for n in range(CONSOLIDATING_SESSIONS)]

    def run(self, number):
        # The first consolidations begin at different times.
        self.ended.wait(MODEL_SECONDS * number / CONSOLIDATING_SESSIONS)
        connection = self.service.connect()
        while not self.ended.is_set():
            try:
                self.outcomes.append(self.consolidate(f"consolidating-{number}", connection))
            except (OSError, http.client.HTTPException):
                self.outcomes.append("connection closed")
                connection.close()
        connection.close()

    def consolidate(self, session, connection):
        """Appends messages and requests a context. Returns the outcome of the consolidation, or the status of an error."""
        status, _ = self.service.request("POST", f"/sessions/{session}/exchanges", self.exchange, connection)
        if status == 201:
            status, text = self.service.request("POST", *context(session), connection)
        return json.loads(text)["consolidation"]["outcome"] if status == 200 else f"status {status}"

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        for thread in self.threads:
            thread.join()


def run_while_sessions_consolidate(service, workload, load, capacity, seconds):
    model = ModelServer()
    settings = Path("consolidating.toml")
    settings.write_text(model.settings(), encoding="utf-8")
    service.restart("--config", settings)
    wrk(service.address, workload, 16, 1)  # fills the cache
    with ConsolidatingSessions(service) as sessions:
        outcome = run_open_loop(service, workload, load, capacity, seconds)
    model.stop()
    service.restart()
    wrk(service.address, workload, 16, 1)  # fills the cache of the next run
    counts = {outcome: sessions.outcomes.count(outcome) for outcome in set(sessions.outcomes)}
    return {**outcome, "consolidations": counts}


def measure_memory(service, workload, requests, seconds):
    """Sends at least as many requests to a new process, and returns its memory before and after them."""
    service.restart()
    service.post("/sessions/first/exchanges", messages("first", 1, 2))
    time.sleep(1)
    at_rest = service.memory_mib()
    rates, rejected, sent = [], 0, 0
    while sent < requests:
        report = wrk(service.address, workload, 64, seconds)
        sent += report["requests"]
        rejected += report["rejected"]
        rates.append(report["requests"] / report["seconds"])
    service.wait_for_index()
    return {
        "at_rest_mib": at_rest, "after_mib": service.memory_mib(), "peak_mib": service.memory_mib("VmHWM"),
        "requests": sent, "sessions": workload.sessions, "rejected": rejected, "rate": statistics.median(rates),
    }  # fmt: skip

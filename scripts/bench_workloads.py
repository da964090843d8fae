"""The sessions and the requests of scripts/bench."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SESSIONS = 1000
MESSAGE_CHARACTERS = 300
# Short sessions of the comparison with a long one. There are several, so that appends do not make them long.
SHORT_SESSIONS = 500
CONTEXT = {"system_prompt": "You are a helpful assistant.", "user_message": "And now?"}
# Sessions with a summary, a memory document and a long system prompt.
FULL_SESSIONS = 100
PROMPT_CHARACTERS = 2000
# Contexts per exchange of the run that measures memory.
CONTEXTS_PER_EXCHANGE = 9


@cache
def make_word(rank):
    choices = random.Random(rank)
    return "".join(choices.choices("aeioulnrstmd", k=choices.randint(2, 9)))


@cache
def make_text(seed, characters=MESSAGE_CHARACTERS):
    """Returns a text of pseudo-words. Common words are more frequent than rare ones, as in real text."""
    choices = random.Random(seed)
    words, length = [], 0
    while length <= characters:
        words.append(make_word(int(choices.paretovariate(1.0)) % 20_000))
        length += len(words[-1]) + 1
    return " ".join(words)[:characters]


def messages(name, first, last):
    roles = ["assistant", "user"]
    return {"messages": [
        {"role": roles[n % 2], "content": make_text(f"{name} {n}")} for n in range(first, last + 1)
    ]}  # fmt: skip


# One prepared statement for the head of a session and its newest messages.
PGBENCH_READ = """\
\\set session random(1, {sessions})
SELECT s.last_seq, s.tokens, s.cursor_seq, s.cursor_tokens, s.revision, s.updated_at, s.summary, m.seq, m.message
FROM sessions AS s CROSS JOIN LATERAL (
    SELECT seq, message FROM messages
    WHERE tenant_id = 'default' AND session_id = s.session_id ORDER BY seq DESC LIMIT {tail}
) AS m
WHERE s.tenant_id = 'default' AND s.session_id = 'c{tail}-' || :session::text;
"""

# One prepared statement for an exchange: the row of the session and two messages.
PGBENCH_APPEND = """\
\\set session random(1, {sessions})
WITH session AS (
    INSERT INTO sessions AS s (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at, updated_at,
        activity_hour)
    VALUES ('default', 'p{sessions}-' || :session::text, 'default', '{{}}', 2, 150, now(), now(),
        floor(extract(epoch FROM now()) / 3600))
    ON CONFLICT (tenant_id, session_id) DO UPDATE SET last_seq = s.last_seq + 2, tokens = s.tokens + 150,
        updated_at = excluded.updated_at, activity_hour = excluded.activity_hour
    RETURNING session_id, last_seq
)
INSERT INTO messages (tenant_id, session_id, seq, role, tokens, message, created_at)
SELECT 'default', session_id, last_seq - 1, 'user', 75, '{user}', now() FROM session
UNION ALL SELECT 'default', session_id, last_seq, 'assistant', 75, '{assistant}', now() FROM session;
"""


@dataclass
class Workload:
    """A kind of request, and the script of pgbench's counterpart. A request without a body is a GET."""

    name: str
    requests: list
    pgbench: str | None = None
    sessions: int = 0  # an exchange: the number of sessions that it chooses from

    @property
    def file(self):
        return Path(f"{self.name}.tsv")

    @property
    def script(self):
        return Path(f"{self.name}.sql")

    def write_files(self):
        lines = (f"{path}\t{json.dumps(body) if body else ''}\n" for path, body in self.requests)
        self.file.write_text("".join(lines), encoding="utf-8")
        if self.pgbench:
            self.script.write_text(self.pgbench, encoding="utf-8")

    def random_session(self):
        """Returns the id of a session that only the measurement of SQLite alone uses."""
        return f"s{self.sessions}-{random.randrange(self.sessions)}"


def context(session):
    return f"/sessions/{session}/context", CONTEXT


def exchange(session, number):
    body = {"user_message": make_text(f"user {number}"), "assistant_reply": make_text(f"assistant {number}")}
    return f"/sessions/{session}/exchanges", body


def read(tail):
    requests = [context(f"c{tail}-{n}") for n in range(1, SESSIONS + 1)]
    return Workload(f"context-{tail}", requests, PGBENCH_READ.format(sessions=SESSIONS, tail=tail))


def append(name, sessions):
    requests = [exchange(f"e{sessions}-{n % sessions}", n) for n in range(SESSIONS)]
    message = {role: json.dumps({"role": role, "content": make_text(role)}) for role in ("user", "assistant")}
    return Workload(name, requests, PGBENCH_APPEND.format(sessions=sessions, **message), sessions)


def compared_workloads():
    """Returns the workloads that are compared with pgbench."""
    return [read(20), read(100), append("exchange", SESSIONS), append("hot-session", 1)]


def full_context_workload():
    """Returns contexts with all parts of the system message, and a tail of 20 messages."""
    body = {**CONTEXT, "system_prompt": make_text("system prompt", PROMPT_CHARACTERS)}
    return Workload("context-full", [(f"/sessions/full-{n}/context", body) for n in range(1, FULL_SESSIONS + 1)])


def reference_workloads():
    return [Workload("prepared", [("/", {"user_message": "And now?"})]), Workload("livez", [("/livez", None)])]


def history_workloads():
    """Returns pairs of workloads: the same request to sessions of a hundred messages and to a long one.

    The contexts come first, because appends make the tails longer.
    """
    others = range(2, SHORT_SESSIONS + 1)
    return [
        (Workload("context-short", [context("short-1")]), Workload("context-long", [context("long")])),
        (
            Workload("append-short", [exchange(f"short-{n}", n) for n in others], sessions=len(others)),
            Workload("append-long", [exchange("long", n) for n in others], sessions=1),
        ),
    ]  # fmt: skip


def memory_workload(sessions):
    """Returns the mixture of requests to many sessions."""
    requests = []
    for n in range(sessions):
        name = f"m{n // SESSIONS}-{n % SESSIONS + 1}"
        requests += [context(name)] * CONTEXTS_PER_EXCHANGE + [exchange(name, n % SESSIONS)]
    return Workload("memory", requests, sessions=sessions)


def seed(service):
    """Creates the sessions of the compared workloads. No tail is longer than `consolidation.threshold`, which is 100."""

    def create(part):
        connection = service.connect()
        for n in part:
            for tail in (20, 100):
                name = f"c{tail}-{n}"
                service.post(f"/sessions/{name}/exchanges", messages(name, 1, tail), connection)
        connection.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(create, [range(first, SESSIONS + 1, 8) for first in range(1, 9)]))
    service.wait_for_index()


def seed_full(service):
    """Creates the sessions of the workload `context-full`: a summary of 80 messages, 20 other messages, a memory document."""
    for n in range(1, FULL_SESSIONS + 1):
        name = f"full-{n}"
        memory = "\n".join(f"- {make_text(f'memory {n} {line}', 100)}" for line in range(20))
        service.put(f"/users/{name}/memory", {"content": memory})
        service.post(f"/sessions/{name}/exchanges", {"user_id": name, **messages(name, 1, 100)})
        service.post(f"/sessions/{name}/consolidations")
    service.wait_for_index()


SERIES = "(WITH RECURSIVE s (n) AS (SELECT {} UNION ALL SELECT n + 1 FROM s WHERE n < {}) SELECT n FROM s) AS series"


def seed_history(service, length):
    """Creates sessions of 100 messages with a summary of all except the newest 20, and one of `length` messages.

    The long session equals the short ones, except for the messages before them. It is created with SQL, because to import
    and to index a million messages takes minutes.
    """
    service.post("/sessions/short-1/exchanges", messages("short", 1, 100))
    service.post("/sessions/short-1/consolidations")
    service.wait_for_index()
    shift = length - 100
    short = "AS source, {} WHERE source.tenant_id = 'default' AND source.session_id = 'short-1'"
    others = short.format(SERIES.format(2, SHORT_SESSIONS))
    number = {"session_id": "'short-' || series.n"}
    long = {"session_id": "'long'"}
    positions = {"last_seq": f"source.last_seq + {shift}", "cursor_seq": f"source.cursor_seq + {shift}"}
    new = {"incarnation": service.new_incarnation}
    service.copy_rows("sessions", f"sessions {others}", **number, **new)
    service.copy_rows("sessions", f"sessions {short.format(SERIES.format(1, 1))}", **long, **positions, **new)
    for table, key in (("messages", "seq"), ("revisions", "cursor_seq")):
        service.copy_rows(table, f"{table} {others}", **number)
        shifted = {key: f"source.{key} + {shift}"}
        if table == "revisions":
            shifted["to_seq"] = f"source.to_seq + {shift}"
        service.copy_rows(table, f"{table} {short.format(SERIES.format(1, 1))}", **long, **shifted)
    earlier = short.format(SERIES.format(1, shift)) + " AND source.seq = (series.n - 1) % 100 + 1"
    service.copy_rows("messages", f"messages {earlier}", **long, seq="series.n")
    service.optimise()


def seed_memory(service, sessions):
    """Copies the sessions with a tail of 20 messages until there are enough."""
    rows = f"AS source, {SERIES.format(0, sessions // SESSIONS - 1)} WHERE source.session_id LIKE 'c20-%'"
    name = {"session_id": "'m' || series.n || substr(source.session_id, 4)"}
    service.copy_rows("sessions", f"sessions {rows}", **name, incarnation=service.new_incarnation)
    service.copy_rows("messages", f"messages {rows}", **name)
    service.optimise()

"""Facts for Schemathesis that no schema expresses: the encoding of JSON lines, the existing sessions, and further rules."""

import atexit
import collections
import itertools
import json
import os
import urllib.error
import urllib.parse
import urllib.request

import schemathesis
from hypothesis import strategies as st
from schemathesis.core.parameters import ParameterLocation
from schemathesis.generation.meta import TestPhase

LINES = "application/x-ndjson"
# The messages that the script imports into each session.
LINES_OF_A_SESSION = 40

content = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)
message = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": content})
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | content,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(content, inner, max_size=3),
    max_leaves=5,
)
line = (message | anything).map(json.dumps) | content
imports = st.lists(message.map(json.dumps), min_size=1, max_size=5) | st.lists(line, max_size=5)

# Lines that are messages, and lines that are not.
schemathesis.openapi.media_type(LINES, imports.map(lambda lines: "\n".join(lines).encode()))


@schemathesis.serializer(LINES)
def lines(context, value):
    return value if isinstance(value, bytes) else str(value).encode()


@schemathesis.hook
def map_case(context, case):
    """Changes a request that fits the document into one that is accepted, if a rule that no schema expresses rejects it.

    Requests that are invalid on purpose stay as they are.
    """
    ids = itertools.count()

    def is_sound(location):
        meta = case.meta
        return meta is None or not meta.generation.mode.is_negative or not meta.is_negative_at(location)

    if is_sound(ParameterLocation.PATH):
        near(case)
    if is_sound(ParameterLocation.QUERY) and "cursor" in (case.query or {}):
        # A cursor comes from an earlier page; links set it.
        del case.query["cursor"]
    if is_sound(ParameterLocation.QUERY) and isinstance((case.query or {}).get("q"), str):
        # A query needs a letter or a digit in a word that is not excluded.
        case.query["q"] += " word"
    if is_sound(ParameterLocation.QUERY) and str((case.query or {}).get("max_tokens")).isdecimal():
        # A window in which the newest turn does not fit is rejected. Values at the limits are texts.
        case.query["max_tokens"] = max(int(case.query["max_tokens"]), 1000)
    if is_sound(ParameterLocation.HEADER) and "Idempotency-Key" in (case.headers or {}):
        # The same key with another body is rejected.
        case.headers["Idempotency-Key"] = f"{case.headers['Idempotency-Key'][:200]}-{next(keys)}"
    if is_sound(ParameterLocation.HEADER) and "If-Match" in (case.headers or {}):
        # Values at the limits lack the quotes that the pattern requires.
        tag = case.headers["If-Match"].strip('"')
        case.headers["If-Match"] = "*" if tag == "*" else f'"{tag}"'
    if is_sound(ParameterLocation.BODY) and isinstance(case.body, dict):
        for content in contents(case.body):
            for part in content if isinstance(content, list) else []:
                # Of the blocks of the provider's tools, responses describe only those of the web search.
                if part["type"] == "server_tool_use" or part["type"].endswith("_tool_result"):
                    part["type"] = "text"
                # A text needs its text, and so does a refusal.
                name = "refusal" if part["type"] == "refusal" else "text" if "text" in part["type"] else None
                if name and not isinstance(part.get(name), str):
                    part[name] = "Nothing."
        for message in case.body.get("messages") or []:
            for call in message.get("tool_calls") or []:
                # Two calls of a message with one id are rejected.
                call["id"] = f"{call['id']}-{next(ids)}"
        if case.operation.definition.raw["operationId"] == "edit_summary" and "based_on" in case.body:
            # An edit names the current revision.
            case.body = case.body | {"based_on": current_revision(case.path_parameters["session_id"])}
        # Two skills with one name are rejected, and so is an empty skill that is always shown. Cases share their bodies, so
        # the changed body is a copy.
        if skills := case.body.get("skills"):
            sound = [
                skill | {"name": f"{skill['name']}-{next(ids)}", "body": f"{skill.get('body')}."} for skill in skills
            ]
            case.body = case.body | {"skills": sound}
        if case.operation.definition.raw["operationId"] == "call_tool" and not is_call(case.body):
            # Arguments without a call are an object that lacks the fields of a call.
            case.body = {name: value for name, value in case.body.items() if name not in ("type", "function")}
        if "name" in (case.path_parameters or {}) and is_sound(ParameterLocation.PATH):
            # The call names the tool that the path names.
            name = {"name": case.path_parameters["name"]}
            if isinstance(case.body.get("function"), dict):
                case.body = case.body | {"function": case.body["function"] | name}
            elif "name" in case.body:
                case.body = case.body | name
    return case


keys = itertools.count()


def current_revision(session):
    """Returns the revision of the summary of a session, or 0 if it has none."""
    request = urllib.request.Request(
        f"{os.environ['SCHEMATHESIS_SERVICE']}/sessions/{urllib.parse.quote(str(session), safe='')}",
        headers={"Authorization": f"Bearer {os.environ['SCHEMATHESIS_KEY']}"},
    )
    try:
        with urllib.request.urlopen(request) as response:
            return json.load(response)["summary"]["revision"]
    except urllib.error.HTTPError:
        return 0


def contents(body):
    """The contents of the messages in a body."""
    yield from map(body.get, ["user_message", "assistant_reply"])
    for message in body.get("messages") or []:
        yield message.get("content")


def is_call(body):
    """Returns True for a complete tool call of one of the formats."""
    function = body.get("function")
    if isinstance(function, dict) and body.get("type") in (None, "function"):
        names = [body.get("id"), function.get("name")]
    elif body.get("type") == "tool_use":
        names = [body.get("id"), body.get("name")]
    else:
        return False
    return all(isinstance(name, str) and name for name in names)


def near(case):
    """Replaces most generated ids and revisions by existing ones, so that requests find the data of earlier requests.

    Only the sessions e and f are erased, and only messages of g are redacted, because other requests need the summaries of
    the others. Most imports create a session, because an import into an existing one is rejected.
    """
    path = case.path_parameters or {}
    if case.operation.definition.raw["operationId"] == "redact_message":
        if isinstance(seq := path.get("seq"), int) and seq % 3 and isinstance(path.get("session_id"), str):
            path["session_id"], path["seq"] = "g", seq % LINES_OF_A_SESSION + 1
        return
    if case.operation.definition.raw["operationId"] == "import_session" and (number := next(keys)) % 4:
        path["session_id"] = f"import-{number}"
        return
    for name in ("session_id", "user_id"):
        value = path.get(name)
        if isinstance(value, str) and value.isprintable() and "%" not in value and 0 < len(value) <= 60 and len(value) % 3:
            path[name] = "ef"[len(value) // 3 % 2] if case.method == "DELETE" else "abcdef"[len(value) // 3 % 6]
    revision = path.get("revision")
    # A revision of the stateful phase may be one that an earlier response named.
    is_linked = case.meta is not None and case.meta.phase.name == TestPhase.STATEFUL
    if isinstance(revision, int) and revision % 3 and not is_linked:
        path["revision"] = revision // 3 % 4


@schemathesis.hook
def after_call(context, case, response):
    answers[case.operation.definition.raw["operationId"]][response.status_code] += 1


answers = collections.defaultdict(collections.Counter)


@atexit.register
def report():
    """Writes the number of responses of each status and operation; the script requires a success of each operation."""
    with open(os.environ["SCHEMATHESIS_ANSWERS"], "w") as file:
        for operation, statuses in sorted(answers.items()):
            counts = " ".join(f"{status}:{count}" for status, count in sorted(statuses.items()))
            print(f"{operation:24} {counts}", file=file)

"""What Schemathesis can't know of itself: how to write JSON lines, and which sessions there are."""

import json

import schemathesis
from hypothesis import strategies as st

LINES = "application/x-ndjson"

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
def map_path_parameters(context, path_parameters):
    """Nearly all ids that are made up are of nobody: half of them become one of four, so that what one request writes
    the next one finds. What is no id stays none."""
    for name in ("session_id", "user_id"):
        value = (path_parameters or {}).get(name)
        if isinstance(value, str) and value.isprintable() and "%" not in value and 0 < len(value) <= 60 and len(value) % 2:
            path_parameters[name] = "abcd"[len(value) // 2 % 4]
    return path_parameters

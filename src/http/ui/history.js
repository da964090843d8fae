// The history of a session as a ribbon, with the messages in pages.

import { get, list, request } from "./api.js";
import { attempt, button, count, dialog, errorBox, field, h, number, replace } from "./dom.js";
import { messageItem, pendingCalls } from "./messages.js";
import { hitList, sessionLink, snippetNodes } from "./sessions.js";

const PAGE = 50;
/** Pending calls are looked for in this many of the newest messages: older ones are abandoned. */
const NEWEST = 200;
/** Redacted messages beyond this number are drawn in groups. */
const MOST_GROUPS = 20;

const KINDS = {
  summarised: "summarised",
  verbatim: "verbatim",
  omitted: "omitted",
  redacted: "redacted",
  pending: "pending tool call",
};

const REASONS = {
  max_history_messages: "more than consolidation.max_history_messages messages are not summarised",
  max_context_bytes: "the messages are larger than limits.max_context_bytes",
  on_failure: "consolidation failed and consolidation.on_failure is recent",
  max_tokens: "they do not fit into max_tokens",
};

/** Replaces a part of the ranges, which stay sorted and without gaps. */
function mark(ranges, range) {
  return ranges.flatMap((existing) => {
    if (range.to < existing.from || range.from > existing.to) return [existing];
    const parts = [];
    if (existing.from < range.from) parts.push({ ...existing, to: range.from - 1 });
    parts.push({ ...range, from: Math.max(range.from, existing.from), to: Math.min(range.to, existing.to) });
    if (existing.to > range.to) parts.push({ ...existing, from: range.to + 1 });
    return parts;
  });
}

/** Joins messages into ranges. Messages that are not further apart than `distance` share one. */
function group(seqs, distance) {
  const groups = [];
  for (const seq of seqs) {
    const last = groups.at(-1);
    if (last && seq - last.to <= distance) (last.to = seq), (last.messages += 1);
    else groups.push({ from: seq, to: seq, messages: 1 });
  }
  return groups;
}

/** Returns the ranges of a history. All messages of a range are of one kind. */
export function rangesOf({ cursor, last, omitted, redacted, pending }) {
  if (last === 0) return [];
  let ranges = [];
  if (cursor > 0) ranges.push({ kind: "summarised", from: 1, to: Math.min(cursor, last) });
  if (cursor < last) ranges.push({ kind: "verbatim", from: cursor + 1, to: last });
  for (const { from_seq: from, to_seq: to, reason } of omitted) {
    if (reason !== "redacted") ranges = mark(ranges, { kind: "omitted", from, to, reason });
  }
  for (const range of group(pending, 1)) ranges = mark(ranges, { kind: "pending", ...range });
  const groups = group(redacted, 1).length > MOST_GROUPS ? group(redacted, Math.ceil(last / MOST_GROUPS)) : group(redacted, 1);
  for (const range of groups) ranges = mark(ranges, { kind: "redacted", ...range });
  return ranges;
}

function describe({ kind, from, to, reason, messages }) {
  const range = from === to ? `Message ${number(from)}` : `Messages ${number(from)} to ${number(to)}`;
  const partly = messages !== undefined && messages < to - from + 1 ? `, ${number(messages)} of them` : "";
  return `${range}${partly}: ${KINDS[kind]}${reason ? `, because ${REASONS[reason] ?? reason}` : ""}`;
}

/** Returns the place of a message in the next context as a line. It is red if the agent does not see the message, or not all of it. */
function placeLine({ seq, part, reason, sent_tokens: sent, revision, sentences }) {
  const summary = sentences.length > 0 ? `in the summary: ${sentences.map((text) => `“${text}”`).join(" ")}` : "no sentence of the present summary comes from it";
  const text = {
    verbatim: "Verbatim",
    shortened: `Shortened to ${count(sent, "token")}`,
    summarised: `Summarised by revision ${number(revision)}; ${summary}`,
    omitted: `Omitted: ${REASONS[reason] ?? reason}`,
    redacted: "Redacted",
  }[part];
  return h("p", { class: part === "omitted" || part === "shortened" ? "place bad" : "place muted", "data-seq": seq }, text);
}

export async function historyTab({ panel, session, base, query, signal, reload }) {
  const ribbon = h("div", { class: "ribbon", role: "group", "aria-label": "Ranges of the history" });
  const legend = h("ul", { class: "legend" });
  const problem = h("div");
  const pageProblem = h("div");
  const position = h("p", { class: "muted", role: "status" });
  const items = h("ol", { class: "messages" });
  const target = h("input", { type: "number", min: "1", required: true, inputmode: "numeric" });
  const go = (event) => {
    event.preventDefault();
    open(Number(target.value), true);
  };
  const earlier = button("Earlier", () => open(first - PAGE, false), { "data-key": "earlier" });
  const later = button("Later", () => open(first + PAGE, false), { "data-key": "later" });
  const newest = button("Newest", () => open(null, false), { "data-key": "newest" });
  const words = h("input", { type: "search", required: true });
  const search = h("button", { type: "submit" }, "Find");
  const found = h("div", { "aria-live": "polite" });
  const places = new Map();
  panel.replaceChildren(ribbon, legend, problem,
    h("form", { class: "bar", role: "search", onsubmit: find }, field("Where is …?", words), search), found,
    h("form", { class: "bar", onsubmit: go }, field("Message", target), h("button", { type: "submit" }, "Show"), earlier, later, newest),
    position, pageProblem, items);

  /** The session as it is drawn. The lists follow later, so that the ribbon appears at once. */
  const shown = { cursor: session.cursor, last: session.last_seq, omitted: [], redacted: [], pending: [] };
  /** The first message of the page, and true if the page follows new messages. */
  let first = 1;
  let follows = false;
  let pages = 0;

  function draw() {
    const ranges = rangesOf(shown);
    const share = ({ from, to }) => ((to - from + 1) / shown.last) * 100;
    const rangeButton = (range) =>
      h("button", {
        type: "button", class: `range ${range.kind}`, "data-key": `${range.kind}-${range.from}`, "aria-label": describe(range), title: describe(range),
        "aria-current": first >= range.from && first <= range.to && "true", style: { "flex-grow": `${share(range)}` },
        onclick: (event) => {
          // A click of the keyboard has no position.
          const part = event.detail === 0 ? 0 : event.offsetX / event.currentTarget.offsetWidth;
          open(range.from + Math.floor(Math.max(0, Math.min(part, 0.999)) * (range.to - range.from + 1)), true);
        },
      });
    replace(ribbon, ranges.length > 0 ? ranges.map(rangeButton) : h("p", null, "The session has no messages."));
    const total = (kind) =>
      ranges.filter((range) => range.kind === kind).reduce((sum, { from, to, messages }) => sum + (messages ?? to - from + 1), 0);
    const totals = Object.keys(KINDS).map((kind) => [kind, total(kind)]).filter(([, messages]) => messages > 0);
    replace(legend, totals.map(([kind, messages]) => h("li", null, h("span", { class: `swatch ${kind}` }), `${KINDS[kind]}: ${number(messages)}`)));
    target.max = shown.last;
  }

  /** Shows the page that begins with a message, or the newest page. */
  async function open(seq, moves) {
    const page = (pages += 1);
    follows = seq === null || seq + PAGE > shown.last;
    first = Math.max(1, seq === null ? shown.last - PAGE + 1 : Math.min(seq, shown.last));
    try {
      const { items: messages } = await get(`${base}/messages`, { after_seq: first - 1, limit: PAGE }, signal);
      if (page !== pages) return;
      const pending = new Set(shown.pending);
      replace(items, messages.map((message) =>
        messageItem(message, [pending.has(message.seq) && "pending tool call"], [whereButton(message), " ", redactButton(message)], placeFor(message.seq))));
      const last = messages.at(-1)?.seq ?? 0;
      position.textContent = messages.length > 0 ? `Messages ${number(first)} to ${number(last)} of ${number(shown.last)}` : "";
      earlier.disabled = first <= 1;
      later.disabled = last >= shown.last;
      draw();
      replace(pageProblem);
      if (moves) {
        const link = location.hash.split("?")[0];
        history.replaceState(null, "", `${link}?seq=${first}`);
        document.getElementById(`message-${first}`)?.focus();
      }
    } catch (error) {
      if (!signal.aborted) replace(pageProblem, errorBox(error));
    }
  }

  /** Returns the line with the place of a message, or the error. */
  const placeOf = (seq) => get(`${base}/messages/${seq}/placement`, {}, signal).then(placeLine, errorBox);

  /** Returns the element for the line of a message. It survives when the page is drawn again. */
  const placeFor = (seq) => places.get(seq) ?? places.set(seq, h("div", { "aria-live": "polite" })).get(seq);

  function whereButton({ seq }) {
    const show = async () => replace(placeFor(seq), await placeOf(seq));
    return button("Where?", show, { "aria-label": `Where is message ${seq}?`, class: "small", "data-key": `where-${seq}` });
  }

  /** Shows the messages with these words, and their places. */
  async function find(event) {
    event.preventDefault();
    const id = session.session_id;
    await attempt(search, found, async () => {
      const results = await get("/search", { q: words.value, session_id: id, limit: 5, neighbours: 0 }, signal);
      const lines = await Promise.all(results.items.map(({ seq }) => placeOf(seq)));
      const hit = ({ seq, message, snippet }, index) =>
        h("li", null, h("a", { href: sessionLink(id, "history", `?seq=${seq}`), onclick: openHit(seq) }, `Message ${number(seq)}`),
          h("span", { class: "muted" }, ` ${message?.role ?? ""}`), lines[index], h("p", { class: "text" }, snippetNodes(snippet)));
      replace(found, hitList(results, hit, "Nothing in this session contains these words."));
    });
  }

  /** Opens a hit without leaving the hits, unless it is opened in a new tab. */
  const openHit = (seq) => (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    open(seq, true);
  };

  function redactButton({ seq, redacted_at: redactedAt }) {
    if (redactedAt) return null;
    const redact = async () => {
      const content = h("p", null, "Its content is removed permanently, from copies in forks, from the search index and from every summary ",
        "that covers it. These revisions lose their texts, and the messages after the last remaining summary are summarised again.");
      const run = () => request("DELETE", `${base}/messages/${seq}`);
      if (!(await dialog({ title: `Redact message ${number(seq)}`, content, action: "Redact", danger: true, run }))) return;
      await loadDetails();
      await open(first, false);
      await reload();
      document.getElementById(`message-${seq}`)?.focus();
    };
    return button("Redact…", redact, { "aria-label": `Redact message ${seq}…`, class: "small" });
  }

  /** Loads what the state of the session does not tell: omitted ranges, redactions and pending calls. */
  async function loadDetails() {
    const problems = [];
    let isCoverageUnknown = false;
    const part = async (name, load) => {
      try {
        shown[name] = await load();
      } catch (error) {
        if (signal.aborted) throw error;
        // Only keys with the scope write may build contexts.
        if (name === "omitted" && error.status === 403) isCoverageUnknown = true;
        else problems.push(error);
      }
    };
    await Promise.all([
      part("omitted", async () => {
        const context = await request("POST", `${base}/context`, { body: { mode: "off" }, signal });
        return context.coverage.omitted;
      }),
      part("redacted", async () => {
        const { items: redactions } = await list(`${base}/redactions`, { most: 10_000, signal });
        return redactions.map(({ seq }) => seq);
      }),
      part("pending", async () => {
        const { items: messages } = await get(`${base}/messages`, { order: "desc", limit: NEWEST }, signal);
        return pendingCalls(messages.reverse());
      }),
    ]);
    draw();
    replace(problem, problems.map(errorBox), isCoverageUnknown && h("p", { class: "muted" },
      "Omitted messages are drawn as verbatim: a key with the scope write is needed to see them."));
  }

  draw();
  const asked = Number(query.get("seq"));
  await loadDetails();
  await open(asked >= 1 && asked <= shown.last ? asked : null, asked >= 1);

  return {
    async update(next) {
      const isAtEnd = follows;
      [shown.cursor, shown.last] = [next.cursor, next.last_seq];
      await loadDetails();
      if (isAtEnd) await open(shown.last - first < PAGE ? first : null, false);
      for (const line of panel.querySelectorAll(".place")) line.replaceWith(await placeOf(line.dataset.seq));
    },
  };
}

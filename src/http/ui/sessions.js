// The list of sessions, with search in their messages.

import { get, path, poll } from "./api.js";
import { announce, attempt, button, bytes, count, errorBox, field, h, number, replace, table, time } from "./dom.js";

const PAGE = 50;

/** Returns the fragment of the page of a session. */
export const sessionLink = (id, tab = "history", query = "") => `#/sessions/${encodeURIComponent(id)}/${tab}${query}`;

const COLUMNS = [
  { name: "Session" },
  { name: "Messages", class: "number" },
  { name: "Tail", class: "number" },
  { name: "Summary", class: "number wide" },
  { name: "Tokens", class: "number wide" },
  { name: "Size", class: "number" },
  { name: "Last activity", class: "wide" },
];

export async function sessionsView({ main, query, signal }) {
  const text = h("input", { type: "search", name: "q", value: query.get("q") ?? "" });
  const user = h("input", { type: "text", name: "user", value: query.get("user") ?? "", autocomplete: "off" });
  const submit = (event) => {
    event.preventDefault();
    const parameters = new URLSearchParams();
    if (text.value.trim()) parameters.set("q", text.value.trim());
    if (user.value.trim()) parameters.set("user", user.value.trim());
    location.hash = `#/sessions?${parameters}`;
  };
  const form = h("form", { class: "bar", role: "search", onsubmit: submit },
    field("Session id or words of a message", text), field("User", user), h("button", { type: "submit" }, "Search"));
  const usage = h("p", { class: "muted" });
  const hits = h("section");
  const sessions = h("section");
  main.replaceChildren(h("h1", { tabindex: "-1" }, "Sessions"), form, usage, hits, sessions);
  const filter = { text: text.value.trim(), user: user.value.trim() };
  const list = sessionList(sessions, filter, signal);
  await Promise.all([
    list.load(),
    filter.text && showHits(hits, filter, signal),
    get("/usage", {}, signal).then(({ stored_bytes: size }) => (usage.textContent = `Messages of all sessions: ${bytes(size)}.`)),
  ]);
  poll(list.refresh, signal);
}

/** Shows the sessions, the most recently active first, and keeps the list current. */
function sessionList(section, { text, user }, signal) {
  let pages = 1;
  let shown = "";
  /** Undefined until it is known if the text is the id of a session. */
  let isExactId = text === "" ? false : undefined;
  const more = button("More sessions", () => attempt(more, problem, async () => ((pages += 1), await load())));
  const problem = h("div");

  async function load() {
    const items = [];
    let cursor;
    for (let page = 0; page < pages && cursor !== null; page += 1) {
      const part = await get("/sessions", { user_id: user, limit: PAGE, cursor }, signal);
      items.push(...part.items);
      cursor = part.next;
    }
    const matching = items.filter((session) => session.session_id.toLowerCase().includes(text.toLowerCase()));
    if (isExactId !== false && !matching.some((session) => session.session_id === text)) {
      const exact = await get(path("sessions", text), {}, signal).catch(ignoreMissing);
      isExactId = exact !== null && (!user || exact.user_id === user);
      if (isExactId) matching.unshift(exact);
    }
    draw(matching, items.length, cursor !== null);
  }

  function draw(items, loaded, hasMore) {
    const state = JSON.stringify([items, loaded, hasMore]);
    if (state === shown) return;
    const isUpdate = shown !== "";
    shown = state;
    const title = text ? `Sessions with this id (of the ${count(loaded, "session")} loaded)` : "Most recently active";
    const empty = text ? "No id of a loaded session contains this text." : "There are no sessions. The first exchange creates one.";
    replace(section, h("h2", null, title), items.length > 0 ? table(title, COLUMNS, items.map(row)) : h("p", null, empty),
      h("div", { class: "actions" }, hasMore && more), problem);
    if (isUpdate) announce("The list was updated.");
  }

  async function refresh() {
    try {
      await load();
      replace(problem);
    } catch (error) {
      if (!signal.aborted) replace(problem, errorBox(error));
    }
  }
  return { load, refresh };
}

function row(session) {
  const { state, failures } = session.consolidation;
  const badge = state === "running" ? "consolidating" : failures > 0 ? count(failures, "failure") : null;
  return [
    [h("a", { href: sessionLink(session.session_id), "data-key": session.session_id }, session.session_id),
      session.user_id !== null && h("small", null, ` ${session.user_id}`),
      badge && h("span", { class: failures > 0 ? "badge bad" : "badge" }, badge)],
    number(session.message_count),
    number(session.tail_messages),
    session.summary.revision > 0 ? count(session.summary.words, "word") : "–",
    number(session.tokens.history),
    bytes(session.stored_bytes),
    time(session.updated_at),
  ];
}

function ignoreMissing(error) {
  if (error.status === 404 || error.status === 422) return null;
  throw error;
}

async function showHits(section, { text, user }, signal) {
  const query = { q: text, user_id: user, limit: 20, neighbours: 0 };
  try {
    const results = await get("/search", query, signal);
    const hit = ({ session_id: id, seq, created_at: at, message, snippet }) =>
      h("li", null, h("a", { href: sessionLink(id, "history", `?seq=${seq}`) }, `${id}, message ${number(seq)}`),
        h("span", { class: "muted" }, message ? ` ${message.role} · ` : " ", time(at)), h("p", { class: "text" }, snippetNodes(snippet)));
    replace(section, h("h2", null, `Messages (${number(results.items.length)})`), hitList(results, hit, "No message matches."));
  } catch (error) {
    if (signal.aborted) throw error;
    replace(section, h("h2", null, "Messages"), errorBox(error));
  }
}

/** Returns the hits of a search as a list, or the text `none`. */
export const hitList = ({ items }, hit, none) =>
  items.length > 0 ? h("ul", { class: "hits" }, items.map(hit)) : h("p", null, none);

const ENTITIES = { "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&#x27;": "'", "&amp;": "&" };

/** Returns the nodes of a snippet, which the service sends as escaped text with `<mark>`. */
export function snippetNodes(snippet) {
  const plain = (escaped) => escaped.replace(/&(?:lt|gt|quot|#39|#x27|amp);/g, (entity) => ENTITIES[entity]);
  return snippet.split(/<mark>(.*?)<\/mark>/s).map((part, index) => (index % 2 === 1 ? h("mark", null, plain(part)) : plain(part)));
}

// The memory document of a user, with its versions.

import { get, list, path, poll, request } from "./api.js";
import { sideBySide } from "./diff.js";
import { announce, button, count, dialog, errorBox, facts, field, h, number, replace, table, time } from "./dom.js";
import { textBlock } from "./messages.js";

/** The most versions, or users, that are loaded. */
const MOST = 200;

/** Returns the fragment of the page of a user. */
export const memoryLink = (user) => `#/users/${encodeURIComponent(user)}`;

/** Lists the users with a document, and asks for another one. */
export async function usersView({ main, signal }) {
  const user = h("input", { type: "text", required: true, autocomplete: "off" });
  const users = h("section");
  const submit = (event) => {
    event.preventDefault();
    location.hash = memoryLink(user.value);
  };
  main.replaceChildren(h("h1", { tabindex: "-1" }, "Memory"),
    h("p", null, "The memory document of a user is part of the contexts of all sessions of this user."),
    h("form", { class: "bar", onsubmit: submit }, field("User", user), h("button", { type: "submit" }, "Show")), users);
  const { items, complete } = await list("/users", { most: MOST, signal });
  const row = (item) => [h("a", { href: memoryLink(item.user_id) }, item.user_id), number(item.version), number(item.words), number(item.tokens), time(item.updated_at)];
  replace(users, h("h2", null, "Users with a document"),
    items.length > 0 ? table("Users with a document", USER_COLUMNS, items.map(row)) : h("p", null, "No user has a document yet."),
    !complete && h("p", { class: "muted" }, `Only the first ${number(MOST)} users are shown.`));
}

const USER_COLUMNS = [
  { name: "User" },
  { name: "Version", class: "number" },
  { name: "Words", class: "number" },
  { name: "Tokens", class: "number" },
  { name: "Written" },
];

const COLUMNS = [
  { name: "Version" },
  { name: "Words", class: "number" },
  { name: "Tokens", class: "number" },
  { name: "Author" },
  { name: "Written" },
  { name: "Action" },
];

/** The ways in which a version is written. */
const AUTHORS = { http: "HTTP request", tool: "memory tool", mcp: "memory tool over MCP" };

const authorOf = ({ author }) => AUTHORS[author] ?? "unknown";

const NONE = { version: 0, content: "", words: 0, tokens: 0, updated_at: null };

export async function memoryView({ main, segments, signal }) {
  const user = segments[1];
  const base = path("users", user);
  const document = h("section");
  const problem = h("div");
  const all = h("section");
  const before = h("select", { onchange: () => showDifferences() });
  const after = h("select", { onchange: () => showDifferences() });
  const differences = h("div");
  const edit = button("Edit…", editDocument);
  const erase = button("Erase user…", eraseUser, { class: "danger" });
  const sessions = `#/sessions?${new URLSearchParams({ user })}`;
  main.replaceChildren(h("h1", { tabindex: "-1" }, `Memory of ${user}`),
    h("p", null, h("a", { href: sessions }, "Sessions of this user")), document,
    h("div", { class: "actions" }, edit, erase), problem, all,
    h("h2", null, "Compare"), h("div", { class: "bar" }, field("Before", before), field("After", after)), differences);
  /** Newest first. */
  let versions = [];
  let retention;

  const find = (number) => versions.find(({ version }) => version === Number(number)) ?? NONE;
  const newest = () => versions[0] ?? NONE;

  async function load() {
    const { items, complete } = await list(`${base}/memory/revisions`, { most: MOST, signal });
    versions = items;
    const { version, content, words, tokens } = newest();
    replace(document, h("h2", null, "Document"),
      facts([
        ["Version", number(version)],
        ["Size", `${count(words, "word")}, ${count(tokens, "token")}`],
        ["Written", [time(newest().updated_at), version > 0 && `, ${authorOf(newest())}`]],
        ["Sessions are erased", retention.effective.after_last_exchange === "never" ? "never"
          : `${retention.effective.after_last_exchange} after the last exchange`],
      ]),
      content ? textBlock(content) : h("p", null, "The document is empty."));
    const row = (item) => [number(item.version), number(item.words), number(item.tokens), authorOf(item), time(item.updated_at), restoreButton(item)];
    replace(all, h("h2", null, "Versions"),
      versions.length > 0 ? table("Versions", COLUMNS, versions.map(row)) : h("p", null, "The document was never written."),
      !complete && h("p", { class: "muted" }, `Only the newest ${number(MOST)} versions are shown.`));
    const option = ({ version: value }) => h("option", { value: `${value}` }, `${value}`);
    before.replaceChildren(...[...versions, NONE].map(option));
    after.replaceChildren(...[...versions, NONE].map(option));
    before.value = `${find(version - 1).version}`;
    after.value = `${version}`;
    showDifferences();
  }

  function showDifferences() {
    const [old, young] = [find(before.value), find(after.value)];
    const title = ({ version }) => `Version ${version}`;
    replace(differences, facts([["Tokens", `${number(old.tokens)} → ${number(young.tokens)}`], ["Words", `${number(old.words)} → ${number(young.words)}`]]),
      sideBySide(3, [title(old), old.content], [title(young), young.content]));
  }

  /** Replaces the version that is shown. A newer one that another writer has stored meanwhile is an error. */
  const write = (content) => request("PUT", `${base}/memory`, { body: { content }, headers: { "if-match": `"${newest().version}"` } });

  function restoreButton({ version, content }) {
    if (version === newest().version) return h("span", { class: "muted" }, "current");
    const restore = async () => {
      const text = h("p", null, `The text of version ${version} becomes a new version. No version is lost.`);
      if (!(await dialog({ title: `Restore version ${version}`, content: text, action: "Restore", run: () => write(content) }))) return;
      announce(`Version ${version} was restored.`);
      await load();
    };
    return button("Restore…", restore, { class: "small", "aria-label": `Restore version ${version}…` });
  }

  async function editDocument() {
    const text = h("textarea", { rows: "16" }, newest().content);
    const run = () => write(text.value);
    if (await dialog({ title: "Edit the document", content: field("Markdown", text), action: "Save", run })) await load();
  }

  async function eraseUser() {
    const content = h("p", null, "The memory document with all versions and all sessions of this user are removed permanently.");
    const run = () => request("DELETE", base);
    if (await dialog({ title: "Erase user", content, action: "Erase", danger: true, match: user, run })) location.hash = "#/sessions";
  }

  retention = await get(`${base}/retention`, {}, signal);
  await load();
  poll(async () => {
    try {
      const { version } = await get(`${base}/memory`, {}, signal);
      if (version !== newest().version) (await load(), announce("There is a new version."));
      replace(problem);
    } catch (error) {
      if (!signal.aborted) replace(problem, errorBox(error));
    }
  }, signal);
}

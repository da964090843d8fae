// The frame of the inspector: routes in the fragment of the URL, the navigation, and the API key.
//
// A view is a function that fills `main` and stops when its signal is aborted. To add one, import it and add its route.

import { storedKey, storeKey } from "./api.js";
import { announce, button, dialog, errorBox, field, h } from "./dom.js";
import { memoryView, usersView } from "./memory.js";
import { modelsView } from "./models.js";
import { sessionView } from "./session.js";
import { sessionsView } from "./sessions.js";

const main = document.getElementById("main");
const keyButton = document.getElementById("key");

/** The views by the first segment: of the list, and of one item such as `#/sessions/ID`. */
const ROUTES = {
  sessions: [sessionsView, sessionView],
  users: [usersView, memoryView],
  models: [modelsView, null],
};

let current = new AbortController();

/** Splits `#/sessions/a%2Fb/history?seq=3` into its decoded segments and parameters. */
function parseFragment() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const segments = path.split("/").filter(Boolean).map(decodeURIComponent);
  return { segments: segments.length > 0 ? segments : ["sessions"], query: new URLSearchParams(query) };
}

async function show(isNavigation) {
  if (location.hash === "#main") return;
  current.abort();
  current = new AbortController();
  const { signal } = current;
  let route;
  try {
    route = parseFragment();
  } catch {
    route = { segments: [""], query: new URLSearchParams() };
  }
  for (const link of document.querySelectorAll("header nav a")) {
    const isCurrent = link.hash === `#/${route.segments[0]}`;
    if (isCurrent) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const view = ROUTES[route.segments[0]]?.[route.segments.length > 1 ? 1 : 0] ?? notFound;
  announce("");
  try {
    await view({ main, signal, ...route });
  } catch (error) {
    if (signal.aborted) return;
    const again = button("Try again", () => show(true));
    main.replaceChildren(h("h1", { tabindex: "-1" }, "Error"), errorBox(error), h("div", { class: "actions" }, again));
  }
  if (signal.aborted) return;
  const heading = main.querySelector("h1");
  document.title = `${heading?.textContent ?? "Inspector"} · precis`;
  const focused = document.activeElement;
  // A view that shows a certain message has moved the focus already.
  if (isNavigation && (focused === main || !main.contains(focused))) heading?.focus({ preventScroll: true });
}

function notFound() {
  main.replaceChildren(h("h1", { tabindex: "-1" }, "Not found"), h("p", null, "The inspector has no such page. ",
    h("a", { href: "#/sessions" }, "Show the sessions"), "."));
}

function showKeyState() {
  keyButton.textContent = storedKey() ? "API key set" : "API key";
}

let isAsking = false;
/** The dialog was cancelled: requests that repeat by themselves do not open it again. */
let isDeclined = false;

async function askForKey() {
  if (isAsking) return;
  isAsking = true;
  const input = h("input", { type: "password", autocomplete: "off", spellcheck: "false", value: storedKey() ?? "" });
  const content = [
    h("p", null, "This tab sends the key with each request and forgets it when it is closed. Leave the field empty to remove the key."),
    field("API key", input),
  ];
  const changed = await dialog({ title: "Enter an API key", content, action: "Use this key", run: async () => storeKey(input.value.trim()) });
  isAsking = false;
  isDeclined = !changed;
  showKeyState();
  if (changed) show(true);
}

keyButton.addEventListener("click", askForKey);
window.addEventListener("key-required", () => isDeclined || askForKey());
window.addEventListener("hashchange", () => {
  isDeclined = false;
  show(true);
});
showKeyState();
show(false);

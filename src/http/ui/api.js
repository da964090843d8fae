// Calls of the HTTP API. The API key stays in the tab: it is kept in sessionStorage and sent as a header only.

const STORED_KEY = "precis-api-key";
const POLL_MILLISECONDS = 3000;

export const storedKey = () => sessionStorage.getItem(STORED_KEY);

export function storeKey(key) {
  if (key) sessionStorage.setItem(STORED_KEY, key);
  else sessionStorage.removeItem(STORED_KEY);
}

/** An error response of the service, or a connection that failed. */
export class ApiError extends Error {
  constructor(status, problem) {
    super(problem.detail);
    this.status = status;
    this.problem = problem;
    this.title = problem.title;
  }
}

/** Returns the path of a resource. The segments are encoded, so that an id may contain any character. */
export const path = (...segments) => `/${segments.map(encodeURIComponent).join("/")}`;

/** Returns the absolute URL of a path. It is relative to this page, so that a proxy may add a prefix. */
export function urlOf(path, query = {}) {
  const url = new URL(`..${path}`, document.baseURI.split("#")[0]);
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== null && value !== "") url.searchParams.set(name, value);
  }
  return url;
}

/** Sends a request and returns the JSON of the response. */
export async function request(method, path, { query, body, headers, signal } = {}) {
  const key = storedKey();
  const options = { method, signal, cache: "no-store", credentials: "omit", headers: { accept: "application/json", ...headers } };
  if (key) options.headers.authorization = `Bearer ${key}`;
  if (body !== undefined) {
    options.headers["content-type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(urlOf(path, query), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { title: "No connection", detail: "The service does not respond. Check that it is running." });
  }
  const text = await response.text();
  if (response.ok) return text === "" ? null : JSON.parse(text);
  if (response.status === 401) window.dispatchEvent(new Event("key-required"));
  throw new ApiError(response.status, problemOf(response, text));
}

function problemOf(response, text) {
  try {
    const problem = JSON.parse(text);
    if (typeof problem?.detail === "string") return problem;
  } catch {
    // A proxy in front of the service responds with a page of its own.
  }
  return { title: `Status ${response.status}`, detail: `The response has the status ${response.status} and no explanation.` };
}

export const get = (path, query, signal) => request("GET", path, { query, signal });

/** Returns the items of a list, page by page up to `most` items. `complete` is false if there are more. */
export async function list(path, { query, most, signal }) {
  const items = [];
  let cursor;
  do {
    const limit = Math.min(1000, most - items.length);
    const page = await get(path, { ...query, limit, cursor }, signal);
    items.push(...page.items);
    cursor = page.next;
  } while (cursor && items.length < most);
  return { items, complete: !cursor };
}

/** Repeats a task until the signal is aborted, but not while the tab is hidden. */
export function poll(task, signal) {
  let timer;
  let running = false;
  const run = async () => {
    clearTimeout(timer);
    if (document.hidden || running || signal.aborted) return;
    running = true;
    await task();
    running = false;
    if (!signal.aborted) timer = setTimeout(run, POLL_MILLISECONDS);
  };
  timer = setTimeout(run, POLL_MILLISECONDS);
  document.addEventListener("visibilitychange", run, { signal });
  signal.addEventListener("abort", () => clearTimeout(timer));
}

// Access: API keys, and every view for people with a phone, in dark, with a keyboard or a screen reader.

import assert from "node:assert/strict";
import { DESKTOP, NARROW, PHONE, Tab } from "./browser.mjs";
import { conversation, HOSTILE } from "./service.mjs";

async function usesAKey({ browser, keyed }) {
  await keyed.append("private", conversation(1, 2));
  const tab = await Tab.open(browser, keyed.url, { expected: ["status of 401"] });
  await tab.goto("/sessions/private");
  // The files need no key, the data does.
  await tab.page.getByRole("dialog", { name: "Enter an API key" }).waitFor();
  await tab.fill("API key", `${keyed.key.slice(0, -1)}x`);
  await tab.click("Use this key");
  await tab.page.getByRole("dialog", { name: "Enter an API key" }).waitFor();
  await tab.fill("API key", keyed.key);
  await tab.page.keyboard.press("Enter");
  await tab.heading("private");
  await tab.see("Answer 2");
  await tab.click("Sessions", "link");
  await tab.page.getByRole("link", { name: "private", exact: true }).waitFor();
  // The key is in this tab only, and survives a reload.
  const places = await tab.page.evaluate(() => [location.href, document.cookie, JSON.stringify(localStorage), JSON.stringify(sessionStorage)]);
  assert.deepEqual(places.map((place) => place.includes("precis_")), [false, false, false, true]);
  await tab.page.reload();
  await tab.page.getByRole("link", { name: "private", exact: true }).waitFor();
  const second = await tab.context.newPage();
  await second.goto(`${keyed.url}/ui/#/sessions`);
  await second.getByRole("dialog", { name: "Enter an API key" }).waitFor();
  // Commands do not contain the key.
  await tab.goto("/sessions/private/context");
  await tab.click("Copy as curl");
  await tab.until(() => document.getElementById("status").textContent === "Copied.");
  const command = await tab.page.evaluate(() => navigator.clipboard.readText());
  assert.ok(command.includes("$PRECIS_API_KEY") && !command.includes(keyed.key), command);
  await tab.close();
}

async function readsWithAKeyForReading({ browser, keyed }) {
  await keyed.append("read only", conversation(1, 60));
  const tab = await Tab.open(browser, keyed.url, { expected: ["status of 401", "status of 403"] });
  await tab.goto("/sessions/read%20only");
  await tab.fill("API key", process.env.PRECIS_READ_KEY);
  await tab.click("Use this key");
  await tab.see("Answer 60");
  await tab.see("a key with the scope write is needed to see them");
  await tab.click("Consolidate now");
  await tab.page.getByRole("alert").filter({ hasText: "write" }).waitFor();
  await tab.goto("/models");
  await tab.page.getByRole("alert").filter({ hasText: "admin" }).waitFor();
  await tab.close();
}

async function worksByKeyboard({ browser, service }) {
  await service.append("typed", conversation(1, 2));
  const tab = await Tab.open(browser, service.url, { expected: ["status of 404"] });
  await tab.goto("/sessions");
  await tab.heading("Most recently active", 2);
  const press = (...keys) => keys.reduce((before, key) => before.then(() => tab.page.keyboard.press(key)), Promise.resolve());
  const focused = () => tab.page.evaluate(() => document.activeElement.textContent || document.activeElement.name);
  await press("Tab");
  assert.equal(await focused(), "Skip to content");
  await press("Enter", "Tab");
  assert.equal(await focused(), "q");
  await tab.page.keyboard.type("typed");
  await press("Enter");
  // The heading has the focus after a navigation; the form, the table and its links follow.
  await tab.until(() => document.activeElement?.tagName === "H1");
  for (let steps = 0; (await focused()) !== "typed"; steps += 1) {
    assert.ok(steps < 12, "the link of the session is not reached");
    await press("Tab");
  }
  await press("Enter");
  await tab.heading("typed");
  await tab.until(() => document.activeElement?.tagName === "H1");
  // Dialogs keep the focus, and Escape closes them.
  await tab.page.getByRole("button", { name: "Erase session…" }).focus();
  await press("Enter");
  await tab.page.getByRole("dialog").waitFor();
  assert.ok(await tab.page.evaluate(() => document.querySelector("dialog").contains(document.activeElement)));
  await press("Escape");
  await tab.page.getByRole("dialog").waitFor({ state: "detached" });
  assert.equal(await focused(), "Erase session…");
  await tab.close();
}

const hostile = encodeURIComponent(HOSTILE.id);

/** The views with a heading that appears when they are complete. */
const VIEWS = [
  ["/sessions", "Most recently active", 2],
  ["/sessions?q=harbour", "Messages (20)", 2],
  ["/sessions/large/history", /Messages 4,951 to 5,000/],
  ["/sessions/large/context", "Response", 3],
  [`/sessions/${hostile}/history`, /Messages 1 to 48/],
  [`/sessions/${hostile}/context`, "Response", 3],
  ["/sessions/large/timeline", "6"],
  ["/sessions/large/summary", "Compare", 3],
  [`/sessions/${hostile}/summary`, "Compare", 3],
  ["/sessions/large/next", "Prompt", 3],
  ["/models", "Pools", 2],
  ["/users", "Memory", 1],
  ["/users/ada", "Compare", 2],
  [`/users/${encodeURIComponent(HOSTILE.user)}`, "Compare", 2],
  ["/nothing", "Not found", 1],
];

async function everyViewIsAccessible({ browser, service }) {
  for (const [viewport, colorScheme] of [[DESKTOP, "light"], [DESKTOP, "dark"], [PHONE, "light"], [PHONE, "dark"]]) {
    const tab = await Tab.open(browser, service.url, { viewport, colorScheme, expected: ["status of 404"] });
    for (const [route, ready, level] of VIEWS) {
      await tab.goto(route);
      await (level ? tab.heading(ready, level) : tab.see(ready));
      await tab.checkAccessibility(`${route} ${viewport.width} px ${colorScheme}`);
    }
    await tab.goto("/sessions/large");
    await tab.click("Erase session…");
    await tab.checkAccessibility(`dialog ${viewport.width} px ${colorScheme}`);
    await tab.close();
  }
}

async function everyViewFitsASmallPhone({ browser, service }) {
  const tab = await Tab.open(browser, service.url, { viewport: NARROW, expected: ["status of 404"] });
  for (const [route, ready, level] of VIEWS) {
    await tab.goto(route);
    await (level ? tab.heading(ready, level) : tab.see(ready));
    const overflow = await tab.page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
    assert.ok(overflow <= 0, `${route} scrolls ${overflow} px sideways`);
  }
  await tab.close();
}

export const tasks = [
  ["use an API key", usesAKey],
  ["read with a key of the scope read", readsWithAKeyForReading],
  ["work by keyboard", worksByKeyboard],
  ["every view is accessible", everyViewIsAccessible],
  ["every view fits a small phone", everyViewFitsASmallPhone],
];

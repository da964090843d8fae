// Tasks with the list of sessions.

import assert from "node:assert/strict";
import { Tab } from "./browser.mjs";
import { conversation, HOSTILE } from "./service.mjs";

/** The page asks for sessions that do not exist. */
const MISSING = { expected: ["status of 404"] };

async function findsSessionByItsId({ browser, service }) {
  const tab = await Tab.open(browser, service.url, MISSING);
  await tab.page.goto(`${tab.url}/ui`);
  await tab.heading("Sessions");
  assert.equal(tab.page.url(), `${tab.url}/ui/`);
  await tab.fill("Session id or words of a message", "larg");
  await tab.page.keyboard.press("Enter");
  const row = tab.page.getByRole("row", { name: /large/ });
  await row.waitFor();
  assert.match(await row.innerText(), /5,000/);
  await tab.click("large", "link");
  await tab.heading("large");
  // The view can be linked, and the browser's history works.
  assert.equal(new URL(tab.page.url()).hash, "#/sessions/large/history");
  await tab.page.goBack();
  await tab.heading("Sessions");
  await tab.close();
}

async function findsMessageByItsWords({ browser, service }) {
  const tab = await Tab.open(browser, service.url, MISSING);
  await tab.goto("/sessions");
  await tab.fill("Session id or words of a message", `"the harbour opens on day 1000" ada`);
  await tab.click("Search");
  const hits = tab.page.getByRole("region").or(tab.page.getByRole("list")).filter({ hasText: "message 1,000" });
  await hits.first().waitFor();
  await tab.click("large, message 1,000", "link");
  await tab.heading("large");
  // The message has the focus, so that a screen reader continues there.
  await tab.until(() => document.activeElement?.id === "message-1000");
  assert.match(await tab.page.locator(":focus").innerText(), /the harbour opens on day 1000/);
  await tab.close();
}

async function seesNewActivityWithoutReloading({ browser, service }) {
  const tab = await Tab.open(browser, service.url);
  await tab.goto("/sessions");
  await tab.heading("Most recently active", 2);
  await service.append("fresh", conversation(1, 2), { user_id: "ada" });
  await tab.page.getByRole("link", { name: "fresh", exact: true }).waitFor();
  await tab.click("fresh", "link");
  await tab.see("Messages 1 to 2 of 2");
  await service.append("fresh", conversation(3, 2));
  await tab.see("Messages 1 to 4 of 4");
  await tab.see("Answer 4: the garden opens on day 4.");
  await tab.close();
}

async function showsSessionsOfAUser({ browser, service }) {
  const tab = await Tab.open(browser, service.url);
  await tab.goto("/sessions");
  await tab.heading("Most recently active", 2);
  await tab.fill("User", HOSTILE.user);
  await tab.click("Search");
  await tab.page.getByRole("link", { name: HOSTILE.id, exact: true }).waitFor();
  await tab.until(() => document.querySelectorAll("tbody tr").length === 1);
  await tab.close();
}

async function showsErrorsOfTheService({ browser, service }) {
  const tab = await Tab.open(browser, service.url, MISSING);
  await tab.goto("/sessions/unknown-session");
  await tab.heading("Error");
  const detail = await tab.page.getByRole("alert").innerText();
  assert.match(detail, /unknown-session|session/);
  await service.append("unknown-session", conversation(1, 2));
  await tab.click("Try again");
  await tab.heading("unknown-session");
  await tab.close();
}

export const tasks = [
  ["find a session by its id", findsSessionByItsId],
  ["find a message by its words", findsMessageByItsWords],
  ["see new activity without reloading", seesNewActivityWithoutReloading],
  ["show the sessions of a user", showsSessionsOfAUser],
  ["show errors of the service", showsErrorsOfTheService],
];

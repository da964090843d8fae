// Tasks with the memory document of a user.

import assert from "node:assert/strict";
import { Tab } from "./browser.mjs";
import { conversation, HOSTILE } from "./service.mjs";

const write = (service, user, content) => service.put(`/users/${encodeURIComponent(user)}/memory`, { content });

async function comparesAndRestoresVersions({ browser, service }) {
  await write(service, "grace", "# Grace\n\n- Likes tea.\n");
  await write(service, "grace", "# Grace\n\n- Likes coffee.\n");
  const tab = await Tab.open(browser, service.url);
  await tab.goto("/users");
  await tab.heading("Memory");
  await tab.fill("User", "grace");
  await tab.page.keyboard.press("Enter");
  await tab.heading("Memory of grace");
  const column = (name) => tab.page.getByRole("group", { name, exact: true });
  assert.equal(await column("Version 1").locator("del").textContent(), "tea");
  assert.equal(await column("Version 2").locator("ins").textContent(), "coffee");
  await tab.click("Restore version 1…");
  await tab.click("Restore");
  await tab.page.getByRole("row", { name: /^3 / }).waitFor();
  await tab.page.getByRole("row", { name: /^3 .* HTTP request/ }).waitFor();
  assert.match((await service.get("/users/grace/memory")).content, /tea/);
  // Versions of other writers appear without reloading, with their authors.
  await service.append("of grace", conversation(1, 2), { user_id: "grace" });
  await service.post("/sessions/of%20grace/tools/memory_write", { content: "# Grace\n\n- Likes water.\n" });
  await tab.page.getByRole("row", { name: /^4 .* memory tool/ }).waitFor();
  await tab.close();
}

async function editsTheDocument({ browser, service }) {
  await write(service, "alan", "# Alan\n");
  const tab = await Tab.open(browser, service.url, { expected: ["status of 412"] });
  await tab.goto("/users/alan");
  await tab.click("Edit…");
  await tab.fill("Markdown", "# Alan\n\n- Runs.\n");
  await tab.click("Save");
  await tab.page.getByRole("row", { name: /^2 / }).waitFor();
  assert.equal((await service.get("/users/alan/memory")).content, "# Alan\n\n- Runs.\n");
  // A version that an agent writes meanwhile is not overwritten.
  await tab.click("Edit…");
  await tab.fill("Markdown", "lost");
  await tab.page.route("**/users/alan/memory", async (route) => {
    if (route.request().method() === "PUT") await write(service, "alan", "# Alan\n\n- Swims.\n");
    await route.continue();
  });
  await tab.click("Save");
  await tab.page.getByRole("dialog").getByRole("alert").waitFor();
  assert.equal((await service.get("/users/alan/memory")).content, "# Alan\n\n- Swims.\n");
  await tab.close();
}

async function erasesUser({ browser, service }) {
  await write(service, "leaving", "# Leaving\n");
  await service.append("last words", conversation(1, 2), { user_id: "leaving" });
  const tab = await Tab.open(browser, service.url);
  await tab.goto("/sessions/last%20words");
  await tab.click("leaving", "link");
  await tab.heading("Memory of leaving");
  await tab.click("Erase user…");
  await tab.fill("Type leaving to confirm", "leaving");
  await tab.click("Erase");
  await tab.heading("Sessions");
  assert.equal((await service.get("/users/leaving/memory")).version, 0);
  await assert.rejects(service.get("/sessions/last%20words"), /404/);
  await tab.close();
}

async function findsUsersWithADocument({ browser, service }) {
  await write(service, "barbara", "# Barbara\n\n- Likes plums.\n");
  const tab = await Tab.open(browser, service.url);
  await tab.goto("/users");
  await tab.page.getByRole("row", { name: /^barbara 1 / }).waitFor();
  await tab.click("barbara", "link");
  await tab.heading("Memory of barbara");
  await tab.close();
}

async function showsHtmlOfADocumentAsText({ browser, service }) {
  const tab = await Tab.open(browser, service.url);
  await tab.goto(`/users/${encodeURIComponent(HOSTILE.user)}`);
  await tab.heading(`Memory of ${HOSTILE.user}`);
  await tab.see("<script>alert(3)</script>");
  assert.equal(await tab.page.locator("main script, main img, main iframe, main style").count(), 0);
  await tab.close();
}

export const tasks = [
  ["compare and restore versions of a memory document", comparesAndRestoresVersions],
  ["edit a memory document", editsTheDocument],
  ["erase a user", erasesUser],
  ["find users with a document", findsUsersWithADocument],
  ["show HTML of a memory document as text", showsHtmlOfADocumentAsText],
];

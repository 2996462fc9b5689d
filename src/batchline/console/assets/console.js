// What moves on the pages of the console. Every page can be read and every form sent without it.

const REFRESH_MILLISECONDS = 3000;
const FIRST_RETRY_MILLISECONDS = 1000;
const LAST_RETRY_MILLISECONDS = 30_000;

// A browser may keep nothing for a page: then a choice lasts as long as the page.
const chosen = {};
function choice(name) {
  try { return localStorage.getItem(`batchline.${name}`) ?? chosen[name]; } catch { return chosen[name]; }
}
function choose(name, value) {
  chosen[name] = value;
  try { localStorage.setItem(`batchline.${name}`, value); } catch { /* see above */ }
}

// Server-rendered parts are escaped there; nothing else is ever put into the page as HTML.
const parse = (html) => new DOMParser().parseFromString(html, "text/html");

// Change only what differs, so that the focus, a selection, the scroll position and open details stay. By the field
// data-once the service knows that a form is sent twice: it stays too.
function update(from, to) {
  if (from.isEqualNode(to) || from.dataset?.own !== undefined || from.dataset?.once !== undefined) return;
  if (from.nodeType !== Node.ELEMENT_NODE) { from.nodeValue = to.nodeValue; return; }
  updateAttributes(from, to);
  updateChildren(from, to);
}

function updateAttributes(from, to) {
  const isKept = (name) => name === "open" && from.nodeName === "DETAILS";
  for (const { name, value } of to.attributes) {
    if (!isKept(name) && from.getAttribute(name) !== value) from.setAttribute(name, value);
  }
  for (const name of from.getAttributeNames()) {
    if (!isKept(name) && !to.hasAttribute(name)) from.removeAttribute(name);
  }
}

// The attributes by which a part of a page is known: a button of one form must not become that of another.
const IDENTITY = ["id", "name", "action", "data-own"];
function isLike(one, other) {
  const isSame = (name) => one.getAttribute?.(name) === other.getAttribute?.(name);
  return one.nodeName === other.nodeName && IDENTITY.every(isSame);
}

function updateChildren(from, to) {
  let at = from.firstChild;
  for (const node of [...to.childNodes]) {
    let like = at;
    if (node.nodeType === Node.ELEMENT_NODE) while (like && !isLike(like, node)) like = like.nextSibling;
    if (!like || !isLike(like, node)) { from.insertBefore(node, at); continue; }
    while (at !== like) { const gone = at; at = at.nextSibling; gone.remove(); }
    update(at, node);
    at = at.nextSibling;
  }
  while (at) { const gone = at; at = at.nextSibling; gone.remove(); }
}

// Get this page again and update its parts. Return whether that was possible; the end of the session shows the sign-in.
async function refreshParts() {
  try {
    const answer = await fetch(location.href, { redirect: "manual" });
    if (answer.type === "opaqueredirect") location.reload();
    if (!answer.ok) return false;
    const page = parse(await answer.text());
    for (const part of document.querySelectorAll("[data-part]")) {
      const now = page.getElementById(part.id);
      if (now) update(part, now);
    }
    return true;
  } catch {
    return false;
  }
}

function showNote(isShown) {
  for (const note of document.querySelectorAll("[data-note]")) note.hidden = !isShown;
}

// The place is no part of what is updated, so that a screen reader says the text although the progress goes.
function say(text) {
  document.querySelector("[data-said]").textContent = text;
}

// An upkeep is started and stopped: it rests while nobody looks, because a browser opens few connections to one service.
function followBatch(element) {
  let events, timer, retry = FIRST_RETRY_MILLISECONDS;
  // A page that shows the faults of the input file instead has no such part any more.
  const isFollowed = () => element.isConnected && element.dataset.events;
  const stop = () => { events?.close(); clearTimeout(timer); };
  const tryAgain = () => {
    stop();
    showNote(true);
    timer = setTimeout(start, retry);
    retry = Math.min(2 * retry, LAST_RETRY_MILLISECONDS);
  };
  const show = (event) => {
    const shown = () => ({ ...element.querySelector("[data-shape]")?.dataset });
    const before = shown();
    updateChildren(element, parse(JSON.parse(event.data)).body);
    retry = FIRST_RETRY_MILLISECONDS;
    showNote(false);
    const now = shown();
    if (now.status !== before.status) say(`The batch is now ${now.status}.`);
    // Buttons, tabs, files and the timeline are parts of the page that the server renders now.
    if (now.shape !== before.shape) refreshParts();
  };
  function start() {
    stop();
    if (!isFollowed()) return;
    events = new EventSource(element.dataset.events);
    events.addEventListener("live", show);
    events.addEventListener("end", async () => {
      stop();
      const isNew = await refreshParts();
      if (!isNew || isFollowed()) tryAgain();
    });
    events.addEventListener("error", tryAgain);
  }
  return { start, stop };
}

function refreshTable(element) {
  let timer;
  const projectOf = (part) => part.querySelector("[data-project]")?.dataset.project;
  // Somebody may have opened another project in another tab: then the rest of the page is of the former one.
  const show = (now) => {
    if (projectOf(now) === projectOf(element)) updateChildren(element, now); else location.reload();
  };
  const stop = () => clearInterval(timer);
  const refresh = async () => {
    if (!element.querySelector("[data-live]")) return;
    const url = new URL(element.dataset.refresh, location.href);
    url.searchParams.set("table", "");
    try {
      const answer = await fetch(url, { redirect: "manual" });
      if (answer.type === "opaqueredirect") location.reload();
      if (answer.ok) show(parse(await answer.text()).body);
      showNote(!answer.ok);
    } catch {
      showNote(true);
    }
  };
  const start = () => { stop(); timer = setInterval(refresh, REFRESH_MILLISECONDS); };
  return { start, stop };
}

// Some browsers in use do not know the selector :has().
const liveTables = [...document.querySelectorAll("[data-refresh]")].filter((table) => table.querySelector("[data-live]"));
const upkeeps = [
  ...[...document.querySelectorAll("[data-events]")].map(followBatch),
  ...liveTables.map(refreshTable),
];

function runUpkeeps() {
  const isPaused = choice("updates") === "paused";
  for (const upkeep of upkeeps) { if (isPaused || document.hidden) upkeep.stop(); else upkeep.start(); }
  if (isPaused) showNote(false);
  for (const button of document.querySelectorAll("[data-pause]")) {
    button.hidden = !upkeeps.length;
    button.textContent = isPaused ? "Resume updates" : "Pause updates";
  }
}

document.addEventListener("visibilitychange", runUpkeeps);
// A page that the browser kept may have forms that were sent: a further one needs another value to count as new.
addEventListener("pageshow", (event) => {
  if (event.persisted && document.querySelector("[data-once]")) location.reload();
});
document.addEventListener("click", (event) => {
  if (!event.target.closest("[data-pause]")) return;
  choose("updates", choice("updates") === "paused" ? "running" : "paused");
  runUpkeeps();
});
runUpkeeps();

function moveRow(step) {
  const links = [...document.querySelectorAll(".row-link")];
  const at = links.findIndex((link) => link.closest("tr") === document.activeElement?.closest?.("tr"));
  return focusOn(links[Math.max(0, Math.min(links.length - 1, at < 0 ? 0 : at + step))]);
}

function focusOn(element) {
  element?.focus();
  return Boolean(element);
}

function click(element) {
  element?.click();
  return Boolean(element);
}

function showHelp() {
  const help = document.getElementById("help");
  help?.showModal();
  return Boolean(help);
}

// Each returns whether there was something to do: otherwise the key is left to the browser.
const actions = {
  "/": () => focusOn(document.querySelector("[data-search]")),
  j: () => moveRow(1),
  k: () => moveRow(-1),
  n: () => click(document.querySelector("[data-key=n]")),
  g: () => click(document.querySelector(".brand")),
  "?": showHelp,
};

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest("input, textarea, select, dialog");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || choice("keys") === "off") return;
  if (Object.hasOwn(actions, event.key) && actions[event.key]()) event.preventDefault();
});

for (const box of document.querySelectorAll("[data-single-keys]")) {
  box.checked = choice("keys") !== "off";
  box.addEventListener("change", () => choose("keys", box.checked ? "on" : "off"));
}
for (const button of document.querySelectorAll("[data-keys]")) {
  button.hidden = false;
  button.addEventListener("click", showHelp);
}

document.addEventListener("submit", (event) => {
  const question = event.target.dataset.confirm;
  if (question && !confirm(question)) event.preventDefault();
});

// On a narrow window the links scroll sideways; the one of this page may be out of sight.
document.querySelector(".top nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
document.querySelector("tr.wanted")?.scrollIntoView({ block: "center" });

// On an address that is neither https nor this machine, a browser has no clipboard for a page.
async function copy(element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    return true;
  } catch {
    getSelection().selectAllChildren(element);
    return document.execCommand("copy");
  }
}

for (const element of document.querySelectorAll("[data-copy]")) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy small";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    button.textContent = await copy(element) ? "Copied" : "Selected";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  const frame = document.createElement("div");
  frame.className = "copyable";
  element.replaceWith(frame);
  frame.append(element, button);
}

for (const input of document.querySelectorAll("[data-drop]")) {
  for (const [name, over] of [["dragenter", true], ["dragover", true], ["dragleave", false], ["drop", false]]) {
    input.addEventListener(name, () => input.classList.toggle("over", over));
  }
}

// The rows of a table need a prompt: show the fields for it, and the columns that it can name.
document.getElementById("file")?.addEventListener("change", async (event) => {
  const [file] = event.target.files;
  const delimiter = { csv: ",", tsv: "\t" }[file?.name.split(".").pop().toLowerCase()];
  const hint = document.getElementById("columns");
  if (!delimiter || !hint) return;
  document.getElementById("table").open = true;
  const [head] = (await file.slice(0, 65536).text()).replace(/^\ufeff/, "").split(/\r?\n/, 1);
  hint.textContent = `Columns: ${head.split(delimiter).map((name) => `{${name.replace(/^"|"$/g, "")}}`).join(" ")}`;
  hint.hidden = false;
});

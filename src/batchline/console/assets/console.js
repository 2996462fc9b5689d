// What moves on the pages of the console. Every page can be read and every form sent without it.

const REFRESH_MILLISECONDS = 3000;

// Server-rendered parts are escaped there; nothing else is ever put into the page as HTML.
function replaceContent(element, html) {
  const page = new DOMParser().parseFromString(html, "text/html");
  element.replaceChildren(...page.body.childNodes);
}

function followBatch(element) {
  const events = new EventSource(element.dataset.events);
  events.addEventListener("live", (event) => replaceContent(element, JSON.parse(event.data)));
  // The files and actions of a batch that ended are on the page that the server renders now.
  events.addEventListener("end", () => { events.close(); location.reload(); });
}

function refreshTable(element) {
  const busy = () => element.contains(document.activeElement) && document.activeElement.tagName === "BUTTON";
  setInterval(async () => {
    if (document.hidden || busy() || !element.querySelector("[data-live]")) return;
    const url = element.dataset.refresh;
    const answer = await fetch(`${url}${url.includes("?") && !url.endsWith("?") ? "&" : url.endsWith("?") ? "" : "?"}table`, { redirect: "manual" });
    if (!answer.ok) return;
    const focused = document.activeElement?.closest?.("tr")?.id;
    replaceContent(element, await answer.text());
    if (focused) document.getElementById(focused)?.querySelector(".row-link")?.focus();
  }, REFRESH_MILLISECONDS);
}

function moveRow(step) {
  const links = [...document.querySelectorAll(".row-link")];
  if (!links.length) return;
  const at = links.findIndex((link) => link.closest("tr") === document.activeElement?.closest?.("tr"));
  links[Math.max(0, Math.min(links.length - 1, at < 0 ? 0 : at + step))].focus();
}

const actions = {
  "/": () => document.querySelector("[data-search]")?.focus(),
  j: () => moveRow(1),
  k: () => moveRow(-1),
  n: () => document.querySelector("[data-key=n]")?.click(),
  g: () => document.querySelector(".brand")?.click(),
  "?": () => document.getElementById("help")?.showModal(),
};

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea, select, dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !(event.key in actions)) return;
  event.preventDefault();
  actions[event.key]();
});

document.addEventListener("submit", (event) => {
  const question = event.target.dataset.confirm;
  if (question && !confirm(question)) event.preventDefault();
});

// On a narrow window the links scroll sideways; the one of this page may be out of sight.
document.querySelector(".top nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

for (const element of document.querySelectorAll("[data-copy]")) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy small";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(element.textContent);
    button.textContent = "Copied";
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

document.querySelector(".top nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
for (const element of document.querySelectorAll("[data-events]")) followBatch(element);
for (const element of document.querySelectorAll("[data-refresh]")) refreshTable(element);

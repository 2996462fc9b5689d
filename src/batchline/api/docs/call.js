/* The form that tries an operation: what is filled in becomes a request, and the same request as curl. */

import { codeBlock, el } from "/docs/element.js";

const SHOWN_CHARACTERS = 200_000;
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

export function callForm({ method, path, operation, resolve, credentialsFor }) {
  const parameters = (operation.parameters ?? []).map(parameterField);
  const body = operation.requestBody ? bodyFields(operation.requestBody, resolve) : null;
  const curl = codeBlock("");
  const answer = el("div", { class: "answer" });
  const send = el("button", {}, "Send");
  const stop = el("button", { type: "button", disabled: true }, "Stop");
  const copy = el("button", { type: "button", onclick: () => copyText(curl.textContent, copy) }, "Copy");
  const request = () => gather({ method, path, parameters, body, credentials: credentialsFor(operation) });
  const refresh = () => { curl.firstChild.textContent = asCurl(request()); };

  const form = el("form", { class: "try", autocomplete: "off", oninput: refresh, onsubmit: (event) => {
    event.preventDefault();
    refresh();
    void perform(request(), { answer, send, stop });
  } },
    el("h4", {}, "Try it"),
    parameters.map(({ label }) => label),
    body?.labels,
    el("div", { class: "buttons" }, send, stop),
    el("div", { class: "curl" }, el("h5", {}, "curl", copy), curl),
    answer);
  document.getElementById("credentials").addEventListener("input", refresh);
  refresh();
  return form;
}

function parameterField({ name, in: place, schema, required, example }) {
  const input = schema.enum
    ? el("select", {}, el("option", { value: "" }, ""), schema.enum.map((value) => el("option", {}, value)))
    : el("input", { type: "text", required: Boolean(required), spellcheck: "false", placeholder: String(schema.default ?? example ?? "") });
  return { name, place, label: el("label", {}, name, input), value: () => input.value };
}

function bodyFields(requestBody, resolve) {
  const [[kind, { schema, example }]] = Object.entries(requestBody.content);
  return kind === "multipart/form-data" ? formFields(resolve(schema)) : jsonField(example ?? resolve(schema).example);
}

function jsonField(example) {
  const text = JSON.stringify(example ?? {}, null, 2);
  const input = el("textarea", { spellcheck: "false", rows: String(text.split("\n").length + 1) });
  input.value = text;
  return { labels: [el("label", {}, "Body", input)], json: () => input.value };
}

function formFields(schema) {
  const fields = Object.entries(schema.properties).map(([name, field]) => {
    const required = schema.required.includes(name);
    const input = el("input", { type: field.format === "binary" ? "file" : "text", required, spellcheck: "false",
      placeholder: required ? "" : "optional" });
    if (required && "const" in field) input.value = field.const;
    return { name, input };
  });
  return {
    labels: fields.map(({ name, input }) => el("label", {}, name, input)),
    form: () => fields.map(({ name, input }) => [name, input.type === "file" ? input.files[0] : input.value]).filter(([, value]) => value),
  };
}

function gather({ method, path, parameters, body, credentials }) {
  const filled = parameters.map(({ name, place, value }) => ({ name, place, value: value() })).filter(({ value }) => value);
  const at = (place) => filled.filter((each) => each.place === place);
  const route = at("path").reduce((url, { name, value }) => url.replace(`{${name}}`, encodeURIComponent(value)), path);
  const query = new URLSearchParams(at("query").map(({ name, value }) => [name, value])).toString();
  return {
    method: method.toUpperCase(),
    url: location.origin + route + (query ? `?${query}` : ""),
    headers: at("header").map(({ name, value }) => [name, value]),
    credentials,
    json: body?.json?.(),
    form: body?.form?.(),
  };
}

function asCurl({ method, url, headers, credentials, json, form }) {
  const parts = [`curl -N ${method === "GET" ? "" : `-X ${method} `}${quoted(url)}`];
  parts.push(...credentials.map(({ header, shown }) => `-H "${header}: ${shown}"`));
  parts.push(...headers.map(([name, value]) => `-H ${quoted(`${name}: ${value}`)}`));
  if (json !== undefined) parts.push(`-H 'content-type: application/json'`, `--data-binary ${quoted(json)}`);
  for (const [name, value] of form ?? [])
    parts.push(value instanceof File ? `-F ${quoted(`${name}=@${value.name}`)}` : `--form-string ${quoted(`${name}=${value}`)}`);
  return parts.join(" \\\n  ");
}

async function perform({ method, url, headers, credentials, json, form }, { answer, send, stop }) {
  const abort = new AbortController();
  stop.onclick = () => abort.abort();
  send.disabled = !(stop.disabled = false);
  const status = el("p", { role: "status" }, "Waiting…");
  answer.replaceChildren(status);
  try {
    const all = new Headers([...headers, ...credentials.filter(({ value }) => value).map(({ header, value }) => [header, value])]);
    if (json !== undefined) all.set("content-type", "application/json");
    const body = json ?? (form && formData(form));
    const began = performance.now();
    const response = await fetch(url, { method, headers: all, body, signal: abort.signal, credentials: "omit", redirect: "manual" });
    await showAnswer(response, { answer, status, began });
  } catch (error) {
    status.textContent = abort.signal.aborted ? "Stopped." : `No answer: ${error.message}`;
  } finally {
    send.disabled = !(stop.disabled = true);
  }
}

function formData(fields) {
  const data = new FormData();
  for (const [name, value] of fields) data.append(name, value);
  return data;
}

async function showAnswer(response, { answer, status, began }) {
  const head = [...response.headers].map(([name, value]) => `${name}: ${value}`).join("\n");
  const shown = codeBlock("");
  answer.append(el("details", {}, el("summary", {}, "Headers"), codeBlock(head)), shown);
  const decoder = new TextDecoder();
  const pieces = [];
  let size = 0;
  for await (const piece of response.body ? piecesOf(response.body) : []) {
    pieces.push(piece);
    size += piece.length;
    const room = SHOWN_CHARACTERS - shown.textContent.length;
    if (room > 0) shown.firstChild.append(decoder.decode(piece, { stream: true }).slice(0, room));
    status.textContent = `${response.status} · ${sizeText(size)} so far`;
  }
  status.className = response.ok ? "good" : "bad";
  status.textContent = `${response.status} ${response.statusText} · ${sizeText(size)} · ${Math.round(performance.now() - began)} ms`;
  finish(response, { answer, shown, pieces, size });
}

async function* piecesOf(stream) {
  const reader = stream.getReader();
  try {
    for (let step = await reader.read(); !step.done; step = await reader.read()) yield step.value;
  } finally {
    void reader.cancel();
  }
}

function finish(response, { answer, shown, pieces, size }) {
  const kind = response.headers.get("content-type") ?? "";
  if (kind.split(";")[0] === "application/json" && size < SHOWN_CHARACTERS) {
    try {
      shown.firstChild.textContent = JSON.stringify(JSON.parse(shown.textContent), null, 2);
    } catch { /* It is shown as it came. */ }
  }
  if (shown.textContent.length >= SHOWN_CHARACTERS) answer.append(el("p", { class: "quiet" }, "The beginning is shown."));
  const name = /filename="([^"]+)"/.exec(response.headers.get("content-disposition") ?? "")?.[1];
  if (name) {
    const href = URL.createObjectURL(new Blob(pieces));
    answer.append(el("p", {}, el("a", { href, download: name }, `Save ${name} (${sizeText(size)})`)));
  }
}

function sizeText(bytes) {
  if (bytes < 1024) return `${bytes} bytes`;
  return bytes < 1024 ** 2 ? `${(bytes / 1024).toFixed(1)} KiB` : `${(bytes / 1024 ** 2).toFixed(1)} MiB`;
}

async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select and copy";
  }
}

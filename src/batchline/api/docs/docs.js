/* Reads /openapi.json and shows it: operations by tag, each with a form to try it, and the schemas. */

import { callForm } from "/docs/call.js";
import { codeBlock, el, inline, prose } from "/docs/element.js";

const root = await (await fetch("/openapi.json")).json();
const { securitySchemes, schemas } = root.components;

function resolve(part) {
  if (!part?.$ref) return part;
  return part.$ref.slice(2).split("/").reduce((place, name) => place[name], root);
}

const nameOf = (ref) => ref.split("/").at(-1);
const schemaLink = (name) => el("a", { href: `#schema-${name}` }, name);
const oneLine = (value) => JSON.stringify(value);

/* A type in a few words; named schemas are links. */
function typeOf(schema) {
  if (schema === true || schema === undefined) return ["anything"];
  if (schema.$ref) return [schemaLink(nameOf(schema.$ref))];
  if ("const" in schema) return [el("code", {}, oneLine(schema.const))];
  if (schema.enum) return schema.enum.flatMap((value, index) => [index ? " | " : "", el("code", {}, oneLine(value))]);
  if (schema.anyOf) return schema.anyOf.flatMap((each, index) => [index ? " | " : "", ...typeOf(each)]);
  if (schema.type === "array") return ["array of ", ...typeOf(schema.items)];
  if (schema.format === "binary") return ["bytes"];
  return [[schema.type ?? "anything"].flat().join(" | ") + boundsOf(schema)];
}

function boundsOf({ minimum, maximum }) {
  if (minimum === undefined && maximum === undefined) return "";
  return maximum === undefined ? `, ${minimum} or more` : `, ${minimum ?? "…"} to ${maximum}`;
}

function fieldsOf(schema) {
  const inner = schema.type === "array" ? schema.items : schema;
  if (!inner?.properties || schema.$ref) return null;
  const rows = Object.entries(inner.properties).map(([name, field]) =>
    el("tr", {},
      el("th", { scope: "row" }, el("code", {}, name), inner.required?.includes(name) ? null : el("small", {}, "optional")),
      el("td", {}, el("div", { class: "type" }, typeOf(field)), prose(field.description), fieldsOf(field))));
  return el("table", { class: "fields" }, el("tbody", {}, rows));
}

const json = (value) => codeBlock(JSON.stringify(value, null, 2));

function parameterTable(parameters) {
  const rows = parameters.map(({ name, in: place, schema, description, required }) =>
    el("tr", {},
      el("th", { scope: "row" }, el("code", {}, name), el("small", {}, required ? place : `${place}, optional`)),
      el("td", {}, el("div", { class: "type" }, typeOf(schema)), prose(description))));
  return el("table", { class: "fields" }, el("tbody", {}, rows));
}

function bodySection(body) {
  return Object.entries(body.content).map(([kind, { schema, example }]) => {
    const named = resolve(schema);
    return [
      el("h4", {}, "Body ", el("small", {}, kind, " · ", typeOf(schema))),
      prose(named.description),
      fieldsOf(named),
      example || named.example ? el("details", {}, el("summary", {}, "Example"), json(example ?? named.example)) : null,
    ];
  });
}

function headerList(headers = {}) {
  const names = Object.keys(headers).filter((name) => name !== "x-request-id");
  return names.length ? el("p", { class: "quiet" }, "Headers: ", inline(names.map((name) => `\`${name}\``).join(", "))) : null;
}

function successSection([status, response]) {
  const content = Object.entries(response.content ?? {});
  const example = content.map(([, media]) => resolve(media.schema)?.example).find(Boolean);
  return [
    el("h4", {}, `Answer ${status} `, content.map(([kind, media]) => el("small", {}, kind, media.schema ? [" · ", typeOf(media.schema)] : null, " "))),
    prose(response.description),
    headerList(response.headers),
    example ? el("details", {}, el("summary", {}, "Example"), json(example)) : null,
  ];
}

function errorSection(responses) {
  const rows = responses.flatMap(([status, response]) =>
    Object.values(resolve(response).content["application/json"].examples).map(({ value: { error } }) =>
      el("tr", {},
        el("td", {}, status), el("td", {}, el("code", {}, error.type)), el("td", {}, el("code", {}, oneLine(error.code))),
        el("td", {}, error.message, error.param ? el("small", {}, " param ", el("code", {}, error.param)) : null))));
  const head = el("tr", {}, ["Status", "Type", "Code", "Message, for example"].map((text) => el("th", { scope: "col" }, text)));
  const count = new Set(responses.map(([status]) => status)).size;
  return el("details", {}, el("summary", {}, `Errors (${count} statuses)`), el("div", { class: "wide" },
    el("table", { class: "errors" }, el("thead", {}, head), el("tbody", {}, rows))));
}

function operationBlock(method, path, operation) {
  const [good, bad] = [[], []];
  for (const entry of Object.entries(operation.responses)) (entry[0].startsWith("2") ? good : bad).push(entry);
  const fill = () => [
    prose(operation.description),
    operation.parameters ? [el("h4", {}, "Parameters"), parameterTable(operation.parameters)] : null,
    operation.requestBody ? bodySection(operation.requestBody) : null,
    good.map(successSection),
    errorSection(bad),
    callForm({ method, path, operation, resolve, credentialsFor }),
  ];
  const block = el("details", { class: "operation", id: operation.operationId },
    el("summary", {}, el("span", { class: `method ${method}` }, method.toUpperCase()), el("code", {}, path),
      el("span", { class: "quiet" }, operation.summary)));
  block.addEventListener("toggle", () => block.append(el("div", { class: "inside" }, fill())), { once: true });
  return block;
}

function schemaBlock([name, schema]) {
  return el("details", { class: "operation", id: `schema-${name}` }, el("summary", {}, el("code", {}, name)),
    el("div", { class: "inside" }, prose(schema.description), fieldsOf(schema), schema.example ? json(schema.example) : null));
}

/* Credentials live in this tab only. The first alternative that is filled in is the one that is used. */
function credentialFields() {
  return Object.entries(securitySchemes).map(([name, scheme]) => {
    const input = el("input", { type: name === "projectId" ? "text" : "password", spellcheck: "false", autocomplete: "off", title: scheme.description,
      oninput: () => sessionStorage.setItem(`batchline.${name}`, input.value) });
    input.value = sessionStorage.getItem(`batchline.${name}`) ?? "";
    return el("label", {}, scheme.name ?? `${name} token`, input);
  });
}

function credentialsFor(operation) {
  const valueOf = (name) => sessionStorage.getItem(`batchline.${name}`) ?? "";
  const chosen = operation.security.find((names) => Object.keys(names).some(valueOf)) ?? operation.security[0] ?? {};
  return Object.keys(chosen).map((name) => {
    const { name: header = "authorization", scheme } = securitySchemes[name];
    const prefix = scheme === "bearer" ? "Bearer " : "";
    const variable = name.replace(/[A-Z]/g, (letter) => `_${letter}`).toUpperCase();
    return { header, value: prefix + valueOf(name), shown: `${prefix}$${variable}` };
  });
}

function openTarget() {
  const target = document.getElementById(location.hash.slice(1));
  if (!target) return;
  if (target.tagName === "DETAILS") target.open = true;
  target.scrollIntoView();
}

function show() {
  const groups = Object.fromEntries(root.tags.map(({ name }) => [name, []]));
  for (const [path, methods] of Object.entries(root.paths))
    for (const [method, operation] of Object.entries(methods)) groups[operation.tags[0]].push([method, path, operation]);

  document.getElementById("version").textContent = root.info.version;
  document.getElementById("credentials").append(...credentialFields());
  const contents = root.tags.map(({ name }) => [el("h2", {}, name), el("ul", {}, groups[name].map(([, , { operationId, summary }]) =>
    el("li", {}, el("a", { href: `#${operationId}` }, summary))))]).flat();
  document.getElementById("contents").append(...contents);
  const sections = root.tags.map(({ name, description }) => el("section", {}, el("h2", {}, name), prose(description),
    groups[name].map((entry) => operationBlock(...entry))));
  document.getElementById("content").replaceChildren(el("div", { class: "about" }, prose(root.info.description)), ...sections,
    el("section", {}, el("h2", {}, "Schemas"), Object.entries(schemas).map(schemaBlock)));
  addEventListener("hashchange", openTarget);
  openTarget();
}

show();

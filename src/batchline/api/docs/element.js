/* Elements of the page. Text only ever becomes text: nothing that is shown can become markup. */

export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

export const codeBlock = (text) => el("pre", { tabindex: "0" }, el("code", {}, text));

export function inline(text) {
  return text.split("`").map((piece, index) => (index % 2 ? el("code", {}, piece) : piece));
}

/* Paragraphs, lists and code: as much of Markdown as the description uses. */
export function prose(text = "") {
  return text.split(/\n\n/).filter(Boolean).map((block) => {
    const lines = block.split("\n");
    return lines.every((line) => line.startsWith("- "))
      ? el("ul", {}, lines.map((line) => el("li", {}, inline(line.slice(2)))))
      : el("p", {}, inline(block));
  });
}

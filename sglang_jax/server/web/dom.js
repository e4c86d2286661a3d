/** Helpers that make elements. Text from models, users and the server enters the page only as text nodes. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * @param {string} id
 * @returns {any} the element, which must exist
 */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`there is no element #${id}`);
  return found;
}

/**
 * Makes an element. Attributes that start with "on" are listeners.
 * @param {string} tag
 * @param {Record<string, any>} attributes
 * @param {...(Node | string)} children
 */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Makes an element of SVG, like `make`. */
export function makeSvg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== undefined) element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children);
  return element;
}

/**
 * A button that copies what `text` returns, and says so.
 * @param {() => string} text
 * @param {string} label
 */
export function copyButton(text, label = "Copy") {
  const button = make("button", { type: "button", class: "quiet" }, label);
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text())) ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = label; }, 1500);
  });
  return button;
}

/** Browsers offer `navigator.clipboard` only over TLS and on this machine. */
async function copied(text) {
  if (navigator.clipboard !== undefined) {
    return navigator.clipboard.writeText(text).then(() => true, () => false);
  }
  const area = make("textarea", { class: "unseen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

/** The settings of a chat: the fields that its requests have. */

import { byId } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const DEFAULTS = ["temperature", "top_p"];
const WIDE = "(min-width: 60.01rem)";

/** A setting that cannot be sent; `field` is its element's id. */
export class SettingError extends Error {
  constructor(message, field) {
    super(message);
    this.field = field;
  }
}

/** Opens the settings where there is room, and shows the server's defaults in their fields. */
export function describeSettings({ generation_defaults: defaults, context_length: length }) {
  byId("settings").open = matchMedia(WIDE).matches;
  for (const name of DEFAULTS) {
    const value = defaults?.[name];
    byId(name).placeholder = value === null || value === undefined ? "default" : String(value);
  }
  byId("max_tokens").placeholder = `of ${length}`;
}

/**
 * @param {object[]} messages the conversation
 * @returns {object} the body of a request; throws `SettingError`
 */
export function requestBody(messages) {
  const system = byId("system").value.trim();
  const body = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of NUMBERS) {
    const { value, validity } = byId(name);
    if (validity.badInput) throw new SettingError(`${labelOf(name)} must be a number`, name);
    if (value !== "") body[name] = Number(value);
  }
  const tools = readTools(byId("functions").value.trim());
  if (tools.length) Object.assign(body, { tools, tool_choice: byId("tool_choice").value });
  return body;
}

function readTools(text) {
  if (text === "") return [];
  let read;
  try {
    read = JSON.parse(text);
  } catch (error) {
    throw new SettingError(`Tools must be JSON: ${error.message}`, "functions");
  }
  return Array.isArray(read) ? read : [read];
}

function labelOf(id) {
  return document.querySelector(`label[for="${id}"]`).textContent;
}

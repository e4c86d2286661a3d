/**
 * Renders a model's Markdown as elements: headings, lists, quotes, tables, code, bold, italic, links. It builds nodes
 * and never parses HTML, so a reply cannot add markup, scripts or images. Links lead only to http and https.
 */

import { copyButton, make } from "./dom.js";

/** Longer runs of text are shown as they are: patterns would take too long. */
const MAX_INLINE = 20_000;

/** Quotes and lists in one another; deeper ones are shown as they are. */
const MAX_DEPTH = 16;

/** After backticks, another backtick in the line means code within a text. */
const FENCE = /^\s{0,3}(`{3,}(?![^`]*`)|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^\s{0,3}> ?(.*)$/;
/** Of a line without spaces around it, which would be tried in too many ways. */
const TABLE_RULE = /^\|?(\s*:?-+:?\s*\|)+\s*(:?-+:?)?$/;
const INLINE = new RegExp(
  [
    "(?<!`)(?<ticks>`+)(?<code>[^`]+)\\k<ticks>(?!`)",
    "\\*\\*(?<bold>[^\\s*](?:[^*]*[^\\s*])?)\\*\\*",
    "(?<![\\w*])\\*(?<italic>[^\\s*](?:[^*]*[^\\s*])?)\\*(?![\\w*])",
    "!?\\[(?<label>[^\\[\\]]*)\\]\\((?<target>[^\\s()]+)\\)",
    "(?<bare>https?://[^\\s<>()\\[\\]\"']*[^\\s<>()\\[\\]\"'.,;:!?])",
  ].join("|"),
  "gu",
);

/**
 * @param {string} text
 * @returns {DocumentFragment}
 */
export function markdown(text) {
  return blocks(text.split("\n"));
}

function blocks(lines, depth = 0) {
  const found = document.createDocumentFragment();
  if (depth > MAX_DEPTH) {
    found.append(make("p", {}, lines.join("\n")));
    return found;
  }
  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    let end = at + 1;
    if (line.trim() === "") {
      at = end;
      continue;
    }
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (fence !== null) {
      while (end < lines.length && !lines[end].trimStart().startsWith(fence[1])) end += 1;
      found.append(codeBlock(lines.slice(at + 1, end).join("\n"), fence[2]));
      end += 1;
    } else if (heading !== null) {
      found.append(make(`h${Math.min(heading[1].length + 3, 6)}`, {}, ...inline(heading[2])));
    } else if (RULE.test(line)) {
      found.append(make("hr"));
    } else if (QUOTE.test(line)) {
      while (end < lines.length && QUOTE.test(lines[end])) end += 1;
      found.append(make("blockquote", {}, blocks(lines.slice(at, end).map((one) => QUOTE.exec(one)[1]), depth + 1)));
    } else if (ITEM.test(line)) {
      while (end < lines.length && isOfList(lines, end)) end += 1;
      found.append(list(lines.slice(at, end), depth));
    } else if (line.includes("|") && TABLE_RULE.test((lines[at + 1] ?? "").trim())) {
      while (end < lines.length && lines[end].includes("|")) end += 1;
      found.append(table(lines.slice(at, end)));
    } else {
      while (end < lines.length && !startsBlock(lines[end])) end += 1;
      found.append(make("p", {}, ...inline(lines.slice(at, end).join("\n"))));
    }
    at = end;
  }
  return found;
}

function startsBlock(line) {
  return line.trim() === "" || [FENCE, HEADING, ITEM, RULE, QUOTE].some((pattern) => pattern.test(line));
}

/** Whether a line continues a list: an item, an indented line, or an empty line before one of these. */
function isOfList(lines, at) {
  if (lines[at].trim() !== "") return ITEM.test(lines[at]) || /^\s{2,}/.test(lines[at]);
  const next = lines[at + 1] ?? "";
  return ITEM.test(next) || /^\s{2,}\S/.test(next);
}

function list(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(mark);
  const made = make(ordered ? "ol" : "ul", ordered ? { start: parseInt(mark, 10) } : {});
  let inner = [];
  const finish = () => {
    if (inner.length) made.append(item(inner, depth));
  };
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found !== null && found[1].length <= indent.length + 1) {
      finish();
      inner = [found[3]];
    } else {
      inner.push(line);
    }
  }
  finish();
  return made;
}

/** @param {string[]} lines the first without its mark */
function item(lines, depth) {
  const [first, ...rest] = lines;
  const indent = rest.reduce((least, one) => (one.trim() ? Math.min(least, one.search(/\S/)) : least), 8);
  const deeper = rest.map((one) => one.slice(indent));
  return make("li", {}, ...inline(first), ...(deeper.length ? [blocks(deeper, depth + 1)] : []));
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((one) => one.trim());
  const row = (line, tag) => make("tr", {}, ...cells(line).map((one) => make(tag, {}, ...inline(one))));
  return make(
    "table", {},
    make("thead", {}, row(lines[0], "th")),
    make("tbody", {}, ...lines.slice(2).map((line) => row(line, "td"))),
  );
}

function codeBlock(text, language) {
  const code = make("code", language ? { "data-language": language } : {}, text);
  return make("div", { class: "fence" }, make("pre", { tabindex: "0" }, code), copyButton(() => text));
}

/** @returns {(Node | string)[]} */
function inline(text) {
  if (text.length > MAX_INLINE) return [text];
  const parts = [];
  let last = 0;
  for (const match of text.matchAll(INLINE)) {
    parts.push(text.slice(last, match.index));
    last = match.index + match[0].length;
    parts.push(styled(match.groups, match[0]));
  }
  parts.push(text.slice(last));
  return parts;
}

function styled({ code, bold, italic, label, target, bare }, whole) {
  if (code !== undefined) return make("code", {}, code);
  if (bold !== undefined) return make("strong", {}, ...inline(bold));
  if (italic !== undefined) return make("em", {}, ...inline(italic));
  const address = bare ?? target;
  if (!/^https?:\/\//i.test(address)) return whole;
  return make("a", { href: address, rel: "noopener noreferrer", target: "_blank" }, bare ?? (label || address));
}

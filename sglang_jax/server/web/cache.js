/** Pictures of the cache: its pools, and the tree of prefixes. */

import { make, makeSvg } from "./dom.js";

const ROW = 22;
const SPACE = 2;
const MIN_WIDTH = 22;
const LABEL_WIDTH = 60;
const MAX_TABLE_ROWS = 40;

const POOLS = { full: "KV", swa: "KV, sliding window", mamba: "Recurrent states" };

/** @param {any[]} replicas those of `/cache_summary` */
export function drawPools(host, replicas) {
  host.replaceChildren(...replicas.flatMap(({ replica, groups }) => groups.map((group) => {
    const kinds = [["used", "in use"], ["session", "kept by sessions"], ["cached", "cached"], ["free", "free"]];
    const parts = kinds.filter(([kind]) => kind !== "free").map(([kind]) => {
      const part = make("i", { class: kind });
      part.style.width = `${100 * group[kind] / group.total}%`;
      return part;
    });
    const told = kinds.map(([kind, words]) => `${group[kind].toLocaleString("en")} ${words}`).join(", ");
    const name = POOLS[group.name] ?? group.name;
    return make(
      "div", { class: "pool" },
      make("div", {}, replicas.length > 1 ? `${replica}: ${name}` : name),
      make("div", { class: "bar-of-pages", "aria-hidden": "true" }, ...parts),
      make("div", { class: "numbers" }, `${group.total.toLocaleString("en")} ${group.unit}s: ${told}`),
    );
  })));
}

/** @param {any[]} replicas those of `/cache_summary` */
export function drawTrees(host, replicas) {
  host.replaceChildren(...replicas.flatMap((report) => {
    const count = `${report.nodes.length} of ${report.num_nodes} nodes`;
    const heading = replicas.length > 1 ? [make("h3", {}, `Replica ${report.replica}`)] : [];
    if (report.nodes.length === 0) return [...heading, make("p", { class: "hint" }, "No prefix is cached.")];
    return [...heading, drawTree(report.nodes, host.clientWidth), make("p", { class: "hint" }, count)];
  }));
}

/** Nodes by their parent, 0 for the roots; the most used first. */
function childrenOf(nodes) {
  const below = new Map();
  for (const node of nodes) below.set(node.parent, [...(below.get(node.parent) ?? []), node]);
  return below;
}

/**
 * A box for each node: as high as its leaves, and to the right of its parent. Widths grow with the square root of the
 * tokens, so that short nodes next to long ones can be seen.
 */
function drawTree(nodes, width) {
  const below = childrenOf(nodes);
  const boxes = [];
  let leaves = 0;
  const place = (node, left, depth) => {
    const box = { node, left, depth, top: leaves, right: left + Math.sqrt(node.tokens) };
    boxes.push(box);
    const children = below.get(node.id) ?? [];
    for (const child of children) place(child, box.right, depth + 1);
    if (children.length === 0) leaves += 1;
    box.bottom = leaves;
  };
  for (const node of below.get(0) ?? []) place(node, 0, 0);
  const deepest = Math.max(...boxes.map((box) => box.depth)) + 1;
  const longest = Math.max(...boxes.map((box) => box.right));
  const stretch = Math.max(width - deepest * MIN_WIDTH, 0) / longest;
  const height = leaves * ROW;
  return makeSvg(
    "svg", { role: "img", "aria-label": summary(nodes), viewBox: `0 0 ${width} ${height}`, height },
    ...boxes.flatMap((box) => drawBox(
      box.node,
      box.left * stretch + box.depth * MIN_WIDTH,
      box.top * ROW,
      (box.right - box.left) * stretch + MIN_WIDTH,
      (box.bottom - box.top) * ROW,
    )),
  );
}

function drawBox(node, x, y, width, height) {
  const kind = node.requests ? "used" : node.sessions ? "session" : "cached";
  const cold = kind === "cached" && node.hits === 0;
  const rect = makeSvg(
    "rect",
    {
      class: cold ? `${kind} cold` : kind,
      x: x + SPACE / 2, y: y + SPACE / 2, width: width - SPACE, height: height - SPACE, rx: 4,
      "data-node": node.id, "data-requests": node.requests,
    },
    makeSvg("title", {}, told(node)),
  );
  if (width < LABEL_WIDTH) return [rect];
  const used = node.requests > 1 ? `${node.requests} requests` : node.hits ? counted(node.hits, "hit") : "";
  const label = width > 2.2 * LABEL_WIDTH ? `${node.tokens} tokens${used && ` · ${used}`}` : String(node.tokens);
  return [rect, makeSvg("text", { x: x + 8, y: y + height / 2 + 4 }, label)];
}

function told({ tokens, requests, sessions, hits }) {
  const users = `${counted(requests, "request")} and ${counted(sessions, "session")}`;
  return `${tokens} tokens; used by ${users}; ${counted(hits, "hit")}`;
}

function counted(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

function summary(nodes) {
  const shared = nodes.filter((node) => node.requests > 1);
  const most = Math.max(0, ...shared.map((node) => node.requests));
  return `Prefix tree: ${nodes.length} nodes, ${shared.length} shared by several requests${
    most ? `, by up to ${most}` : ""}. A table follows.`;
}

/** @param {any[]} replicas those of `/cache_summary` */
export function drawTable(host, replicas) {
  const rows = replicas.flatMap(({ replica, nodes }) => {
    const depths = new Map([[0, -1]]);
    for (const node of nodes) depths.set(node.id, depths.get(node.parent) + 1);
    return nodes.map((node) => [
      replicas.length > 1 ? `${replica}: ${node.id}` : node.id, node.parent || "none", depths.get(node.id),
      node.tokens, node.requests, node.sessions, node.hits,
    ]);
  });
  host.replaceChildren(
    table(["Node", "Parent", "Depth", "Tokens", "Requests", "Sessions", "Hits"], rows.slice(0, MAX_TABLE_ROWS)),
  );
}

/**
 * @param {string[]} heads
 * @param {(string | number | Node)[][]} rows
 */
export function table(heads, rows) {
  const cell = (tag, content) => make(tag, tag === "th" ? { scope: "col" } : {},
    content instanceof Node ? content : String(content));
  return make(
    "table", {},
    make("thead", {}, make("tr", {}, ...heads.map((one) => cell("th", one)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((one) => cell("td", one))))),
  );
}

/** Line charts of the last minutes, and percentiles of histograms. */

import { make, makeSvg } from "./dom.js";

/** Seconds that a chart shows. */
export const SHOWN_SECONDS = 180;

/** A longer gap between two samples breaks the line. */
const GAP_SECONDS = 6;

const HEIGHT = 144;
const LEFT = 40;
const BOTTOM = 18;
const MARKS = ["first", "second"];

/**
 * @param {number[]} bounds upper bounds of the buckets; the last bucket has none
 * @param {number[]} counts values in each bucket
 * @param {number} part such as 0.95
 * @returns {number | null} the percentile, spread evenly over its bucket; null without values
 */
export function percentile(bounds, counts, part) {
  const total = counts.reduce((sum, one) => sum + one, 0);
  if (total === 0) return null;
  let left = part * total;
  for (let at = 0; at < counts.length; at += 1) {
    if (counts[at] > 0 && left <= counts[at]) {
      const low = at === 0 ? 0 : bounds[at - 1];
      const high = at < bounds.length ? bounds[at] : low;
      return low + (high - low) * left / counts[at];
    }
    left -= counts[at];
  }
  return bounds[bounds.length - 1];
}

/** A number as people read it. */
export function short(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(value >= 1e5 ? 0 : 1)}k`;
  return value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(value >= 10 ? 1 : 2);
}

/** @param {number | null} seconds */
export function duration(seconds) {
  if (seconds === null) return "–";
  return seconds < 1 ? `${short(seconds * 1000)} ms` : `${short(seconds)} s`;
}

export class LineChart {
  #svg = makeSvg("svg", { role: "img" });
  #values;
  #title;
  #series;
  #format;

  /**
   * @param {Element} host
   * @param {string} title
   * @param {{name: string, of: (sample: any) => number | null}[]} series at most two
   * @param {(value: number) => string} format
   */
  constructor(host, title, series, format = short) {
    this.#title = title;
    this.#series = series;
    this.#format = format;
    this.#values = series.map((_, index) => make("span", { class: MARKS[index] }));
    host.append(make("section", { class: "card chart" }, make("h2", {}, title, ...this.#values), this.#svg));
  }

  /** @param {any[]} samples each with `seconds`, the newest last */
  draw(samples) {
    const width = this.#svg.clientWidth;
    if (width === 0 || samples.length === 0) return;
    const now = samples[samples.length - 1].seconds;
    const shown = samples.filter((one) => one.seconds > now - SHOWN_SECONDS);
    const lines = this.#series.map(({ of }) => shown.map((one) => ({ seconds: one.seconds, value: of(one) })));
    const most = niceMaximum(Math.max(0, ...lines.flat().map((point) => point.value ?? 0)));
    const x = (seconds) => LEFT + (width - LEFT) * (1 - (now - seconds) / SHOWN_SECONDS);
    const y = (value) => 6 + (HEIGHT - BOTTOM - 6) * (1 - value / most);
    this.#svg.replaceChildren(
      ...this.#frame(width, most, y),
      ...lines.flatMap((line, index) => drawLine(line, MARKS[index], x, y, index === 0)),
    );
    const newest = this.#series.map(({ name, of }) => `${name} ${this.#told(of(shown[shown.length - 1]))}`);
    newest.forEach((text, index) => { this.#values[index].textContent = text; });
    this.#svg.setAttribute("aria-label", `${this.#title}: ${newest.join(", ")}`);
  }

  #told(value) {
    return value === null ? "–" : this.#format(value);
  }

  #frame(width, most, y) {
    const levels = [0, most / 2, most].map((value) => [
      makeSvg("line", { x1: LEFT, x2: width, y1: y(value), y2: y(value) }),
      makeSvg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, this.#format(value)),
    ]);
    const begin = makeSvg("text", { x: LEFT, y: HEIGHT - 2 }, `${SHOWN_SECONDS / 60} minutes ago`);
    return [...levels.flat(), begin, makeSvg("text", { x: width, y: HEIGHT - 2, "text-anchor": "end" }, "now")];
  }
}

function niceMaximum(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 4, 6, 8, 10].find((factor) => factor * power >= value);
}

function drawLine(points, mark, x, y, filled) {
  const runs = [];
  let before = null;
  for (const point of points) {
    if (point.value === null) {
      before = null;
      continue;
    }
    if (before === null || point.seconds - before > GAP_SECONDS) runs.push([]);
    runs[runs.length - 1].push(`${x(point.seconds).toFixed(1)} ${y(point.value).toFixed(1)}`);
    before = point.seconds;
  }
  return runs.filter((run) => run.length > 1).flatMap((run) => {
    const path = `M${run.join("L")}`;
    const ends = [run[run.length - 1], run[0]].map((end) => `${end.split(" ")[0]} ${y(0).toFixed(1)}`);
    const line = makeSvg("path", { class: `line ${mark}`, d: path });
    return filled ? [makeSvg("path", { class: `area ${mark}`, d: `${path}L${ends.join("L")}Z` }), line] : [line];
  });
}

/** The live view: it polls the server's figures while it is visible. */

import { ApiError, ask } from "./api.js";
import { drawPools, drawTable, drawTrees, table } from "./cache.js";
import { duration, LineChart, percentile, short, SHOWN_SECONDS } from "./charts.js";
import { byId, make } from "./dom.js";

const POLL_MILLISECONDS = 1000;
const TIMEOUT_MILLISECONDS = 10_000;

/** An engine answers between two steps, and not at all if it hangs. */
const ENGINE_MILLISECONDS = 2500;

/** Rates and percentiles are those of this many seconds, as far as they have been seen. */
const RATE_SECONDS = 5;
const WINDOW_SECONDS = 60;

const CHARTS = [
  ["Requests", [{ name: "running", of: (one) => one.running }, { name: "waiting", of: (one) => one.waiting }]],
  ["Tokens per second", [{ name: "output", of: (one) => one.output }, { name: "prompt", of: (one) => one.prompt }]],
  ["Time to first token", [{ name: "p50", of: (one) => one.ttft[0] }, { name: "p95", of: (one) => one.ttft[1] }],
    duration],
  ["Inter-token latency", [{ name: "p50", of: (one) => one.itl[0] }, { name: "p95", of: (one) => one.itl[1] }],
    duration],
];

export class Live {
  #samples = [];
  #timer = 0;
  #watched = false;
  #charts = null;
  #tiles = new Map();
  #drawn = new Map();
  #mostPrograms = 0;
  #lock;

  /** @param {(message: string) => void} lock asks for the key */
  constructor(lock) {
    this.#lock = lock;
    document.addEventListener("visibilitychange", () => this.#schedule(0));
  }

  /** @param {boolean} watched whether the view is shown */
  watch(watched) {
    this.#watched = watched;
    this.#schedule(0);
  }

  #schedule(milliseconds) {
    clearTimeout(this.#timer);
    if (this.#watched && !document.hidden) this.#timer = setTimeout(() => this.#poll(), milliseconds);
  }

  async #poll() {
    const timer = this.#timer;
    let note = "";
    try {
      const signal = AbortSignal.timeout(TIMEOUT_MILLISECONDS);
      const [state, cache] = await Promise.all([ask("ui/state", { signal }), askForCache()]);
      if (!this.#watched) return;
      this.#charts ??= CHARTS.map(([title, series, format]) => new LineChart(byId("charts"), title, series, format));
      byId("figures").hidden = false;
      this.#show(state, cache.replicas ?? []);
      if (cache.error) note = `${cache.error}; memory and tree are not shown.`;
      if (state.draining) note = "The server is shutting down: running requests finish, and no others start.";
    } catch (error) {
      if (!(error instanceof ApiError) && error.name !== "TimeoutError") throw error;
      if (error.status === 401) return this.#lock("The server does not accept the key.");
      byId("figures").hidden ||= error.status === 403;
      note = error.status === 403
        ? "These figures are for operators: this key may chat, but not see them."
        : `${error.message}; the figures may be old.`;
    }
    byId("live-note").hidden = note === "";
    byId("live-note").textContent = note;
    if (this.#timer === timer) this.#schedule(POLL_MILLISECONDS);
  }

  #show(state, caches) {
    const sample = this.#sample(state);
    this.#showTiles(sample);
    for (const chart of this.#charts) chart.draw(this.#samples);
    this.#draw("memory", caches, drawPools);
    this.#draw("tree", caches, drawTrees);
    this.#draw("tree-table", caches, drawTable);
    this.#draw("replicas", state.replicas, (host, replicas) => host.replaceChildren(replicaTable(replicas)));
  }

  /** Draws what has changed: a screen reader or a selection may be in the rest. */
  #draw(id, data, draw) {
    const host = byId(id);
    const drawn = JSON.stringify([host.clientWidth, data], (name, value) => (name === "timestamp" ? null : value));
    if (this.#drawn.get(id) === drawn) return;
    this.#drawn.set(id, drawn);
    draw(host, data);
  }

  /** Adds a sample: sums over replicas, and rates and percentiles since earlier samples. */
  #sample(state) {
    const sum = (of) => state.replicas.reduce((total, one) => total + of(one), 0);
    const counters = {
      output: sum((one) => one.generation_tokens),
      prompt: sum((one) => one.prompt_tokens),
      cached: sum((one) => one.cached_tokens),
    };
    const sample = {
      seconds: state.seconds,
      running: sum((one) => one.load.num_running_reqs),
      waiting: sum((one) => one.load.num_waiting_reqs),
      programsLeft: sum((one) => one.load.programs_left),
      lateCompiles: sum((one) => one.compiles_after_warm_up),
      retractions: sum((one) => one.num_retractions),
      usage: Math.max(...state.replicas.map((one) => one.load.token_usage)),
      counters,
      histograms: {
        ttft: state.first_token.counts, itl: state.inter_token.counts, queue: state.queue.counts,
      },
    };
    const last = this.#samples[this.#samples.length - 1];
    const fell = Object.keys(counters).some((name) => counters[name] < last?.counters[name]);
    const restarted = fell || state.seconds < last?.seconds;
    if (restarted) this.#samples = [];
    const recent = this.#since(state.seconds - RATE_SECONDS);
    const rate = (name) => recent ? (counters[name] - recent.counters[name]) / (state.seconds - recent.seconds) : 0;
    const early = this.#since(state.seconds - WINDOW_SECONDS) ?? sample;
    const spread = (name, { bounds, counts }) => {
      const fresh = counts.map((count, at) => Math.max(count - early.histograms[name][at], 0));
      return [0.5, 0.95, 0.99].map((part) => percentile(bounds, fresh, part));
    };
    const prompts = counters.prompt - early.counters.prompt;
    Object.assign(sample, {
      output: rate("output"),
      prompt: rate("prompt"),
      hitRate: prompts > 0 ? (counters.cached - early.counters.cached) / prompts : null,
      ttft: spread("ttft", state.first_token),
      itl: spread("itl", state.inter_token),
      queue: spread("queue", state.queue),
    });
    this.#samples = [...this.#samples.filter((one) => one.seconds > state.seconds - SHOWN_SECONDS), sample];
    return sample;
  }

  /** The oldest sample after this time. */
  #since(seconds) {
    return this.#samples.find((one) => one.seconds >= seconds);
  }

  #showTiles(now) {
    const kept = (text) => text.replaceAll(" ", "\u00a0");
    const spread = (values) => `${kept(`p95 ${duration(values[1])},`)} ${kept(`p99 ${duration(values[2])}`)}`;
    this.#mostPrograms = now.programsLeft && Math.max(this.#mostPrograms, now.programsLeft);
    this.#tile("Running", short(now.running), "requests", `${short(now.retractions)} retractions`);
    this.#tile("Waiting", short(now.waiting), "requests", kept(`queue p95 ${duration(now.queue[1])}`), now.waiting > 0);
    this.#tile("Output", short(now.output), "tokens/s", `prompts ${short(now.prompt)} tokens/s`);
    this.#tile("First token", duration(now.ttft[0]), "p50", spread(now.ttft));
    this.#tile("Between tokens", duration(now.itl[0]), "p50", spread(now.itl));
    this.#tile("Cache hits", percent(now.hitRate), "of prompts", `pool ${percent(now.usage)} in use`);
    this.#tile(
      "Compiling", short(now.programsLeft), "programs left",
      now.programsLeft ? `of ${this.#mostPrograms} seen` : `${now.lateCompiles} compiled late`, now.programsLeft > 0,
    );
  }

  #tile(name, value, unit, more = "", busy = false) {
    let tile = this.#tiles.get(name);
    if (tile === undefined) {
      tile = { value: make("span"), unit: make("small"), more: make("dd", { class: "more" }), box: make("dl") };
      tile.box.append(make("dt", {}, name), make("dd", {}, tile.value, tile.unit), tile.more);
      byId("tiles").append(tile.box);
      this.#tiles.set(name, tile);
    }
    tile.value.textContent = value;
    tile.unit.textContent = unit;
    tile.more.textContent = more;
    tile.box.className = busy ? "tile busy" : "tile";
  }
}

/** Only the engines know the cache; the server has all other figures, also while no engine answers. */
async function askForCache() {
  try {
    return await ask("cache_summary", { signal: AbortSignal.timeout(ENGINE_MILLISECONDS) });
  } catch (error) {
    if (error.name === "TimeoutError") return { error: "the engine does not answer" };
    if (!(error instanceof ApiError) || error.status < 500) throw error;
    return { error: error.message };
  }
}

/** @param {number | null} part */
function percent(part) {
  return part === null ? "–" : `${(100 * part).toFixed(part < 0.1 ? 1 : 0)} %`;
}

function replicaTable(replicas) {
  const heads = ["Replica", "State", "Running", "Waiting", "Tokens/s", "Pool", "Hit rate", "Compiling", "Restarts"];
  return table(heads, replicas.map(({ load }) => [
    load.address ? `${load.dp_rank}: ${load.address}` : load.dp_rank,
    make("span", { class: `state ${load.state}`, title: load.last_end }, load.state),
    load.num_running_reqs, load.num_waiting_reqs, short(load.gen_throughput), percent(load.token_usage),
    percent(load.cache_hit_rate), load.programs_left, load.restarts,
  ]));
}

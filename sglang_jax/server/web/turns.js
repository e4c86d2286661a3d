/** Shows the turns of a conversation. */

import { copyButton, make } from "./dom.js";
import { markdown } from "./markdown.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool result" };

/** Milliseconds between two renderings of a growing reply, and per thousand characters of it. */
const PAUSE = 40;
const PAUSE_PER_THOUSAND = 8;

/** A reply that arrived faster than in this many seconds has no rate: it came in one piece. */
const MIN_SECONDS = 0.1;

/** Reasoning that the server leaves in the text: it starts with this mark. */
const MARKED_REASONING = /^\s*<think>([\s\S]*?)(?:<\/think>\s*|$)/;

/** A message of the user, or the result of a tool. */
export function writtenTurn(role, text) {
  return make(
    "article", { class: `turn ${role}` },
    make("h3", {}, NAMES[role]),
    make("div", { class: "text" }, text),
  );
}

/**
 * One reply: it grows by the deltas of a stream.
 *
 * `message`: the reply as a message of the next request; `element`: the turn.
 */
export class Reply {
  #text = make("div", { class: "text" });
  #reasoning = make("details", { class: "reasoning", hidden: true });
  #thought = make("div", { class: "thought" });
  #summary = make("summary", {}, "Reasoning");
  #calls = make("div", {});
  #about = make("div", { class: "about" });
  #content = "";
  #reasoned = "";
  #toolCalls = [];
  #begin = performance.now();
  #first = 0;
  #timer = 0;
  #usage = null;
  #end = "";

  constructor() {
    this.#reasoning.append(this.#summary, this.#thought);
    this.element = make(
      "article", { class: "turn assistant writing" },
      make("h3", {}, NAMES.assistant),
      this.#reasoning, this.#text, this.#calls, this.#about,
    );
  }

  /** The reply's text without its reasoning. */
  get content() {
    return this.#content.replace(MARKED_REASONING, "");
  }

  /** The calls of a reply that is complete; the arguments of others may be cut off. */
  get toolCalls() {
    if (this.#end !== "tool_calls") return [];
    return this.#toolCalls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  }

  get message() {
    const message = { role: "assistant", content: this.content };
    const calls = this.toolCalls;
    return calls.length ? { ...message, tool_calls: calls } : message;
  }

  get empty() {
    return !this.content && !this.toolCalls.length;
  }

  /** @param {any} event one event of `/v1/chat/completions` */
  add(event) {
    if (event.usage) this.#usage = event.usage;
    const choice = event.choices[0];
    if (choice === undefined) return;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
    if (!this.#first && (content || reasoning || calls)) this.#first = performance.now();
    this.#content += content ?? "";
    this.#reasoned += reasoning ?? "";
    for (const delta of calls ?? []) {
      const call = (this.#toolCalls[delta.index] ??= { id: delta.id, name: delta.function.name, arguments: "" });
      call.arguments += delta.function.arguments ?? "";
    }
    this.#end = choice.finish_reason ?? this.#end;
    const pause = PAUSE + PAUSE_PER_THOUSAND * this.#content.length / 1000;
    this.#timer ||= setTimeout(() => this.#show(), pause);
  }

  /**
   * Ends the reply.
   * @param {string} note why it ended, if not by itself
   * @param {Node[]} buttons what the user may do with it
   */
  finish(note, buttons) {
    this.#show();
    this.element.classList.remove("writing");
    this.#about.replaceChildren(...buttons, make("span", {}, [note, ...this.#figures()].filter(Boolean).join(" · ")));
  }

  /** Removes what the user may do only with the last reply. */
  settle() {
    for (const one of this.element.querySelectorAll(".only-last")) one.remove();
  }

  /** @param {string} message */
  fail(message) {
    this.#about.before(make("p", { class: "problem", role: "alert" }, message));
  }

  /** @param {(results: {id: string, text: string}[]) => void} send gets a result for each call */
  askForResults(send) {
    const results = new Map();
    const cards = [...this.#calls.children];
    this.#toolCalls.forEach((call, index) => {
      const field = make("textarea", { id: `result-${call.id}`, rows: 1, required: true });
      const form = make(
        "form", { class: "only-last" },
        make("label", { for: field.id }, `Result of ${call.name}`),
        field, make("button", {}, "Send result"),
      );
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        results.set(call.id, field.value);
        form.replaceWith(make("p", { class: "hint" }, "Result given."));
        if (results.size < this.#toolCalls.length) return;
        send(this.#toolCalls.map(({ id }) => ({ id, text: results.get(id) })));
      });
      cards[index].append(form);
    });
  }

  #figures() {
    const usage = this.#usage;
    if (usage === null) return [];
    const seconds = (performance.now() - this.#first) / 1000;
    const rate = usage.completion_tokens > 1 && seconds > MIN_SECONDS ? (usage.completion_tokens - 1) / seconds : 0;
    const cached = usage.prompt_tokens_details?.cached_tokens;
    return [
      this.#end === "length" ? "cut off at its maximum" : "",
      `${usage.completion_tokens} tokens`,
      rate ? `${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s` : "",
      this.#first ? `first after ${((this.#first - this.#begin) / 1000).toFixed(2)} s` : "",
      `prompt of ${usage.prompt_tokens}${cached ? `, ${cached} cached` : ""}`,
    ];
  }

  #show() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    const marked = MARKED_REASONING.exec(this.#content);
    const reasoned = this.#reasoned || (marked?.[1] ?? "");
    this.#reasoning.hidden = reasoned.trim() === "";
    this.#thought.textContent = reasoned.trim();
    this.#summary.textContent = `Reasoning (${reasoned.trim().length} characters)`;
    this.#text.replaceChildren(markdown(this.content));
    this.#calls.replaceChildren(...this.#toolCalls.map(callCard));
    this.element.dispatchEvent(new CustomEvent("grown", { bubbles: true }));
  }
}

function callCard(call) {
  return make(
    "section", { class: "call" },
    make("h4", {}, make("span", {}, "Tool call"), call.name, copyButton(() => call.arguments)),
    make("pre", { tabindex: "0" }, make("code", {}, indented(call.arguments))),
  );
}

/** Arguments are incomplete JSON while they arrive. Those that JavaScript would change, such as long numbers, stay. */
function indented(text) {
  const bare = (json) => json.replace(/\s+/g, "");
  try {
    const shown = JSON.stringify(JSON.parse(text), null, 2);
    return bare(shown) === bare(text) ? shown : text;
  } catch {
    return text;
  }
}

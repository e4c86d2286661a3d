/** The chat: it sends the conversation, and shows the reply as it arrives. */

import { ApiError, stream } from "./api.js";
import { byId, copyButton, make } from "./dom.js";
import { describeSettings, requestBody, SettingError } from "./settings.js";
import { Reply, writtenTurn } from "./turns.js";

/** How close to its end, in pixels, the conversation must be to follow a growing reply. */
const NEAR_END = 80;

export class Chat {
  #turns = byId("turns");
  #prompt = byId("prompt");
  #messages = [];
  #reply = null;
  #running = null;
  #following = true;
  #lock;

  /** @param {() => void} lock asks for the key */
  constructor(lock) {
    this.#lock = lock;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.#prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#submit();
    });
    this.#prompt.addEventListener("input", () => this.#fitPrompt());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#running) this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("new").addEventListener("click", () => {
      this.clear();
      this.#prompt.focus();
    });
    this.#turns.addEventListener("grown", () => this.#follow());
    this.#turns.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.#turns;
      this.#following = scrollHeight - scrollTop - clientHeight < NEAR_END;
    });
    this.clear();
  }

  /** Shows the defaults of the served model. @param {any} model the answer of `/model_info` */
  describe(model) {
    describeSettings(model);
  }

  /** Ends the reply, and empties the conversation. */
  clear() {
    this.stop();
    this.#running = null;
    this.#messages = [];
    this.#reply = null;
    this.#turns.replaceChildren(
      make("div", { class: "welcome" }, make("h2", {}, "Ask something"), "The conversation stays in this tab."),
    );
    byId("spoken").textContent = "";
    this.#busy(false);
  }

  stop() {
    this.#running?.abort();
  }

  #submit() {
    const text = this.#prompt.value.trim();
    if (text === "" || this.#running) return;
    this.#prompt.value = "";
    this.#fitPrompt();
    this.#say({ role: "user", content: text });
    this.#generate();
  }

  #say(message) {
    this.#turns.querySelector(".welcome")?.remove();
    this.#messages.push(message);
    this.#turns.append(writtenTurn(message.role, message.content));
    this.#following = true;
    this.#follow();
  }

  async #generate() {
    this.#reply?.settle();
    const reply = new Reply();
    const running = new AbortController();
    this.#reply = reply;
    this.#running = running;
    this.#turns.append(reply.element);
    this.#busy(true);
    byId("spoken").textContent = "The model is writing.";
    let note = "";
    let problem = "";
    try {
      const body = requestBody(this.#messages);
      for await (const event of stream("v1/chat/completions", body, running.signal)) reply.add(event);
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) return this.#lock("The server does not accept the key.");
      if (error instanceof SettingError) showSetting(error.field);
      else if (error.name === "AbortError") note = "stopped";
      else if (!(error instanceof ApiError)) throw error;
      if (!note) problem = error.message;
    }
    if (this.#running !== running) return; // the conversation was emptied meanwhile
    this.#running = null;
    this.#end(reply, note, problem);
  }

  #end(reply, note, problem) {
    const before = this.#messages.length;
    reply.finish(note, [
      ...(reply.content ? [copyButton(() => reply.content)] : []),
      make(
        "button",
        { type: "button", class: "quiet only-last", onclick: () => this.#again(reply, before) },
        problem ? "Try again" : "Regenerate",
      ),
    ]);
    if (problem) reply.fail(problem);
    if (!reply.empty) this.#messages.push(reply.message);
    if (!problem && !note && reply.toolCalls.length) {
      reply.askForResults((results) => {
        for (const { id, text } of results) this.#say({ role: "tool", tool_call_id: id, content: text });
        this.#generate();
      });
    }
    const calls = reply.toolCalls.map((call) => `Tool call: ${call.function.name}.`);
    byId("spoken").textContent = problem ? "" : [note ? "Stopped." : "", reply.content, ...calls].join(" ").trim();
    this.#busy(false);
    this.#follow();
  }

  /** Replaces the last reply by another. */
  #again(reply, before) {
    if (this.#running) return;
    this.#messages.length = before;
    reply.element.remove();
    this.#generate();
    this.#prompt.focus();
  }

  #busy(busy) {
    byId("stop").hidden = !busy;
    byId("send").hidden = busy;
    this.#turns.setAttribute("aria-busy", String(busy));
  }

  #follow() {
    if (this.#following) this.#turns.scrollTop = this.#turns.scrollHeight;
  }

  #fitPrompt() {
    this.#prompt.style.height = "auto";
    this.#prompt.style.height = `${this.#prompt.scrollHeight}px`;
  }
}

function showSetting(id) {
  byId("settings").open = true;
  byId(id).focus();
}

/** Starts the page: the key, the views, the colours. */

import { ApiError, ask, hasKey, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { Live } from "./live.js";

const THEMES = { auto: "as the system", light: "light", dark: "dark" };
const RETRY_MILLISECONDS = 3000;

/** Why there is no chat, with a model for something else. */
const VECTORS = "This server gives vectors of texts, and has no chat. Programs send texts to POST /v1/embeddings.";
const LABELS = "This server gives scores of labels, and has no chat. Programs send texts to POST /classify.";

let tabs = [];
const chat = new Chat(lock);
const live = new Live(lock);

function show(tab) {
  for (const one of tabs) {
    const selected = one === tab;
    one.setAttribute("aria-selected", String(selected));
    one.tabIndex = selected ? 0 : -1;
    byId(one.getAttribute("aria-controls")).hidden = !selected;
  }
  live.watch(tab.id === "tab-live");
  if (location.hash.slice(1) !== tab.id.slice(4)) history.replaceState(null, "", `#${tab.id.slice(4)}`);
}

function moveBetweenTabs(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  let next = { Home: 0, End: tabs.length - 1 }[event.key];
  if (step !== undefined) next = (tabs.indexOf(event.target) + step + tabs.length) % tabs.length;
  if (next === undefined) return;
  event.preventDefault();
  show(tabs[next]);
  tabs[next].focus();
}

/** Hides everything and asks for the key. */
function lock(message = "") {
  live.watch(false);
  chat.clear();
  setKey("");
  for (const id of ["tabs", "chat", "live", "forget", "purpose"]) byId(id).hidden = true;
  byId("model").textContent = "";
  byId("locked").hidden = false;
  tell("key-error", message);
  byId("key").value = "";
  byId("key").focus();
}

function tell(id, message) {
  byId(id).hidden = message === "";
  byId(id).textContent = message;
}

/** Shows the views, if the server accepts the key. */
async function start(refusal = "") {
  let models, model;
  try {
    models = await ask("v1/models");
    model = await ask("model_info");
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) return lock(refusal);
    tell("trouble", `${sentence(error.message)} Trying again.`);
    setTimeout(start, RETRY_MILLISECONDS);
    return;
  }
  tell("trouble", "");
  byId("locked").hidden = true;
  describeModel(model);
  byId("tabs").hidden = false;
  byId("forget").hidden = !hasKey();
  byId("model").textContent = models.data[0].id;
  document.title = `${models.data[0].id} · sglang-jax`;
  const shown = tabs.find((tab) => tab.id === `tab-${location.hash.slice(1)}`) ?? tabs[0];
  show(shown);
  if (shown.id === "tab-chat") byId("prompt").focus();
}

/** Shows what the model is for: only a model that generates text can chat. */
function describeModel(model) {
  const chats = model.is_generation;
  tabs = [...(chats ? [byId("tab-chat")] : []), byId("tab-live")];
  byId("tab-chat").hidden = !chats;
  byId("chat").hidden = true;
  tell("purpose", chats ? "" : model.pooler.labels.length ? LABELS : VECTORS);
  chat.describe(model);
}

function sentence(message) {
  return `${message.charAt(0).toUpperCase()}${message.slice(1)}.`;
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").setAttribute("aria-label", `Colours: ${THEMES[name]}`);
  byId("theme-name").textContent = name.charAt(0).toUpperCase() + name.slice(1);
  localStorage.setItem("theme", name);
}

setTheme(localStorage.getItem("theme") in THEMES ? localStorage.getItem("theme") : "auto");
byId("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
});
byId("locked").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  start("The server does not know this key.");
});
byId("forget").addEventListener("click", () => lock());
for (const tab of [byId("tab-chat"), byId("tab-live")]) {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", moveBetweenTabs);
}
start();

/** The server's API. The key goes only into a header, and is kept only in this tab. */

/** The server's address; the page may be behind a proxy's prefix. */
const ROOT = new URL("..", import.meta.url);
const STORED = `key of ${ROOT.pathname}`;

/** What a header can carry. No server has another key. */
const SENDABLE = /^[^\0\r\n\u0100-\uffff]*$/;

let key = sessionStorage.getItem(STORED) ?? "";

/** An answer with an error: `status` is 0 if there was none at all. */
export class ApiError extends Error {
  constructor(message, status, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function hasKey() {
  return key !== "";
}

/** @param {string} value empty to forget the key */
export function setKey(value) {
  key = value;
  if (value) sessionStorage.setItem(STORED, value);
  else sessionStorage.removeItem(STORED);
}

/**
 * Sends a request; with a body, a POST.
 * @param {string} path relative to the server's address
 * @param {{body?: object, signal?: AbortSignal}} options
 * @returns {Promise<Response>} an answer with status 200; throws `ApiError`
 */
async function send(path, { body, signal } = {}) {
  if (!SENDABLE.test(key)) throw new ApiError("no header can carry this key", 401);
  const headers = { Accept: "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(new URL(path, ROOT), {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "same-origin",
      redirect: "error",
    });
  } catch (error) {
    if (error.name === "TypeError") throw new ApiError("the server does not answer", 0);
    throw error;
  }
  if (!answer.ok) throw errorOf(await answer.text(), answer.status);
  return answer;
}

/** The error of an answer. A proxy's may be a page, or JSON of another shape. */
function errorOf(text, status) {
  const error = jsonOf(text)?.error;
  if (typeof error?.message === "string") return new ApiError(error.message, status, error.code);
  return new ApiError(`the server answered with status ${status}`, status);
}

/** @returns {any} undefined for what is not JSON */
function jsonOf(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** @returns {Promise<any>} the answer's JSON */
export async function ask(path, options = {}) {
  const told = jsonOf(await (await send(path, options)).text());
  if (told === undefined) throw new ApiError("the answer is not this server's: it is not JSON", 0);
  return told;
}

/**
 * Yields the events of a stream. Throws `ApiError`, also for an error that is the last event, and for a stream that
 * ends without its last event.
 */
export async function* stream(path, body, signal) {
  const reader = (await send(path, { body, signal })).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("the connection to the server was lost", 0);
    }
    if (piece.done) throw new ApiError("the connection to the server was lost", 0);
    const events = (rest + piece.value).split("\n\n");
    rest = events.pop() ?? "";
    for (const event of events) {
      if (event.startsWith(":")) continue; // a comment, which some proxies send
      const data = event.replace(/^data: ?/, "");
      if (data === "[DONE]") return;
      const told = jsonOf(data);
      if (told === undefined) throw new ApiError("the stream is not this server's: an event is not JSON", 0);
      if (told.error) throw new ApiError(told.error.message, 200, told.error.code);
      yield told;
    }
  }
}

/** The server's API. The key goes only into a header, and is kept only in this tab. */

/** The server's address; the page may be behind a proxy's prefix. */
const ROOT = new URL("..", import.meta.url);
const STORED = `key of ${ROOT.pathname}`;

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

function errorOf(text, status) {
  try {
    const { message, code } = JSON.parse(text).error;
    return new ApiError(message, status, code);
  } catch {
    return new ApiError(`the server answered with status ${status}`, status);
  }
}

/** @returns {Promise<any>} the answer's JSON */
export async function ask(path, options = {}) {
  return (await send(path, options)).json();
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
      const data = event.replace(/^data: ?/, "");
      if (data === "[DONE]") return;
      const told = JSON.parse(data);
      if (told.error) throw new ApiError(told.error.message, 200, told.error.code);
      yield told;
    }
  }
}

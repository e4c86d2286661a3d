// Ollama's JavaScript client: chats, completions, schemas, thinking, and what it asks about models.
import assert from "node:assert/strict";

import { Ollama } from "ollama";

import { CAPITAL, isWeather, KEY, MODEL, NO_SUCH_MODEL, QUESTION, run, URL, WEATHER } from "./checks.mjs";

const ollama = new Ollama({ host: URL, headers: { Authorization: `Bearer ${KEY}` } });
const messages = [{ role: "user", content: CAPITAL }];
const options = { temperature: 0, num_predict: 24 };

await run({
  async chat() {
    const answer = await ollama.chat({ model: MODEL, messages, options });
    assert.ok(answer.message.content);
    assert.ok(answer.done && answer.eval_count > 0);
  },
  async chat_stream() {
    const whole = await ollama.chat({ model: MODEL, messages, options });
    const parts = [];
    for await (const part of await ollama.chat({ model: MODEL, messages, options, stream: true })) parts.push(part);
    assert.ok(parts.length > 2);
    assert.equal(parts.map((part) => part.message.content).join(""), whole.message.content);
    assert.ok(parts.at(-1).done);
  },
  async generate() {
    assert.ok((await ollama.generate({ model: MODEL, prompt: CAPITAL, options })).response);
  },
  async structured() {
    const answer = await ollama.chat({ model: MODEL, messages: [{ role: "user", content: QUESTION }], format: WEATHER });
    isWeather(answer.message.content);
  },
  async thinking() {
    const answer = await ollama.chat({ model: MODEL, messages, think: true, options });
    assert.ok(answer.message.thinking);
  },
  async models() {
    assert.deepEqual((await ollama.list()).models.map((model) => model.model), [MODEL]);
    assert.ok((await ollama.show({ model: MODEL })).capabilities.includes("completion"));
    assert.equal((await ollama.ps()).models.length, 1);
  },
  async errors() {
    const failed = (status) => (error) => error.name === "ResponseError" && error.status_code === status;
    await assert.rejects(ollama.chat({ model: NO_SUCH_MODEL, messages }), failed(404));
    await assert.rejects(ollama.chat({ model: MODEL, messages, options: { top_p: 7 } }), failed(400));
  },
});

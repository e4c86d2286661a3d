// Anthropic's JavaScript client: messages, its stream helper, tools, thinking, and counts of tokens.
import assert from "node:assert/strict";

import Anthropic from "@anthropic-ai/sdk";

import { CAPITAL, isWeather, KEY, MODEL, NO_SUCH_MODEL, QUESTION, run, URL, WEATHER } from "./checks.mjs";

const client = new Anthropic({ baseURL: URL, apiKey: KEY, maxRetries: 0 });
const messages = [{ role: "user", content: CAPITAL }];
const tools = [{ name: "get_weather", description: "The weather of a city", input_schema: WEATHER }];
const textOf = (message) => message.content.map((block) => (block.type === "text" ? block.text : "")).join("");

await run({
  async messages() {
    const answer = await client.messages.create({ model: MODEL, system: "Be brief.", messages, max_tokens: 24 });
    assert.ok(textOf(answer));
    assert.ok(answer.usage.output_tokens > 0);
  },
  async stream() {
    const stream = client.messages.stream({ model: MODEL, messages, max_tokens: 24 });
    const pieces = [];
    stream.on("text", (piece) => pieces.push(piece));
    const final = await stream.finalMessage();
    assert.ok(pieces.length > 1);
    assert.equal(pieces.join(""), textOf(final));
  },
  async tools() {
    const answer = await client.messages.create({
      model: MODEL, messages: [{ role: "user", content: QUESTION }], tools, max_tokens: 80,
      tool_choice: { type: "any", disable_parallel_tool_use: true },
    });
    assert.equal(answer.stop_reason, "tool_use");
    isWeather(answer.content.find((block) => block.type === "tool_use").input);
  },
  async tools_stream() {
    const stream = client.messages.stream({
      model: MODEL, messages: [{ role: "user", content: QUESTION }], tools, max_tokens: 80,
      tool_choice: { type: "tool", name: "get_weather", disable_parallel_tool_use: true },
    });
    const parts = [];
    stream.on("inputJson", (part) => parts.push(part));
    const final = await stream.finalMessage();
    isWeather(parts.join(""));
    isWeather(final.content.find((block) => block.type === "tool_use").input);
  },
  // The chat template of this test starts a reply within its thinking, where the embedded model stays.
  async thinking() {
    const answer = await client.messages.create({
      model: MODEL, messages, thinking: { type: "enabled", budget_tokens: 1024 }, max_tokens: 1032, stop_sequences: ["."],
    });
    assert.equal(answer.content[0].type, "thinking");
    assert.ok(answer.content[0].thinking);
  },
  async count_tokens() {
    assert.ok((await client.messages.countTokens({ model: MODEL, messages })).input_tokens > 0);
  },
  async errors() {
    const fields = { messages, max_tokens: 4 };
    await assert.rejects(client.messages.create({ ...fields, model: NO_SUCH_MODEL }), Anthropic.NotFoundError);
    await assert.rejects(client.messages.create({ ...fields, model: MODEL, max_tokens: -1 }), Anthropic.BadRequestError);
    const stranger = new Anthropic({ baseURL: URL, apiKey: "wrong", maxRetries: 0 });
    await assert.rejects(stranger.messages.create({ ...fields, model: MODEL }), Anthropic.AuthenticationError);
  },
});

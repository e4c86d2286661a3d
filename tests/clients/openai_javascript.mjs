// OpenAI's JavaScript client: chat, completions, models, responses, files and batches.
import assert from "node:assert/strict";
import { setTimeout as sleep } from "node:timers/promises";

import OpenAI, { toFile } from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

import { CAPITAL, CITIES, isWeather, KEY, MODEL, NO_SUCH_MODEL, QUESTION, run, URL, WEATHER } from "./checks.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY, maxRetries: 0 });
const messages = [{ role: "user", content: CAPITAL }];
const named = { name: "get_weather", description: "The weather of a city", parameters: WEATHER, strict: true };
const tools = [{ type: "function", function: named }];
const flatTools = [{ type: "function", ...named }];
const Weather = z.object({ city: z.enum(CITIES), days: z.int().min(1).max(5) });

async function upload(count) {
  const body = { model: MODEL, messages, max_tokens: 4 };
  const line = (number) => ({ custom_id: `line-${number}`, method: "POST", url: "/v1/chat/completions", body });
  const text = Array.from({ length: count }, (_, number) => JSON.stringify(line(number)) + "\n").join("");
  return (await client.files.create({ file: await toFile(Buffer.from(text), "questions.jsonl"), purpose: "batch" })).id;
}

await run({
  async models() {
    const found = [];
    for await (const model of client.models.list()) found.push(model.id);
    assert.ok(found.includes(MODEL));
  },
  async chat() {
    const answer = await client.chat.completions.create({ model: MODEL, messages, max_tokens: 24, temperature: 0 });
    assert.ok(answer.choices[0].message.content);
    assert.ok(answer.usage.total_tokens > 0);
  },
  async chat_stream() {
    const fields = { model: MODEL, messages, max_tokens: 24, temperature: 0 };
    const whole = await client.chat.completions.create(fields);
    const stream = await client.chat.completions.create({ ...fields, stream: true, stream_options: { include_usage: true } });
    const pieces = [];
    let usage = null;
    for await (const chunk of stream) {
      pieces.push(chunk.choices[0]?.delta?.content ?? "");
      usage = chunk.usage ?? usage;
    }
    assert.equal(pieces.join(""), whole.choices[0].message.content);
    assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens);
  },
  async tools() {
    const answer = await client.chat.completions.create({
      model: MODEL, messages: [{ role: "user", content: QUESTION }], tools, tool_choice: "required",
      parallel_tool_calls: false, max_tokens: 80,
    });
    const [call] = answer.choices[0].message.tool_calls;
    isWeather(call.function.arguments);
  },
  async structured_parse() {
    const answer = await client.chat.completions.parse({
      model: MODEL, messages: [{ role: "user", content: QUESTION }], max_tokens: 60,
      response_format: zodResponseFormat(Weather, "weather"),
    });
    isWeather(answer.choices[0].message.parsed);
  },
  async completions() {
    const answer = await client.completions.create({ model: MODEL, prompt: "One, two,", max_tokens: 4, logprobs: 2 });
    assert.ok(answer.choices[0].text);
    assert.equal(answer.choices[0].logprobs.token_logprobs.length, 4);
  },
  async errors() {
    await assert.rejects(client.chat.completions.create({ model: NO_SUCH_MODEL, messages }), OpenAI.NotFoundError);
    await assert.rejects(client.chat.completions.create({ model: MODEL, messages, top_p: 7 }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, "top_p");
      return true;
    });
    const stranger = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "wrong", maxRetries: 0 });
    await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
  },
  async responses() {
    const answer = await client.responses.create({
      model: MODEL, instructions: "Be brief.", input: CAPITAL, max_output_tokens: 24, store: false,
    });
    assert.ok(answer.output_text);
    assert.ok(answer.usage.total_tokens > 0);
  },
  async responses_stream() {
    const fields = { model: MODEL, input: CAPITAL, max_output_tokens: 24, temperature: 0, store: false };
    const whole = await client.responses.create(fields);
    const stream = client.responses.stream(fields);
    const pieces = [];
    for await (const event of stream) if (event.type === "response.output_text.delta") pieces.push(event.delta);
    const final = await stream.finalResponse();
    assert.equal(pieces.join(""), whole.output_text);
    assert.equal(final.output_text, whole.output_text);
  },
  async responses_tools() {
    const question = { role: "user", content: QUESTION };
    const fields = { model: MODEL, tools: flatTools, parallel_tool_calls: false, max_output_tokens: 80, store: false };
    const answer = await client.responses.create({ ...fields, input: [question], tool_choice: "required" });
    const call = answer.output.find((item) => item.type === "function_call");
    isWeather(call.arguments);
    const result = { type: "function_call_output", call_id: call.call_id, output: "3 sunny days" };
    const input = [question, ...answer.output, result];
    assert.ok((await client.responses.create({ ...fields, input, tool_choice: "none" })).output_text);
  },
  async responses_parse() {
    const answer = await client.responses.parse({
      model: MODEL, input: QUESTION, max_output_tokens: 60, store: false, text: { format: zodTextFormat(Weather, "weather") },
    });
    isWeather(answer.output_parsed);
  },
  async files() {
    const id = await upload(2);
    const found = await client.files.retrieve(id);
    assert.equal((await (await client.files.content(id)).text()).length, found.bytes);
    assert.ok((await client.files.delete(id)).deleted);
    await assert.rejects(client.files.retrieve(id), OpenAI.NotFoundError);
  },
  async batches() {
    let batch = await client.batches.create({
      input_file_id: await upload(3), endpoint: "/v1/chat/completions", completion_window: "24h",
    });
    for (let waited = 0; ["validating", "in_progress", "finalizing"].includes(batch.status); waited += 1) {
      assert.ok(waited < 600, "the batch takes too long");
      await sleep(200);
      batch = await client.batches.retrieve(batch.id);
    }
    assert.equal(batch.status, "completed");
    const text = await (await client.files.content(batch.output_file_id)).text();
    assert.equal(text.trim().split("\n").length, 3);
  },
});

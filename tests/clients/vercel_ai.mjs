// The AI SDK with the providers of OpenAI (responses by default, and chats), of servers like it, and of Anthropic.
import assert from "node:assert/strict";

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

import { CAPITAL, CITIES, isWeather, KEY, MODEL, NO_SUCH_MODEL, QUESTION, run, URL } from "./checks.mjs";

const baseURL = `${URL}/v1`;
const openai = createOpenAI({ baseURL, apiKey: KEY });
const compatible = createOpenAICompatible({
  name: "here", baseURL, apiKey: KEY, includeUsage: true, supportsStructuredOutputs: true,
});
const anthropic = createAnthropic({ baseURL, apiKey: KEY });
const Weather = z.object({ city: z.enum(CITIES), days: z.int().min(1).max(5) });
const tools = { get_weather: tool({ description: "The weather of a city", inputSchema: Weather }) };
const few = { maxOutputTokens: 80, maxRetries: 0 };

async function talk(model) {
  const answer = await generateText({ model, prompt: CAPITAL, ...few });
  assert.ok(answer.text);
  assert.ok(answer.usage.outputTokens > 0);
  const errors = [];
  const result = streamText({ model, prompt: CAPITAL, ...few, onError: ({ error }) => errors.push(error) });
  const pieces = [];
  for await (const piece of result.textStream) pieces.push(piece);
  assert.deepEqual(errors, []);
  assert.ok(pieces.length > 1);
  assert.equal(pieces.join(""), await result.text);
  assert.ok((await result.usage).outputTokens > 0);
}

async function callTool(model) {
  const { toolCalls } = await generateText({ model, prompt: QUESTION, tools, toolChoice: "required", ...few });
  isWeather(toolCalls[0].input);
}

async function structured(model) {
  const { output } = await generateText({ model, prompt: QUESTION, output: Output.object({ schema: Weather }), ...few });
  isWeather(output);
}

async function refused(model) {
  await assert.rejects(generateText({ model, prompt: CAPITAL, ...few }), (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 404);
    return true;
  });
}

await run({
  compatible_chat: () => talk(compatible(MODEL)),
  compatible_tools: () => callTool(compatible(MODEL)),
  compatible_structured: () => structured(compatible(MODEL)),
  compatible_errors: () => refused(compatible(NO_SUCH_MODEL)),
  openai_chat: () => talk(openai.chat(MODEL)),
  openai_chat_tools: () => callTool(openai.chat(MODEL)),
  openai_completions: async () => {
    assert.ok((await generateText({ model: openai.completion(MODEL), prompt: "One, two,", ...few })).text);
  },
  responses: () => talk(openai(MODEL)),
  responses_tools: () => callTool(openai(MODEL)),
  responses_structured: () => structured(openai(MODEL)),
  anthropic_messages: () => talk(anthropic(MODEL)),
  anthropic_tools: () => callTool(anthropic(MODEL)),
});

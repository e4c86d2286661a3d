// What the drivers of JavaScript clients share. A driver is a script of checks: each prints one line of JSON, so that
// one failure hides no other.
import assert from "node:assert/strict";

// The server's root, without `/v1` and without a slash at the end.
export const URL = process.env.CLIENT_TEST_URL;
export const KEY = process.env.CLIENT_TEST_KEY;
export const MODEL = process.env.CLIENT_TEST_MODEL;
export const NO_SUCH_MODEL = "no-such-model";

export const CITIES = ["Oslo", "Paris", "Rome"];
export const QUESTION = "What is the weather in Paris for the next 3 days?";
export const CAPITAL = "What is the capital of France?";
// The arguments of the tool `get_weather`, and the answer that checks of structured output ask for.
export const WEATHER = {
  type: "object",
  properties: { city: { type: "string", enum: CITIES }, days: { type: "integer", minimum: 1, maximum: 5 } },
  required: ["city", "days"],
  additionalProperties: false,
};

// Asserts that the arguments follow WEATHER, given as an object or as its text.
export function isWeather(given) {
  const value = typeof given === "string" ? JSON.parse(given) : given;
  assert.deepEqual(Object.keys(value).sort(), ["city", "days"]);
  assert.ok(CITIES.includes(value.city), value.city);
  assert.ok(Number.isInteger(value.days) && value.days >= 1 && value.days <= 5, String(value.days));
}

// Runs checks in order, an object of names and async functions; or those that are named on the command line.
export async function run(checks) {
  const named = process.argv.slice(2);
  for (const name of named.length ? named : Object.keys(checks)) {
    let error = "";
    try {
      await checks[name]();
    } catch (thrown) {
      console.error(thrown);
      error = `${thrown?.name ?? "thrown"}: ${thrown?.message ?? thrown}`;
    }
    console.log(JSON.stringify({ check: name, error }));
  }
}

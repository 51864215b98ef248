// The `openai` package for Node.

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { WRONG_KEY, ask, call, cases, failureOf, key, print, run, v1 } from "./report.mjs";

const client = new OpenAI({ baseURL: v1, apiKey: key, maxRetries: 0 });
const model = cases.model;
const tools = [{ type: "function", function: cases.tool }];
const Person = z.object({ name: z.string(), age: z.number().int() });

const create = (name, fields = {}) => client.chat.completions.create({ model, messages: ask(name), ...fields });

function usageOf(usage) {
  return {
    prompt: usage.prompt_tokens,
    completion: usage.completion_tokens,
    cached: usage.prompt_tokens_details.cached_tokens,
  };
}

function answerOf(completion) {
  const [choice] = completion.choices;
  return {
    text: choice.message.content,
    finish: choice.finish_reason,
    usage: usageOf(completion.usage),
    id: completion.id,
  };
}

function callsOf(completion) {
  const [choice] = completion.choices;
  const calls = choice.message.tool_calls.map((each) => call(each.function.name, each.function.arguments, each.id));
  return { calls, finish: choice.finish_reason };
}

// The completion that the stream helper puts together.
async function helped(name, fields = {}) {
  const stream = client.chat.completions.stream({
    model,
    messages: ask(name),
    stream_options: { include_usage: true },
    ...fields,
  });
  return stream.finalChatCompletion();
}

async function failure(what) {
  const error = await failureOf(what);
  return { status: error.status, kind: error.constructor.name, code: error.code, text: error.message };
}

await run("chat", async () => answerOf(await create("chat")));

await run("stream", async () => {
  const stream = await create("chat", { stream: true, stream_options: { include_usage: true } });
  let text = "";
  let finish = null;
  let last = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    finish = chunk.choices[0]?.finish_reason ?? finish;
    last = chunk;
  }
  return { text, finish, usage: usageOf(last.usage), id: last.id };
});

await run("helper", async () => answerOf(await helped("chat")));

await run("reasoning", async () => {
  const { message } = (await create("reasoning")).choices[0];
  return { text: message.content, reasoning: message.reasoning_content };
});

await run("reasoning_stream", async () => {
  let text = "";
  let reasoning = "";
  for await (const chunk of await create("reasoning", { stream: true })) {
    text += chunk.choices[0].delta.content ?? "";
    reasoning += chunk.choices[0].delta.reasoning_content ?? "";
  }
  return { text, reasoning };
});

await run("one_call", async () => callsOf(await create("one_call", { tools })));
await run("one_call_stream", async () => callsOf(await helped("one_call", { tools })));
await run("two_calls", async () => callsOf(await create("two_calls", { tools, parallel_tool_calls: true })));
await run("two_calls_stream", async () => callsOf(await helped("two_calls", { tools, parallel_tool_calls: true })));

await run("tool_result", async () => {
  const { message } = (await create("one_call", { tools })).choices[0];
  const results = message.tool_calls.map((each) => ({
    role: "tool",
    tool_call_id: each.id,
    content: cases.tool_results.Paris,
  }));
  const completion = await create("one_call", { messages: [...ask("one_call"), message, ...results], tools });
  return { text: completion.choices[0].message.content };
});

await run("schema", async () => {
  const completion = await client.chat.completions.parse({
    model,
    messages: ask("schema"),
    response_format: zodResponseFormat(Person, "person"),
  });
  return { value: completion.choices[0].message.parsed };
});

await run("schema_stream", async () => {
  const completion = await helped("schema", { response_format: zodResponseFormat(Person, "person") });
  return { value: completion.choices[0].message.parsed };
});

await run("too_long", () => failure(() => create("too_long")));
await run("too_long_stream", () => failure(() => create("too_long", { stream: true })));
await run("wrong_key", () =>
  failure(() => new OpenAI({ baseURL: v1, apiKey: WRONG_KEY, maxRetries: 0 }).models.list()),
);
await run("busy", () => failure(() => create("busy")));

await run("busy_once", async () => {
  const patient = new OpenAI({ baseURL: v1, apiKey: key, maxRetries: 2 });
  const completion = await patient.chat.completions.create({ model, messages: ask("busy_once") });
  return { text: completion.choices[0].message.content };
});

await run("models", async () => {
  const models = [];
  for await (const each of client.models.list()) models.push(each.id);
  return { models };
});

await run("responses", async () => {
  const response = await client.responses.create({ model, input: cases.prompts.chat });
  const { usage } = response;
  return {
    text: response.output_text,
    usage: {
      prompt: usage.input_tokens,
      completion: usage.output_tokens,
      cached: usage.input_tokens_details.cached_tokens,
    },
  };
});

await run("responses_stream", async () => {
  let text = "";
  for await (const event of await client.responses.create({ model, input: cases.prompts.chat, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  return { text };
});

print("openai");

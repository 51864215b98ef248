// The Vercel AI SDK, with its provider for compatible servers or the one for OpenAI in chat mode (the variant).

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, isStepCount, jsonSchema, streamText, tool } from "ai";
import { WRONG_KEY, call, cases, failureOf, key, print, run, v1, variant } from "./report.mjs";

function modelWith(apiKey) {
  if (variant === "openai") return createOpenAI({ baseURL: v1, apiKey }).chat(cases.model);
  return createOpenAICompatible({
    name: "s2moe",
    baseURL: v1,
    apiKey,
    includeUsage: true,
    supportsStructuredOutputs: true,
  })(cases.model);
}

const model = modelWith(key);
const parameters = { description: cases.tool.description, inputSchema: jsonSchema(cases.tool.parameters) };
const asked = { [cases.tool.name]: tool(parameters) };
const answered = { [cases.tool.name]: tool({ ...parameters, execute: async ({ city }) => cases.tool_results[city] }) };

const generate = (name, fields = {}) =>
  generateText({ model, prompt: cases.prompts[name], maxRetries: 0, ...fields });

// What is left when the stream has been read; an error in it is thrown.
async function streamed(name, fields = {}) {
  const result = streamText({ model, prompt: cases.prompts[name], maxRetries: 0, onError: () => {}, ...fields });
  for await (const part of result.fullStream) {
    if (part.type === "error") throw part.error;
  }
  const [text, reasoningText, finishReason, usage, toolCalls, response] = await Promise.all([
    result.text,
    result.reasoningText,
    result.finishReason,
    result.usage,
    result.toolCalls,
    result.response,
  ]);
  return { text, reasoningText, finishReason, usage, toolCalls, response, result };
}

function answerOf({ text, finishReason, usage, response }) {
  return {
    text,
    finish: finishReason,
    usage: {
      prompt: usage.inputTokens,
      completion: usage.outputTokens,
      cached: usage.inputTokenDetails?.cacheReadTokens ?? usage.cachedInputTokens,
    },
    id: response.id,
  };
}

const thoughtOf = ({ text, reasoningText }) => ({ text, reasoning: reasoningText });

const callsOf = ({ toolCalls, finishReason }) => ({
  calls: toolCalls.map((each) => call(each.toolName, each.input, each.toolCallId)),
  finish: finishReason,
});

async function failure(what) {
  const error = await failureOf(what);
  return { status: error.statusCode, text: error.message, retryable: error.isRetryable };
}

await run("chat", async () => answerOf(await generate("chat")));
await run("stream", async () => answerOf(await streamed("chat")));
if (variant !== "openai") {
  await run("reasoning", async () => thoughtOf(await generate("reasoning")));
  await run("reasoning_stream", async () => thoughtOf(await streamed("reasoning")));
}
await run("one_call", async () => callsOf(await generate("one_call", { tools: asked })));
await run("one_call_stream", async () => callsOf(await streamed("one_call", { tools: asked })));
await run("two_calls", async () => callsOf(await generate("two_calls", { tools: asked })));
await run("two_calls_stream", async () => callsOf(await streamed("two_calls", { tools: asked })));

await run("tool_result", async () => {
  const { text } = await generate("one_call", { tools: answered, stopWhen: isStepCount(3) });
  return { text };
});

await run("tool_result_stream", async () => {
  const { text } = await streamed("two_calls", { tools: answered, stopWhen: isStepCount(3) });
  return { text };
});

const output = Output.object({ schema: jsonSchema(cases.schema) });

await run("schema", async () => ({ value: (await generate("schema", { output })).output }));
await run("schema_stream", async () => ({ value: await (await streamed("schema", { output })).result.output }));

await run("too_long", () => failure(() => generate("too_long")));
await run("too_long_stream", () => failure(() => streamed("too_long")));
await run("wrong_key", () => failure(() => generate("chat", { model: modelWith(WRONG_KEY) })));
await run("busy", () => failure(() => generate("busy")));
await run("busy_once", async () => ({ text: (await generate("busy_once", { maxRetries: 2 })).text }));

print(variant === "openai" ? "@ai-sdk/openai" : "@ai-sdk/openai-compatible");

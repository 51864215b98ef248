// What the programs for Node clients share; see report.py. Started as `node PROGRAM URL KEY CASES.json [VARIANT]`.

import { readFileSync } from "node:fs";
import { join } from "node:path";

export const WRONG_KEY = "wrong-key";
export const [url, key, casesPath, variant] = process.argv.slice(2);
export const v1 = `${url}/v1`;
export const cases = JSON.parse(readFileSync(casesPath, "utf8"));

const seen = {};

export function ask(name) {
  return [{ role: "user", content: cases.prompts[name] }];
}

export async function run(name, what) {
  try {
    seen[name] = (await what()) ?? null;
  } catch (error) {
    seen[name] = { failed: String(error?.stack ?? error) };
  }
}

// Prints the report with the version of the package.
export function print(packageName) {
  const path = join(process.cwd(), "node_modules", packageName, "package.json");
  const { version } = JSON.parse(readFileSync(path, "utf8"));
  console.log(JSON.stringify({ version, seen }));
}

// A tool call; arguments are an object however the client gives them.
export function call(name, given, id) {
  return { name, arguments: typeof given === "string" ? JSON.parse(given) : given, id };
}

// The error that `what` ends with.
export async function failureOf(what) {
  try {
    await what();
  } catch (error) {
    return error;
  }
  throw new Error("it did not fail");
}

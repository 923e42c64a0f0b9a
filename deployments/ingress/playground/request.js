// Requests to the API, from what the form says.
//
// Texts that are no numbers are sent as they are: the API says what is wrong with them.

import { ROOT } from "./api.js";

/** How many likely tokens of each distribution the API is asked for: vLLM's default maximum. */
export const ALTERNATIVES = 20;

const COMMA = /^[+-]?\d+,\d+(e[+-]?\d+)?$/i; // the decimal comma of many languages
const DECIMAL = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;

/** A number if the text is one that JavaScript can keep, else the text. */
function number(text) {
  const trimmed = text.trim();
  const value = Number(trimmed);
  const isKept = /^[+-]?\d+$/.test(trimmed) ? Number.isSafeInteger(value) : Number.isFinite(value);
  return DECIMAL.test(trimmed) && isKept ? value : trimmed;
}

/** As `number`, where 1,5 is understood as 1.5. A count with a comma stays for the API to refuse. */
function decimal(text) {
  const trimmed = text.trim();
  return number(COMMA.test(trimmed) ? trimmed.replace(",", ".") : trimmed);
}

/**
 * The numbers that are compared.
 *
 * A comma with digits on both sides is a decimal comma, unless a point stands somewhere: so 1,5 is
 * one number, and 1,1.5 are two.
 */
export function scalesOf(state) {
  const parts = state.scales.split(/[;\s]+/).map((part) => part.replace(/^,+|,+$/g, ""));
  const pointed = state.scales.includes(".");
  const texts = parts.flatMap((part) => (COMMA.test(part) && !pointed ? part : part.split(",")));
  const given = texts.filter((text) => text !== "");
  return given.length ? given.map(decimal) : [""];
}

/** Whether what stands for a scale names a rule, which computes a scale for each token. */
export function isRule(scale) {
  return typeof scale === "string" && /^[a-z_]\w*$/i.test(scale);
}

/** What the answer at one of the scales is called. */
export function titleOf(state, scale) {
  if (isPlain(state, scale)) return "without guidance";
  if (state.negative === "streams") return `weights × ${scale}`;
  return isRule(scale) ? `rule ${scale}` : `scale ${scale}`;
}

/** Whether a request with this scale has only one stream. */
export function isPlain(state, scale) {
  return state.negative === "streams" ? scale === 0 || !state.streams.length : scale === 1;
}

/** The path and the body of the request with one of the scales. */
export function requestOf(state, scale) {
  const chat = state.mode === "chat";
  const body = {
    model: state.model,
    ...(chat ? { messages: messages(state.system, state.user) } : { prompt: state.prompt }),
    ...given({ max_tokens: state.max_tokens, seed: state.seed }),
    ...given({ temperature: state.temperature, top_p: state.top_p }, decimal),
  };
  const stop = state.stop.split("\n").filter((line) => line !== "");
  if (stop.length) body.stop = stop;
  if (!isPlain(state, scale)) Object.assign(body, guidance(state, scale));
  return { path: chat ? "v1/chat/completions" : "v1/completions", body };
}

/** What the page itself adds: the answer as a stream, with log-probabilities. */
export function watched(body, alternatives = ALTERNATIVES) {
  const logprobs = "messages" in body
    ? { logprobs: true, top_logprobs: alternatives } : { logprobs: alternatives };
  const guided = ["guidance_scale", "guidance_rule", "guidance_streams"].some((n) => n in body);
  const streams = guided ? { guidance_logprobs: true } : {};
  return { ...body, ...logprobs, ...streams, stream: true };
}

function messages(system, user) {
  const first = system === "" ? [] : [{ role: "system", content: system }];
  return [...first, { role: "user", content: user }];
}

/** The fields that are filled in, with numbers in place of texts. */
function given(fields, read = number) {
  const filled = Object.entries(fields).filter(([, text]) => text.trim() !== "");
  return Object.fromEntries(filled.map(([name, text]) => [name, read(text)]));
}

function guidance(state, scale) {
  const blend = state.negative === "streams"
    ? { guidance_streams: state.streams.map((stream) => follower(state, stream, scale)) }
    : { ...(isRule(scale) ? { guidance_rule: { name: scale } } : { guidance_scale: scale }),
        ...negative(state) };
  return {
    ...blend,
    ...given({
      guidance_start: state.start, guidance_end: state.end,
      guidance_top_k: state.cut_top_k,
    }),
    ...given({
      guidance_min_p: state.cut_min_p,
      guidance_max_kl: state.max_kl, guidance_min_entropy: state.min_entropy,
    }, decimal),
  };
}

function negative(state) {
  if (state.negative === "none") return {};
  if (state.mode === "text") return { negative_prompt: state.away_prompt };
  if (state.away_user === "") return { negative_prompt: state.away_system };
  return { negative_messages: messages(state.away_system, state.away_user) };
}

function follower(state, stream, scale) {
  const weight = decimal(stream.weight);
  const scaled = typeof weight === "number" && typeof scale === "number"
    ? Number((weight * scale).toPrecision(12)) : weight;
  const own = state.mode === "chat" && stream.user !== ""
    ? { messages: messages(stream.system, stream.user) } : { prompt: stream.system };
  return { weight: scaled, ...own };
}

/** The field of the form that a field of the API comes from; null if there is none. */
export function fieldOf(form, state, param) {
  const chat = state.mode === "chat";
  const name = (param ?? "").replace(/[.[].*/, "");
  const id = {
    guidance_scale: "scales",
    guidance_rule: "scales",
    negative_prompt: chat ? "away_system" : "away_prompt",
    negative_messages: "away_user",
    guidance_start: "start",
    guidance_end: "end",
    guidance_top_k: "cut_top_k",
    guidance_min_p: "cut_min_p",
    guidance_max_kl: "max_kl",
    guidance_min_entropy: "min_entropy",
    messages: "user",
    max_completion_tokens: "max_tokens",
  }[name] ?? name;
  if (!id) return null;
  const field = name === "guidance_streams"
    ? fieldOfStream(form, param) : form.querySelector(`#${CSS.escape(id)}`);
  return field && !field.closest("[hidden]") ? field : null;
}

/** The field of a stream, from a path such as `guidance_streams[1].weight`. */
function fieldOfStream(form, param) {
  const [, index, key] = /\[(\d+)\](?:\.(\w+))?/.exec(param) ?? [];
  const item = form.querySelectorAll("#streams li")[Number(index ?? 0)];
  const name = { prompt: "system", messages: "user" }[key] ?? "weight";
  return item?.querySelector(`[data-stream="${name}"]`) ?? form.querySelector("#add-stream");
}

// --- as code -------------------------------------------------------------------------------------

/** The request as a command for a POSIX shell. */
export function asCurl({ path, body }, hasKey) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", `'\\''`);
  return [
    `curl -s ${new URL(path, ROOT)}`,
    "-H 'Content-Type: application/json'",
    ...(hasKey ? ['-H "Authorization: Bearer $API_KEY"'] : []),
    `-d '${quoted}'`,
  ].join(" \\\n  ");
}

const OPENAI = new Set([
  "model", "messages", "prompt", "max_tokens", "temperature", "seed", "top_p", "stop",
]);

/** The request as a program that uses the openai client. */
export function asPython({ path, body }, hasKey) {
  const entries = Object.entries(body);
  const own = entries.filter(([name]) => OPENAI.has(name));
  const extra = entries.filter(([name]) => !OPENAI.has(name));
  const lines = own.map(([name, value]) => `    ${name}=${literal(value)},`);
  if (extra.length) lines.push(`    extra_body=${literal(Object.fromEntries(extra))},`);
  const chat = "messages" in body;
  const key = hasKey ? 'os.environ["API_KEY"]' : '"unused"';
  return [
    ...(hasKey ? ["import os", ""] : []),
    "import openai",
    "",
    `client = openai.OpenAI(base_url="${new URL("v1", ROOT)}", api_key=${key})`,
    `answer = client.${chat ? "chat.completions" : "completions"}.create(`,
    ...lines,
    ")",
    `print(answer.choices[0].${chat ? "message.content" : "text"})`,
    "",
  ].join("\n");
}

/** A value of JSON as a literal of Python. */
function literal(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    const entries = Object.entries(value).map(([name, v]) => `${literal(name)}: ${literal(v)}`);
    return `{${entries.join(", ")}}`;
  }
  return JSON.stringify(value);
}

// The page of conversations: each message is answered at two scales, side by side.

import { apiKey } from "./api.js";
import { Answer } from "./answer.js";
import { Scale } from "./curve.js";
import { byId, later, make } from "./dom.js";
import { chooseModel, offerModels, setUp } from "./page.js";
import * as problems from "./problems.js";
import { isPlain, requestOf, scalesOf, titleOf } from "./request.js";
import { follow, summary } from "./run.js";
import { toState } from "./state.js";

const DEFAULTS = {
  model: "", system: "You are a pirate.", away_system: "You are a helpful assistant.",
  left: "1", right: "1.5", temperature: "0", seed: "1", max_tokens: "60",
  user: "How do I make tea?",
};
const SIDES = ["left", "right"];
const form = byId("request");
let turns = []; // of both sides: {user, left, right}, the two as Answers
let running = null; // the AbortController of the answers that are being made

/** What was said on a side. A turn without an answer there is left out. */
function said(side) {
  return turns.filter((turn) => turn[side].text !== "").flatMap((turn) => [
    { role: "user", content: turn.user }, { role: "assistant", content: turn[side].text },
  ]);
}

/** The request of a side, with the conversation so far before the new message. */
function requestOfSide(state, scale, side) {
  const { path, body } = requestOf(state, scale);
  const last = body.messages.pop();
  return { path, body: { ...body, messages: [...body.messages, ...said(side), last] } };
}

async function send() {
  running?.abort();
  const abort = (running = new AbortController());
  problems.clear();
  if (!(await problems.ready()) || byId("send").disabled || running !== abort) return;
  const fields = read();
  const state = toState({ ...fields, mode: "chat", negative: "own" });
  const divergences = new Scale();
  const runs = SIDES.map((side) => {
    const [scale] = scalesOf({ scales: fields[side] });
    const request = requestOfSide(state, scale, side);
    const plain = isPlain(state, scale);
    const title = titleOf(state, scale);
    const answer = new Answer(title, request, plain ? null : divergences, apiKey.get() !== "");
    return { side, request, answer };
  });
  show(fields.user, runs);
  const failed = (error, side) => problems.show(error, fieldOf(error.param, side));
  const ends = await Promise.all(
    runs.map((run) => follow(run, abort.signal, (error) => failed(error, run.side))),
  );
  if (running !== abort) return;
  running = null;
  byId("stop-all").disabled = true;
  byId("status").textContent = summary(ends);
  if (!ends.includes("failed")) byId("user").value = "";
}

/** Add a turn to the page, and to the conversation. */
function show(user, runs) {
  if (!turns.length) byId("answers").replaceChildren();
  turns.push({ user, ...Object.fromEntries(runs.map(({ side, answer }) => [side, answer])) });
  const message = make("p", { class: "message", dir: "auto", text: user });
  byId("answers").append(message, ...runs.map(({ answer }) => answer.element));
  byId("token").hidden = true;
  byId("stop-all").disabled = false;
  byId("status").textContent = "Generating.";
  message.scrollIntoView({ block: "start" });
}

function startAnew() {
  running?.abort();
  running = null;
  turns = [];
  byId("answers").replaceChildren();
  byId("token").hidden = true;
  byId("stop-all").disabled = true;
  byId("status").textContent = "A new conversation.";
  problems.clear();
  byId("user").focus();
}

/** The field that a field of the API comes from; null if there is none. */
function fieldOf(param, side) {
  const name = { guidance_scale: side, guidance_rule: side, negative_prompt: "away_system", messages: "user" }[param];
  return byId(name ?? param ?? "") ?? null;
}

function read() {
  return Object.fromEntries(Object.keys(DEFAULTS).map((name) => [name, form.elements[name].value]));
}

function keep() {
  history.replaceState(null, "", `#${new URLSearchParams(read())}`);
}

function restore() {
  const parts = new URLSearchParams(location.hash.slice(1));
  if (location.hash && !parts.has("system")) return; // a link to a part of this page
  for (const [name, value] of Object.entries(DEFAULTS)) {
    if (name !== "model") form.elements[name].value = parts.get(name) ?? value;
  }
  chooseModel(parts.get("model"));
}

byId("stop-all").addEventListener("click", () => running?.abort());
byId("anew").addEventListener("click", startAnew);
form.addEventListener("input", later(keep, 300));
form.addEventListener("submit", (event) => {
  event.preventDefault();
  keep();
  send();
});
setUp(form, keep);
window.addEventListener("hashchange", restore);
restore();
problems.watchKey(({ generators }) => {
  offerModels(generators);
  if (!generators.length) problems.show(new Error("No model here generates text."));
});

// What the form says. It lives in the address, after the #, which browsers send to no server.

import { make } from "./dom.js";
import { scalesOf } from "./request.js";

const DEFAULTS = {
  model: "", mode: "chat", system: "", user: "", prompt: "",
  negative: "own", away_system: "", away_user: "", away_prompt: "",
  scales: "1, 1.5, 2", start: "", end: "",
  temperature: "0", seed: "1", max_tokens: "60",
  stop: "", top_p: "", cut_top_k: "", cut_min_p: "", max_kl: "", min_entropy: "",
};
const STREAM = { weight: "-0.5", system: "", user: "" };

/** Read the form: all its fields as texts, and `streams` as a list. */
export function read(form) {
  const state = { streams: [...form.querySelectorAll("#streams li")].map(readStream) };
  for (const name of Object.keys(DEFAULTS)) state[name] = form.elements[name]?.value ?? "";
  return state;
}

/** A state with these fields. What they leave out is empty, and there are no streams. */
export function toState(fields) {
  const empty = Object.fromEntries(Object.keys(DEFAULTS).map((name) => [name, ""]));
  return { ...empty, streams: [], ...fields };
}

/** Fill the form. What `state` leaves out gets its default. */
export function write(form, state) {
  for (const [name, value] of Object.entries(DEFAULTS)) {
    const field = form.elements[name];
    if (name === "model") continue; // main.js: which there are is known later
    field.value = value;
    const wanted = state[name] ?? value;
    const choices = field instanceof RadioNodeList ? [...field].map((one) => one.value) : null;
    if (!choices || choices.includes(wanted)) field.value = wanted;
  }
  form.querySelector("#streams").replaceChildren();
  for (const stream of state.streams ?? []) addStream(form, stream);
  refresh(form);
}

/** Show the fields that the choices need, and hide the others. */
export function refresh(form) {
  for (const part of form.querySelectorAll("[data-show]")) {
    const [name, value] = part.dataset.show.split(":");
    part.hidden = form.elements[name].value !== value;
  }
  const isChat = form.elements.mode.value === "chat";
  for (const user of form.querySelectorAll("#streams .stream-user")) user.hidden = !isChat;
  for (const label of form.querySelectorAll("#streams .stream-system label")) {
    label.textContent = isChat ? "System message" : "Text";
  }
  const weighed = form.elements.negative.value === "streams";
  form.querySelector("#scales-label").textContent = weighed
    ? "Weights times, side by side" : "Scales, side by side";
  const scales = scalesOf({ scales: form.elements.scales.value }).join(" and ");
  const off = weighed ? "0 is off." : "1 is off. A rule may stand there, too: adacad or arr.";
  form.querySelector("#scales-hint").textContent = `${off} Now: ${scales}.`;
}

/** The state as the part of an address after the #. What it leaves out is empty by default. */
export function toHash(state) {
  const parts = new URLSearchParams();
  for (const [name, value] of Object.entries(DEFAULTS)) {
    if (state[name] !== "" || value !== "") parts.set(name, state[name]);
  }
  if (state.streams.length) parts.set("streams", JSON.stringify(state.streams));
  return `#${parts}`;
}

/** The state that an address holds, or null. What is no state of this page is ignored. */
export function fromHash(hash) {
  const parts = new URLSearchParams(hash.slice(1));
  const state = {};
  for (const name of Object.keys(DEFAULTS)) {
    if (parts.has(name)) state[name] = parts.get(name);
  }
  try {
    const streams = JSON.parse(parts.get("streams") ?? "[]");
    state.streams = streams.map((stream) => ({ ...STREAM, ...stream }));
  } catch {
    state.streams = [];
  }
  return Object.keys(state).length > 1 || state.streams.length ? state : null;
}

// --- the list of streams -------------------------------------------------------------------------

let streamsMade = 0;

/** Add a stream to the list. Returns its weight's field. */
export function addStream(form, stream = STREAM) {
  const number = ++streamsMade;
  const weight = input("weight", number, "Weight", stream.weight);
  const system = input("system", number, "System message", stream.system);
  const user = input("user", number, "User message (empty: the same)", stream.user);
  const remove = make("button", {
    type: "button", text: "Remove", "aria-label": "Remove this stream", class: "remove",
  });
  const item = make(
    "li", {}, make("div", { class: "row" }, weight, remove), system, user,
  );
  remove.addEventListener("click", () => {
    item.remove();
    form.querySelector("#add-stream").focus();
    form.dispatchEvent(new Event("input", { bubbles: true }));
  });
  form.querySelector("#streams").append(item);
  refresh(form);
  return weight.querySelector("input");
}

function input(name, number, label, value) {
  const id = `stream-${number}-${name}`;
  const field = name === "weight"
    ? make("input", { id, "data-stream": name, inputmode: "decimal" })
    : make("textarea", { id, "data-stream": name, dir: "auto", rows: "1" });
  field.value = value;
  const kind = name === "weight" ? "weight" : `stream-${name}`;
  return make("div", { class: `field ${kind}` }, make("label", { for: id, text: label }), field);
}

function readStream(item) {
  const fields = [...item.querySelectorAll("[data-stream]")];
  return Object.fromEntries(fields.map((field) => [field.dataset.stream, field.value]));
}

// The page: it sends one request at several scales, and shows the answers as they arrive.

import { apiKey } from "./api.js";
import { Answer } from "./answer.js";
import { Scale } from "./curve.js";
import { byId, later, make } from "./dom.js";
import { chooseModel, offerModels, setUp } from "./page.js";
import { PRESETS } from "./presets.js";
import * as problems from "./problems.js";
import { showRecorded } from "./recorded.js";
import { fieldOf, isPlain, requestOf, scalesOf, titleOf } from "./request.js";
import { follow, summary } from "./run.js";
import * as states from "./state.js";

const form = byId("request");
const NARROW = matchMedia("(max-width: 52rem)"); // as in playground.css: answers are below the form
let running = null; // the AbortController of the answers that are being made

// --- generating ----------------------------------------------------------------------------------

async function generate() {
  running?.abort();
  const abort = (running = new AbortController());
  problems.clear();
  if (!(await problems.ready()) || byId("send").disabled || running !== abort) return;
  const state = states.read(form);
  const divergences = new Scale();
  const runs = scalesOf(state).map((scale) => {
    const request = requestOf(state, scale);
    const curve = isPlain(state, scale) ? null : divergences;
    const answer = new Answer(titleOf(state, scale), request, curve, apiKey.get() !== "");
    return { request, answer };
  });
  byId("answers").replaceChildren(...runs.map(({ answer }) => answer.element));
  byId("token").hidden = true;
  byId("legend").hidden = false;
  byId("stop-all").disabled = false;
  byId("status").textContent = "Generating.";
  if (NARROW.matches) byId("output").scrollIntoView();
  const failed = (error) => problems.show(error, fieldOf(form, state, error.param));
  const ends = await Promise.all(runs.map((run) => follow(run, abort.signal, failed)));
  if (running !== abort) return;
  running = null;
  byId("stop-all").disabled = true;
  byId("status").textContent = summary(ends);
}

// --- the form and the address --------------------------------------------------------------------

/** Put the form's state into the address; into a new entry of the history if this one is sealed. */
function keep() {
  const hash = states.toHash(states.read(form));
  if (hash === location.hash) return;
  if (history.state?.sealed) history.pushState(null, "", hash);
  else history.replaceState(null, "", hash);
}

/** Keep this state as an entry of its own, so that one can come back to it. */
function seal() {
  keep();
  history.replaceState({ sealed: true }, "", location.href);
}

function choosePreset() {
  const preset = PRESETS[byId("preset").value];
  namePreset(byId("preset").value);
  if (!preset) return;
  seal();
  states.write(form, preset.state);
  problems.clear();
  keep();
}

/** Name the example that is filled in; "" if it is none. */
function namePreset(index) {
  byId("preset").value = index;
  byId("preset-note").textContent = PRESETS[index]?.note ?? "";
}

function showModels({ generators }) {
  offerModels(generators);
  if (!generators.length) {
    problems.show(new Error("No model here generates text. See the page Encoders."));
  }
}

function restore() {
  const state = states.fromHash(location.hash);
  if (!state && location.hash) return; // a link to a part of this page
  namePreset(state ? "" : 0);
  states.write(form, state ?? PRESETS[0].state);
  if (state?.model) chooseModel(state.model);
  if (!state) showRecorded();
}

function addStream() {
  const weight = states.addStream(form);
  keep();
  return weight;
}

for (const [index, { name }] of PRESETS.entries()) {
  byId("preset").append(make("option", { value: index, text: name }));
}
byId("preset").addEventListener("change", choosePreset);
byId("add-stream").addEventListener("click", () => addStream().focus());
byId("stop-all").addEventListener("click", () => running?.abort());
const keepSoon = later(keep, 300);
form.addEventListener("input", ({ target }) => {
  if (target.id === "preset" || target.id === "key") return;
  namePreset("");
  if (target.value === "streams" && !form.querySelector("#streams li")) addStream();
  states.refresh(form);
  keepSoon();
});
form.addEventListener("change", keep);
form.addEventListener("submit", (event) => {
  event.preventDefault();
  seal();
  generate();
});
setUp(form, keep);
window.addEventListener("hashchange", restore);
window.addEventListener("popstate", restore);
restore();
problems.watchKey(showModels);

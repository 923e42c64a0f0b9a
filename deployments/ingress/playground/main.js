// The page: it sends one request at several scales, and shows the answers as they arrive.

import { apiKey, call, events } from "./api.js";
import { Answer } from "./answer.js";
import { Scale } from "./curve.js";
import { byId, copy, later, make } from "./dom.js";
import { PRESETS } from "./presets.js";
import * as problems from "./problems.js";
import { fieldOf, isPlain, requestOf, scalesOf, watched } from "./request.js";
import * as states from "./state.js";
import { tokensOf } from "./tokens.js";

const form = byId("request");
const NARROW = matchMedia("(max-width: 52rem)"); // as in playground.css: the answers are below the form
let running = null; // the AbortController of the answers that are being made

function titleOf(state, scale) {
  if (isPlain(state, scale)) return "without guidance";
  return state.negative === "streams" ? `weights × ${scale}` : `scale ${scale}`;
}

async function generate() {
  running?.abort();
  const abort = (running = new AbortController());
  problems.clear();
  const state = states.read(form);
  const divergences = new Scale();
  const hasKey = apiKey.get() !== "";
  const runs = scalesOf(state).map((scale) => {
    const request = requestOf(state, scale);
    const curve = isPlain(state, scale) ? null : divergences;
    const answer = new Answer(titleOf(state, scale), request, curve, hasKey);
    return { request: { ...request, body: watched(state, scale, request.body) }, answer };
  });
  byId("answers").replaceChildren(...runs.map(({ answer }) => answer.element));
  byId("token").hidden = true;
  byId("legend").hidden = false;
  byId("stop-all").disabled = false;
  byId("status").textContent = "Generating.";
  if (NARROW.matches) byId("output").scrollIntoView({ behavior: "smooth" });
  const all = await Promise.all(runs.map((run) => follow(run, state, abort.signal)));
  if (running !== abort) return;
  running = null;
  byId("stop-all").disabled = true;
  const failed = all.filter((ok) => !ok).length;
  byId("status").textContent = failed ? `${failed} answers failed.` : "All answers are complete.";
}

/** Show one answer as it arrives. Returns whether it is complete. */
async function follow({ request, answer }, state, signal) {
  const began = performance.now();
  let finishReason = null;
  let report = null;
  try {
    const response = await call(request.path, request.body, signal);
    answer.says("streams");
    for await (const event of events(response)) {
      const choice = event.choices?.[0];
      if (choice) answer.add(tokensOf(choice));
      finishReason = choice?.finish_reason ?? finishReason;
      report = event.guidance ?? report;
    }
    answer.finish(finishReason, report, (performance.now() - began) / 1000);
    return true;
  } catch (error) {
    if (error.name === "AbortError") {
      answer.says("stopped");
      return true;
    }
    answer.says("failed");
    problems.show(error, fieldOf(form, state, error.param));
    return false;
  }
}

function keep() {
  history.replaceState(null, "", states.toHash(states.read(form)));
}

function choosePreset() {
  const preset = PRESETS[byId("preset").value];
  byId("preset-note").textContent = preset?.note ?? "";
  if (!preset) return;
  states.write(form, { model: form.elements.model.value, ...preset.state });
  problems.clear();
  keep();
}

function showModels({ generators }) {
  const field = byId("model");
  const wanted = field.dataset.wanted || field.value;
  field.replaceChildren(...generators.map((name) => make("option", { value: name, text: name })));
  if (generators.includes(wanted)) field.value = wanted;
  byId("model-field").hidden = generators.length < 2;
  byId("send").disabled = !generators.length;
  if (!generators.length) {
    problems.show(new Error("No model here generates text. The page Encoders may have one that ranks."));
  }
}

function restore() {
  const state = states.fromHash(location.hash) ?? PRESETS[0].state;
  byId("model").dataset.wanted = state.model ?? "";
  const { model, ...rest } = state;
  states.write(form, { ...rest, model: model || byId("model").value });
}

for (const [index, { name }] of PRESETS.entries()) {
  byId("preset").append(make("option", { value: index, text: name }));
}
byId("preset").addEventListener("change", choosePreset);
byId("add-stream").addEventListener("click", () => {
  states.addStream(form).focus();
  keep();
});
byId("stop-all").addEventListener("click", () => running?.abort());
byId("copy-link").addEventListener("click", async () => {
  keep();
  await copy(location.href, byId("scales"));
  byId("status").textContent = "The link is copied.";
});
const keepSoon = later(keep, 300);
form.addEventListener("input", () => {
  states.refresh(form);
  keepSoon();
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  keep();
  generate();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
window.addEventListener("hashchange", restore);
restore();
problems.watchKey(showModels);

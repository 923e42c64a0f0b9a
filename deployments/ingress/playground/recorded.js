// The answers of the first example, recorded, for a visitor who has not generated yet.
//
// scripts/pictures/record_example.py makes recorded.json: the requests that this page sent, and the answers.

import { Answer } from "./answer.js";
import { Scale } from "./curve.js";
import { byId, make } from "./dom.js";
import { tokensOf } from "./tokens.js";

/** Show the recording, unless something else is shown when it has come. */
export async function showRecorded() {
  const response = await fetch(new URL("recorded.json", import.meta.url)).catch(() => null);
  if (!response?.ok || !byId("answers").querySelector(".empty")) return;
  const recorded = await response.json();
  if (!byId("answers").querySelector(".empty")) return;
  const divergences = new Scale();
  const elements = recorded.answers.map((one) => shown(one, divergences).element);
  byId("answers").replaceChildren(banner(recorded), ...elements);
  byId("legend").hidden = false;
}

function shown({ title, request, content, finish_reason: finish, guidance, seconds }, divergences) {
  const answer = new Answer(title, request, guidance && divergences, false);
  answer.add(tokensOf({ logprobs: { content } }));
  answer.finish(finish, guidance, seconds);
  return answer;
}

function banner({ preset, model, vllm, device, recorded }) {
  return make(
    "p", { class: "banner", id: "recorded" },
    make("strong", { text: "Recorded. " }),
    `These are answers of ${model} to the example “${preset}”, made with vLLM ${vllm} on a ${device}`
      + ` on ${recorded}. Press Generate to ask the model of this server.`,
  );
}

// One request: it is sent, and its answer is shown as it arrives.

import { ApiError, call, events } from "./api.js";
import { watched } from "./request.js";
import { tokensOf } from "./tokens.js";

/**
 * Show one answer as it arrives. Returns how it ended: "complete", "stopped" or "failed".
 *
 * failed: called with the ApiError, once the answer shows it.
 */
export async function follow({ request, answer }, signal, failed) {
  let finishReason = null;
  let report = null;
  try {
    const response = await ask(request, signal);
    const began = performance.now(); // not earlier: a browser holds back the seventh request
    answer.says("running");
    for await (const event of events(response)) {
      const choice = event.choices?.[0];
      if (choice) answer.add(tokensOf(choice), choice.delta?.content ?? choice.text ?? "");
      finishReason = choice?.finish_reason ?? finishReason;
      report = event.guidance ?? report;
    }
    answer.finish(finishReason, report, (performance.now() - began) / 1000);
    return "complete";
  } catch (error) {
    if (error.name === "AbortError") {
      answer.stop();
      return "stopped";
    }
    if (!(error instanceof ApiError)) throw error;
    answer.fail(error.message);
    failed(error);
    return "failed";
  }
}

/** Send a request; without alternatives of tokens, if the server allows fewer of them. */
async function ask({ path, body }, signal) {
  try {
    return await call(path, watched(body), signal);
  } catch (error) {
    if (!["logprobs", "top_logprobs"].includes(error.param)) throw error;
    return call(path, watched(body, 0), signal);
  }
}

/** One sentence about how the answers of a comparison ended. */
export function summary(ends) {
  const failed = ends.filter((end) => end === "failed").length;
  if (failed) return `${failed} of ${ends.length} answers failed.`;
  return ends.includes("stopped") ? "Stopped." : "All answers are complete.";
}

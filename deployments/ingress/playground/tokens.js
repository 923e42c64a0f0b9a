// Tokens of an answer, from the two shapes that the API has for them.
//
// A token: {text, logprob, top, streams, kl, strength}. `top` has the blend's most likely tokens, as
// [text, logprob]. `streams` has {logprob, top} for each stream, the conditional one's first. It is
// null if the token was not guided. `strength` is the part of the blend's push that a trust region
// or a gate let pass.

/** The tokens of one event of a stream. */
export function tokensOf(choice) {
  const logprobs = choice.logprobs;
  if (!logprobs) return [];
  return logprobs.content ? logprobs.content.map(ofChat) : ofCompletion(logprobs);
}

const pairs = (entries) => (entries ?? []).map((entry) => [entry.token, entry.logprob]);
const ranked = (top) => Object.entries(top ?? {}).sort((a, b) => b[1] - a[1]);

function ofChat(token) {
  const guided = token.conditional_logprob !== undefined;
  return {
    text: token.token,
    logprob: token.logprob,
    top: pairs(token.top_logprobs),
    kl: token.guidance_kl ?? null,
    strength: token.guidance_strength ?? null,
    streams: guided ? [
      { logprob: token.conditional_logprob, top: pairs(token.conditional_top_logprobs) },
      ...token.negative_logprobs.map((logprob, i) => (
        { logprob, top: pairs(token.negative_top_logprobs?.[i]) }
      )),
    ] : null,
  };
}

function ofCompletion(logprobs) {
  return logprobs.tokens.map((text, i) => {
    const conditional = logprobs.conditional_logprobs?.[i] ?? null;
    return {
      text,
      logprob: logprobs.token_logprobs[i],
      top: ranked(logprobs.top_logprobs?.[i]),
      kl: logprobs.guidance_kl?.[i] ?? null,
      strength: logprobs.guidance_strength?.[i] ?? null,
      streams: conditional === null ? null : [
        { logprob: conditional, top: ranked(logprobs.conditional_top_logprobs?.[i]) },
        ...logprobs.negative_logprobs[i].map((logprob, j) => (
          { logprob, top: ranked(logprobs.negative_top_logprobs?.[i]?.[j]) }
        )),
      ],
    };
  });
}

/** How much more likely the blend made the sampled token than the conditional stream: in nats. */
export function change(token) {
  return token.streams ? token.logprob - token.streams[0].logprob : null;
}

/** A probability, from its logarithm, in percent. */
export function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  if (value >= 99.95 && value < 100) return "> 99.9 %";
  if (value < 0.01) return "< 0.01 %";
  return `${value >= 10 ? value.toFixed(1) : value.toFixed(2)} %`;
}

/** A token's text for a sentence, which may be read aloud. */
export function quoted(text) {
  if (text === "") return "without a text";
  return text.trim() === "" ? visible(text) : `\u2068“${text.replaceAll("\n", "↵")}”\u2069`;
}

/** A token's text with its white space made visible. */
export function visible(text) {
  if (text === "") return "(no text)";
  return text.replaceAll("\n", "↵").replaceAll("\t", "→").replaceAll(" ", "·");
}

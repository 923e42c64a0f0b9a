// The panel that shows what each stream and the blend would have sampled at one token.

import { byId, make } from "./dom.js";
import { change, percent, quoted, visible } from "./tokens.js";

const ROWS = 12; // of the table, about

/** One sentence about a token. */
export function sentence(token, position) {
  const begin = `Token ${position}, ${quoted(token.text)}: ${percent(token.logprob)}`;
  const by = change(token);
  if (by === null) return `${begin}, not guided.`;
  const times = Math.exp(Math.abs(by));
  const factor = times >= 1000 ? times.toExponential(1) : times.toFixed(times < 10 ? 2 : 0);
  return `${begin} in the blend, ${percent(token.streams[0].logprob)} in the conditional stream:`
    + ` ${factor} times as likely${by < 0 ? " without" : " with"} guidance.`
    + ` KL ${token.kl.toFixed(2)} nats.`;
}

/** Show a token in the panel. `title` names its answer. */
export function showToken(title, token, position) {
  const panel = byId("token");
  panel.hidden = false;
  panel.replaceChildren(
    make("h2", { text: `Token ${position}, ${title}` }),
    make("p", { text: sentence(token, position) }),
    make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Alternatives" }, table(token)),
  );
}

/** A row for each of the likeliest tokens, and a column for each distribution. */
function table(token) {
  const columns = [["Blend", new Map(token.top).set(token.text, token.logprob)]];
  (token.streams ?? []).forEach((stream, i, all) => {
    const name = i === 0 ? "Conditional" : all.length === 2 ? "Negative" : `Stream ${i}`;
    columns.push([name, new Map(stream.top).set(token.text, stream.logprob)]);
  });
  const head = make("tr", {}, make("th", { text: "Token", scope: "col" }));
  for (const [name] of columns) {
    head.append(make("th", { text: token.streams ? name : "Probability", scope: "col" }));
  }
  const body = make("tbody");
  for (const text of chosen(token, columns.map(([, known]) => known))) {
    const row = make("tr", { class: text === token.text ? "sampled" : null });
    const mark = text === token.text ? " (sampled)" : "";
    row.append(make("th", { scope: "row", class: "text", text: visible(text) + mark }));
    for (const [, known] of columns) row.append(make("td", { text: shown(known, text) }));
    body.append(row);
  }
  return make("table", {}, make("caption", { class: "hidden", text: "Probabilities" }), make("thead", {}, head), body);
}

/** A token's probability; if it is not among the known ones, that it is below them. */
function shown(known, text) {
  if (known.has(text)) return percent(known.get(text));
  return known.size > 1 ? `< ${percent(Math.min(...known.values())).replace("< ", "")}` : "";
}

/** The sampled token and the likeliest of each distribution, in the order of the first. */
function chosen(token, distributions) {
  const each = Math.ceil(ROWS / distributions.length);
  const texts = new Set([token.text]);
  for (const known of distributions) {
    const best = [...known].sort((a, b) => b[1] - a[1]).slice(0, each);
    for (const [text] of best) texts.add(text);
  }
  const [blend] = distributions;
  return [...texts].sort((a, b) => (blend.get(b) ?? -Infinity) - (blend.get(a) ?? -Infinity));
}

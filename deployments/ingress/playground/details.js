// The panel that shows what each stream and the blend would have sampled at one token.

import { byId, make, scrolling } from "./dom.js";
import { change, percent, quoted, visible } from "./tokens.js";

const ROWS = 12; // of the table, about

/** One sentence about a token. `isRule`: whether its strength is the scale that a rule gave it. */
export function sentence(token, position, isRule) {
  const begin = `Token ${position}, ${quoted(token.text)}: ${percent(token.logprob)}`;
  const by = change(token);
  if (by === null) return `${begin}, not guided.`;
  const times = Math.exp(Math.abs(by));
  const factor = times >= 1000 ? times.toExponential(1) : times.toFixed(times < 10 ? 2 : 0);
  return `${begin} in the blend, ${percent(token.streams[0].logprob)} in the conditional stream:`
    + ` ${factor} times as likely${by < 0 ? " without" : " with"} guidance.`
    + ` KL ${token.kl.toFixed(2)} nats.${strength(token, isRule)}`;
}

function strength({ strength: part }, isRule) {
  if (isRule && part !== null) return ` The rule's scale was ${part.toFixed(2)}.`;
  return part === null || part >= 1 ? "" : ` Guidance had ${(100 * part).toFixed(0)} % strength.`;
}

/** Show a token in the panel. `title` names its answer. `isRule`: see `sentence`. */
export function showToken(title, token, position, isRule) {
  const panel = byId("token");
  const close = make("button", { type: "button", text: "Close" });
  close.addEventListener("click", hide);
  panel.hidden = false;
  panel.replaceChildren(
    make("div", { class: "top" }, make("h2", { text: `Token ${position}, ${title}` }), close),
    make("p", { text: sentence(token, position, isRule) }),
    scrolling("Alternatives", table(token)),
  );
  // What is scrolled into view must not be under the panel, which stands at the window's end.
  document.documentElement.style.scrollPaddingBottom = `${panel.offsetHeight + 8}px`;
}

function hide() {
  byId("token").hidden = true;
  document.documentElement.style.scrollPaddingBottom = "";
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) hide();
});

/** A row for each of the likeliest tokens, and a column for each distribution. */
function table(token) {
  const columns = [["Blend", distribution(token, token)]];
  (token.streams ?? []).forEach((stream, i, all) => {
    const name = i === 0 ? "Conditional" : all.length === 2 ? "Negative" : `Stream ${i}`;
    columns.push([name, distribution(token, stream)]);
  });
  const head = make("tr", {}, make("th", { text: "Token", scope: "col" }));
  for (const [name] of columns) {
    head.append(make("th", { text: token.streams ? name : "Probability", scope: "col" }));
  }
  const body = make("tbody");
  for (const text of chosen(token, columns.map(([, { known }]) => known))) {
    const row = make("tr", { class: text === token.text ? "sampled" : null });
    const mark = text === token.text ? [make("span", { class: "mark", text: " (sampled)" })] : [];
    row.append(make("th", { scope: "row", class: "text" }, visible(text), ...mark));
    for (const [, column] of columns) row.append(cell(column, text));
    body.append(row);
  }
  const caption = make("caption", { class: "hidden", text: "Probabilities" });
  const made = make("table", { class: "shares" }, caption, make("thead", {}, head), body);
  made.style.setProperty("--columns", columns.length);
  return made;
}

/**
 * What is known of a distribution: log-probabilities by text, and a bound for all other texts.
 *
 * The sampled token is known in any case, so it says nothing about the others.
 */
function distribution(token, { logprob, top }) {
  const known = new Map();
  for (const [text, value] of top) if (!known.has(text)) known.set(text, value);
  known.delete(token.text);
  const bound = known.size ? Math.min(...known.values()) : null;
  return { known: known.set(token.text, logprob), bound };
}

/** A probability as a number and, by playground.css, as a bar. */
function cell(column, text) {
  const made = make("td", { text: shown(column, text) });
  made.style.setProperty("--share", Math.exp(column.known.get(text) ?? -Infinity).toFixed(4));
  return made;
}

/** A token's probability, or what it is below. A part of a character has no text of its own. */
function shown({ known, bound }, text) {
  if (known.has(text)) return percent(known.get(text));
  const isPart = text === "" || text.includes("\ufffd");
  return bound === null || isPart ? "" : `< ${percent(bound).replace("< ", "")}`;
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

// One answer: its text as tokens that can be pointed at, its curve, and what the API reported.

import { Curve } from "./curve.js";
import { sentence, showToken } from "./details.js";
import { make, offer, tip } from "./dom.js";
import { asCurl, asPython } from "./request.js";
import { change } from "./tokens.js";

const FULL_COLOUR = 4; // nats, at which a token has the strongest colour
const CLEAR = 0.7; // nats, twice or half as likely: what is marked where colours are not shown
const FINISHES = {
  length: "The limit of tokens was reached. Raise it for a longer answer.",
  stop: "The model ended its answer, or one of the stop texts came.",
};
const NATS = "A nat is a unit of information, 1.44 bits. KL is 0 where guidance changed nothing. At"
  + " 1, the distribution is plainly another one.";
const STEPS = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -1e9, End: 1e9 };

let answersMade = 0;
let current = null; // the answer whose token is shown

export class Answer {
  /**
   * title: of the answer, such as "scale 1.5".
   * request: the path and body that a copy of the request shows.
   * scale: see Curve; null for an answer without guidance.
   */
  constructor(title, request, scale, hasKey) {
    this.id = `answer-${++answersMade}`;
    this.title = title;
    this.tokens = [];
    this.text = "";
    this.chosen = -1;
    this.state = make("small", { text: "waits" });
    this.list = make("div", {
      class: "tokens", role: "listbox", tabindex: "0", dir: "auto", "aria-label": `Tokens, ${title}`,
      "aria-orientation": "horizontal",
    });
    this.facts = make("p", { class: "facts" });
    this.element = make(
      "article", { "aria-label": title },
      make("h2", { text: title }, this.state), this.list,
    );
    this.isRule = "guidance_rule" in request.body;
    this.curve = scale && new Curve(scale, (index) => this.choose(index), this.isRule);
    if (this.curve) {
      this.curveLabel = make("span");
      const label = make("p", { class: "facts" }, "KL in ", tip("nats", NATS), ": ", this.curveLabel);
      this.element.append(label, this.curve.svg);
    }
    this.element.append(this.facts, this.tools(request, hasKey));
    this.list.addEventListener("keydown", (event) => this.step(event));
    this.list.addEventListener("focus", () => {
      if (this.tokens.length) this.choose(Math.max(0, this.chosen));
    });
    for (const kind of ["pointerover", "click"]) {
      this.list.addEventListener(kind, (event) => {
        const option = event.target.closest("[role=option]");
        if (option) this.choose(Number(option.dataset.index));
      });
    }
  }

  tools(request, hasKey) {
    const curl = make("button", { type: "button", text: "As curl" });
    const python = make("button", { type: "button", text: "As Python" });
    curl.addEventListener("click", () => offer(`${this.title}, as curl`, asCurl(request, hasKey)));
    python.addEventListener("click", () => {
      offer(`${this.title}, as Python`, asPython(request, hasKey));
    });
    return make("div", { class: "tools" }, curl, python);
  }

  says(text) {
    this.state.replaceChildren(text);
  }

  /** Show more tokens. `text` is what they add to the answer, as a client would read it. */
  add(tokens, text = "") {
    this.text += text;
    for (const token of tokens) {
      const index = this.tokens.push(token) - 1;
      this.list.append(option(token, index, this.id));
    }
    if (this.curve && tokens.length) {
      this.curve.add(tokens);
      this.curveLabel.textContent = this.curve.summary();
    }
  }

  /** Show why there is no answer, or not all of it. */
  fail(message) {
    this.says("failed");
    this.facts.textContent = message;
    this.facts.classList.add("failure");
  }

  stop() {
    this.says("stopped");
    this.facts.textContent = count(this.tokens.length, "token");
  }

  /** Show what the last event of the stream reported. */
  finish(finishReason, report, seconds) {
    const about = FINISHES[finishReason];
    const said = `finish: ${finishReason}`;
    this.says(about ? tip(said, about) : said);
    const facts = [`${count(this.tokens.length, "token")} in ${seconds.toFixed(1)} s`];
    if (report) {
      facts.push(`${report.guided_tokens} guided`, count(report.streams, "stream"));
      facts.push(`negative prompt: ${count(report.negative_prompt_tokens, "token")}`);
      if (report.note) facts.push(report.note);
    }
    this.facts.textContent = facts.join(" · ");
  }

  step(event) {
    const by = STEPS[event.key];
    if (by === undefined || !this.tokens.length) return;
    event.preventDefault();
    this.choose(Math.min(this.tokens.length - 1, Math.max(0, this.chosen + by)));
    this.list.children[this.chosen].scrollIntoView({ block: "nearest" });
  }

  /** Show a token's details. */
  choose(index) {
    const before = document.querySelector('[role=option][aria-selected="true"]');
    before?.setAttribute("aria-selected", "false");
    if (current !== this) current?.curve?.mark(null);
    current = this;
    this.chosen = index;
    const chosen = this.list.children[index];
    chosen.setAttribute("aria-selected", "true");
    chosen.setAttribute("aria-label", sentence(this.tokens[index], index, this.isRule));
    this.list.setAttribute("aria-activedescendant", chosen.id);
    this.curve?.mark(index);
    showToken(this.title, this.tokens[index], index, this.isRule);
  }
}

const count = (number, name) => `${number} ${name}${number === 1 ? "" : "s"}`;

function option(token, index, id) {
  const element = make("span", {
    role: "option", id: `${id}-token-${index}`, "data-index": index, "aria-selected": "false",
  });
  const [, text, end] = /^([^]*?)(\n*)$/.exec(token.text);
  element.append(text);
  if (/^<[^<>\s]+>$/.test(text)) element.classList.add("special"); // such as the end of a turn
  if (end) element.append(make("span", { class: "line-end", text: end }));
  if (token.text.trim() === "") {
    element.setAttribute("aria-label", token.text === "" ? "part of a character" : "white space");
  }
  const by = change(token);
  if (by === null) return element;
  const strength = Math.min(1, Math.abs(by) / FULL_COLOUR) * 0.5;
  const kind = by < 0 ? "lower" : "raise";
  element.style.backgroundColor = `rgb(var(--${kind}-rgb) / ${strength.toFixed(3)})`;
  if (Math.abs(by) > CLEAR) element.classList.add(kind);
  return element;
}

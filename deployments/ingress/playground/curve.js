// The curve of KL(guided || conditional) over an answer's tokens, and that of the strength or of the
// scales of a rule.

const SVG = "http://www.w3.org/2000/svg";

function shape(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** The highest divergence of all answers of a comparison, so that their curves have one scale. */
export class Scale {
  highest = 1;
  curves = [];
}

export class Curve {
  /**
   * `chosen(index)` is called with the token under the pointer. `isRule`: whether the strengths of
   * tokens are the scales that a rule gave them.
   */
  constructor(scale, chosen, isRule = false) {
    this.scale = scale;
    this.isRule = isRule;
    this.values = [];
    this.strengths = [];
    this.strength = shape("path", { class: "strength", d: "" });
    this.line = shape("path", { class: "kl", d: "" });
    this.here = shape("line", { class: "here", y1: 0, y2: 100, visibility: "hidden" });
    this.svg = shape("svg", {
      class: "curve", preserveAspectRatio: "none", viewBox: "0 0 1 100", role: "img",
      "aria-label": "No token was guided yet.",
    });
    this.base = shape("line", { x1: 0, x2: 1, y1: 99, y2: 99 });
    this.svg.append(this.base, this.strength, this.line, this.here);
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      const at = Math.floor(((event.clientX - box.left) / box.width) * this.values.length);
      if (at >= 0 && at < this.values.length) chosen(at);
    });
    scale.curves.push(this);
  }

  /** Add what is known of tokens: `kl` in nats and `strength`, null for one that was not guided. */
  add(tokens) {
    const values = tokens.map((token) => token.kl);
    this.values.push(...values);
    this.strengths.push(...tokens.map((token) => token.strength));
    const highest = Math.max(this.scale.highest, ...values.filter((value) => value !== null));
    if (highest > this.scale.highest) {
      this.scale.highest = highest;
      for (const curve of this.scale.curves) curve.draw();
    } else this.draw();
  }

  draw() {
    const length = Math.max(1, this.values.length);
    this.svg.setAttribute("viewBox", `0 0 ${length} 100`);
    this.base.setAttribute("x2", length);
    this.line.setAttribute("d", path(this.values, this.scale.highest));
    const most = this.isRule ? Math.max(1, ...this.scales()) : 1;
    const shows = this.isRule || this.isLimited();
    this.strength.setAttribute("d", shows ? path(this.strengths, most) : "");
    this.svg.setAttribute("aria-label", `KL of each token in nats: ${this.summary()}`);
  }

  /** Whether a trust region or a gate held back some of the blend's push. */
  isLimited() {
    return this.strengths.some((strength) => strength !== null && strength < 1);
  }

  /** The scales that a rule gave. */
  scales() {
    return this.strengths.filter((strength) => strength !== null);
  }

  /** What the dashed curve shows, as the end of a sentence. */
  dashed() {
    if (!this.isRule) return this.isLimited() ? ", with the strength of guidance dashed" : "";
    const [least, most] = [Math.min, Math.max].map((of) => of(...this.scales()).toFixed(2));
    return `, with the rule's scales dashed, from ${least} to ${most}`;
  }

  summary() {
    const guided = this.values.filter((value) => value !== null);
    if (!guided.length) return "No token was guided.";
    const sum = guided.reduce((all, value) => all + value, 0);
    const mean = Math.max(0, sum / guided.length); // rounding can make it -0.00
    const highest = Math.max(...guided);
    return `mean ${mean.toFixed(2)}, highest ${highest.toFixed(2)}`
      + ` at token ${this.values.indexOf(highest)}${this.dashed()}`;
  }

  mark(index) {
    this.here.setAttribute("visibility", index === null ? "hidden" : "visible");
    for (const end of ["x1", "x2"]) this.here.setAttribute(end, (index ?? 0) + 0.5);
  }
}

/** A line through values, with gaps where there are none. */
function path(values, highest) {
  return values.map((value, i) => {
    if (value === null) return "";
    const begins = i === 0 || values[i - 1] === null;
    return `${begins ? "M" : "L"}${i + 0.5},${99 - (94 * value) / highest}`;
  }).join("");
}

// The page of the encoders: it ranks passages for a question, and compares them with each other.

import { ApiError, call } from "./api.js";
import { byId, later, make, scrolling } from "./dom.js";
import { chooseModel, offerModels, setUp } from "./page.js";
import * as problems from "./problems.js";

const EXAMPLE = {
  query: "Why is the sea salty?",
  documents: [
    "Rivers dissolve minerals from rocks and carry them into the sea.",
    "The water of the sea evaporates, and the salt stays behind.",
    "Salt was once so valuable that soldiers were paid with it.",
    "A loaf of bread needs flour, water, yeast and a pinch of salt.",
    "The moon pulls on the oceans, which makes the tides.",
  ].join("\n\n"),
};
const FIELDS = ["model", "query", "documents"];
const form = byId("request");
const NARROW = matchMedia("(max-width: 52rem)"); // as in playground.css: results are below the form
let cards = [];
let running = null; // the AbortController of the ranking that is being made

const passages = () => form.elements.documents.value.split(/\n\s*\n/).map((text) => text.trim())
  .filter((text) => text !== "");
const canDo = (name, part) => cards.find((card) => card.id === name)?.endpoints
  .some((path) => path.endsWith(part));

async function rank() {
  running?.abort();
  const { signal } = (running = new AbortController());
  problems.clear();
  if (!(await problems.ready()) || byId("send").disabled || signal.aborted) return;
  byId("status").textContent = "Ranking.";
  byId("answers").replaceChildren();
  if (NARROW.matches) byId("output").scrollIntoView();
  try {
    const found = await results(form.elements.model.value, passages(), signal);
    byId("answers").replaceChildren(...found);
    byId("status").textContent = "Ranked.";
  } catch (error) {
    if (error.name === "AbortError") return;
    if (!(error instanceof ApiError)) throw error;
    const name = { input: "documents", texts: "documents" }[error.param] ?? error.param;
    problems.show(error, ["query", "documents"].includes(name) ? byId(name) : null);
    byId("status").textContent = "";
  }
}

/** What the model can do with the passages: a ranking, a matrix, or both. */
async function results(model, documents, signal) {
  const found = [];
  if (canDo(model, "/rerank")) {
    const body = { model, query: form.elements.query.value, documents };
    found.push(ranking((await (await call("v1/rerank", body, signal)).json()).results, documents));
  }
  if (canDo(model, "/embeddings")) {
    const answer = await call("v1/embeddings", { model, input: documents }, signal);
    found.push(matrix((await answer.json()).data.map((entry) => entry.embedding)));
  }
  if (!found.length) throw new ApiError(`${model} neither ranks nor embeds.`);
  return found;
}

function ranking(results, documents) {
  const list = make("ol", { class: "ranking" });
  for (const { index, relevance_score: score } of results) {
    list.append(make(
      "li", {},
      make("span", { class: "score", text: score.toFixed(3) }),
      make("span", { dir: "auto", text: `${index + 1}. ${documents[index]}` }),
      make("meter", {
        min: "0", max: "1", value: score, "aria-label": `Relevance of passage ${index + 1}`,
      }),
    ));
  }
  return make("section", { class: "card" }, make("h2", { text: "Ranking" }), list);
}

function matrix(vectors) {
  const head = make("tr", {}, make("th", { scope: "col", text: "Passage" }));
  const body = make("tbody");
  vectors.forEach((a, i) => {
    head.append(make("th", { scope: "col", text: i + 1 }));
    const row = make("tr", {}, make("th", { scope: "row", text: i + 1 }));
    for (const b of vectors) {
      const value = cosine(a, b);
      const cell = make("td", { text: value.toFixed(2) });
      const strength = (Math.max(0, value) * 0.5).toFixed(3);
      cell.style.backgroundColor = `rgb(var(--raise-rgb) / ${strength})`;
      row.append(cell);
    }
    body.append(row);
  });
  const table = make(
    "table", { class: "matrix" },
    make("caption", { class: "hidden", text: "Cosine similarity of passages" }),
    make("thead", {}, head), body,
  );
  const heading = make("h2", { text: "Similarity of the passages" });
  return make("section", { class: "card" }, heading, scrolling("Similarity", table));
}

function cosine(a, b) {
  let dot = 0, aa = 0, bb = 0;
  for (let i = 0; i < a.length; i += 1) {
    dot += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  return dot / Math.sqrt(aa * bb || 1);
}

function keep() {
  const parts = new URLSearchParams(FIELDS.map((name) => [name, form.elements[name].value]));
  history.replaceState(null, "", `#${parts}`);
}

function restore() {
  const parts = new URLSearchParams(location.hash.slice(1));
  if (location.hash && !parts.has("query")) return; // a link to a part of this page
  for (const name of ["query", "documents"]) {
    form.elements[name].value = parts.get(name) ?? EXAMPLE[name];
  }
  chooseModel(parts.get("model"));
}

form.addEventListener("input", later(keep, 300));
form.addEventListener("change", keep);
form.addEventListener("submit", (event) => {
  event.preventDefault();
  keep();
  rank();
});
setUp(form, keep);
window.addEventListener("hashchange", restore);
restore();
problems.watchKey(({ encoders }) => {
  cards = encoders;
  offerModels(cards.map((card) => card.id));
  if (!cards.length) problems.show(new Error("No encoder is served here."));
});

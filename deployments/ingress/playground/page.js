// What both pages do with their frame: the links, the shortcut, and the choice of a model.

import { byId, copy, make } from "./dom.js";

/** Set up the parts of the frame. `keep` puts the state into the address. */
export function setUp(form, keep) {
  byId("copy-link").addEventListener("click", async () => {
    keep();
    const copied = await copy(location.href);
    byId("status").textContent = copied ? "The link is copied." : "Copy the address of this page.";
  });
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address holds the state
    byId("answers").focus();
  });
  document.addEventListener("keydown", (event) => {
    const asked = event.key === "Enter" && (event.ctrlKey || event.metaKey) && !event.repeat;
    if (asked && !document.querySelector("dialog[open]")) form.requestSubmit();
  });
}

/** Offer the models that are served. Without one, nothing can be sent. */
export function offerModels(names) {
  const field = byId("model");
  const wanted = field.value || field.dataset.wanted;
  field.replaceChildren(...names.map((name) => make("option", { value: name, text: name })));
  byId("model-field").hidden = names.length < 2;
  byId("send").disabled = !names.length;
  chooseModel(wanted);
}

/** Choose a model, or the first one if it is not served; later, if the models are not known yet. */
export function chooseModel(name) {
  const field = byId("model");
  field.dataset.wanted = name ?? "";
  const served = [...field.options].map((option) => option.value);
  if (served.length) field.value = served.includes(name) ? name : served[0];
}

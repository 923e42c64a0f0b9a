// The API's sentences, at the fields that they are about.

import { apiKey, models } from "./api.js";
import { byId, make } from "./dom.js";

let typed = false; // since the sentences were taken away
document.addEventListener("input", () => { typed = true; });

/** Take all sentences away. */
export function clear() {
  typed = false;
  byId("problem").hidden = true;
  for (const sentence of document.querySelectorAll(".wrong")) sentence.remove();
  for (const field of document.querySelectorAll("[aria-invalid]")) {
    field.removeAttribute("aria-invalid");
    const before = field.dataset.describedBy;
    if (before) field.setAttribute("aria-describedby", before);
    else field.removeAttribute("aria-describedby");
  }
}

/**
 * Show an error at `field`, or above the answers if no field is known.
 *
 * The first field at fault is focused, unless something was typed since the request.
 */
export function show(error, field) {
  if (error.status === 401) field = askForKey();
  if (!field) {
    byId("problem").textContent = error.message;
    byId("problem").hidden = false;
    return;
  }
  if (field.hasAttribute("aria-invalid")) return;
  const id = `${field.id}-wrong`;
  field.dataset.describedBy = field.getAttribute("aria-describedby") ?? "";
  field.setAttribute("aria-invalid", "true");
  field.setAttribute("aria-describedby", `${id} ${field.dataset.describedBy}`.trim());
  field.closest("details")?.setAttribute("open", "");
  (field.closest(".row") ?? field).after(make("p", { id, class: "wrong", text: error.message }));
  if (!typed) field.focus();
}

function askForKey() {
  byId("key-field").hidden = false;
  return byId("key");
}

let load = null;
let loaded = Promise.resolve(false);

/** Keep the key that is typed, and call `changed` with the models that it may use. */
export function watchKey(changed) {
  const field = byId("key");
  field.value = apiKey.get();
  byId("key-field").hidden = !field.value;
  load = () => {
    loaded = models().then(
      (found) => {
        changed(found);
        return true;
      },
      (error) => {
        show(error, null);
        return false;
      },
    );
    return loaded;
  };
  field.addEventListener("input", () => apiKey.set(field.value.trim()));
  field.addEventListener("change", () => {
    clear();
    load();
  });
  load();
}

/** Wait until the models are known. Asks again if they are not. Returns whether they are. */
export async function ready() {
  return (await loaded) || load();
}

// Small helpers for elements.

export const byId = (id) => document.getElementById(id);

/** Make an element. `attributes` may hold `text` for its text; null and false leave one out. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value;
    else if (value !== null && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children);
  return element;
}

/** A word with an explanation, which shows under the pointer, and when it is focused or touched. */
export function tip(text, about) {
  return make("button", {
    type: "button", class: "tip", text, "data-tip": about, "aria-label": `${text}: ${about}`,
  });
}

/** A part that scrolls sideways by itself, also by keyboard. */
export function scrolling(label, content) {
  const about = { class: "scroll", tabindex: "0", role: "group", "aria-label": label };
  return make("div", about, content);
}

/** Call `action` after `ms` in which it was not asked for again. */
export function later(action, ms) {
  let timer;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(action, ms);
  };
}

/** Put a text on the clipboard. Returns whether that worked. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyByCommand(text); // only pages with TLS or of this machine have a clipboard
  }
}

function copyByCommand(text) {
  const field = make("textarea", { class: "hidden", "aria-hidden": true });
  const place = document.querySelector("dialog[open]") ?? document.body;
  const focused = document.activeElement;
  field.value = text;
  place.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return done;
}

/** Show a text in a dialog, with a button that copies it. */
export function offer(title, text) {
  const heading = make("h2", { id: "offer-title", text: title });
  const field = make("textarea", { readonly: true, rows: "14", "aria-labelledby": "offer-title" });
  field.value = text;
  const copied = make("span", { role: "status" });
  const button = make("button", { type: "button", class: "main", text: "Copy" });
  const close = make("button", { type: "button", text: "Close" });
  const dialog = make(
    "dialog", { "aria-labelledby": "offer-title" },
    heading, field, make("div", { class: "buttons" }, button, close, copied),
  );
  button.addEventListener("click", async () => {
    copied.textContent = (await copy(text)) ? "Copied." : "Select the text, and copy it.";
  });
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  button.focus();
}

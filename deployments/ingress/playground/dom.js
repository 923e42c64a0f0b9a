// Small helpers for elements.

export const byId = (id) => document.getElementById(id);

/** Make an element. `attributes` may hold `text` for its text; null and false leave one out. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value;
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** Call `action` after `ms` in which it was not asked for again. */
export function later(action, ms) {
  let timer;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(action, ms);
  };
}

/** Put a text on the clipboard; where the page may not, select it in `field` and use the command. */
export async function copy(text, field) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    field.focus();
    field.select();
    document.execCommand("copy");
  }
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
    await copy(text, field);
    copied.textContent = "Copied.";
  });
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  button.focus();
}

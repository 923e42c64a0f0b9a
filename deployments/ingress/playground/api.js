// Calls of this server's own API. Nothing else is ever called.

/** The address that the API's paths are relative to. */
const ABOVE = location.pathname.replace(/\/playground(\/.*)?$/, "/");
export const ROOT = new URL(ABOVE, location.origin);

const KEY = "cfg-serve-key"; // in the session's storage, which ends with the tab

/** An error that the API told: its sentence, and the field at fault or null. */
export class ApiError extends Error {
  constructor(message, param = null, status = 0) {
    super(message);
    this.param = param;
    this.status = status;
  }
}

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

/** POST `body` (or GET without one). Returns the response, or throws ApiError. */
export async function call(path, body, signal) {
  if (!/^[!-~]*$/.test(apiKey.get())) {
    throw new ApiError("No API key has spaces, or characters other than ASCII.", null, 401);
  }
  const headers = apiKey.get() ? { Authorization: `Bearer ${apiKey.get()}` } : {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const method = body === undefined ? "GET" : "POST";
  let response;
  try {
    response = await fetch(new URL(path, ROOT), {
      method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is it running?");
  }
  if (!response.ok) throw await told(response);
  return response;
}

async function told(response) {
  try {
    const { error } = await response.json();
    return new ApiError(error.message, error.param ?? null, response.status);
  } catch {
    return new ApiError(`The server answered ${response.status}.`, null, response.status);
  }
}

/** The models that generate text, and the encoders with the endpoints that each serves. */
export async function models() {
  const { data } = await (await call("v1/models")).json();
  const encoders = data.filter((card) => card.endpoints);
  const generators = data.filter((card) => !card.endpoints);
  return { generators: generators.map((card) => card.id), encoders };
}

/** Yield the JSON objects of a stream of server-sent events. Throws ApiError if it ends early. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(broken);
    if (done) throw new ApiError("The answer ended early: the connection was closed.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (!data) continue;
      const event = parsed(data);
      if (event.error) throw new ApiError(event.error.message, event.error.param ?? null);
      yield event;
    }
  }
}

function broken(error) {
  throw error.name === "AbortError" ? error : new ApiError("The connection broke in the answer.");
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ApiError("The answer is no JSON. Is something between this page and the server?");
  }
}

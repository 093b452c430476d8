// The only connection to the server: its public HTTP interface, as described in /docs.

const ROOT = new URL(".", location.href.split("#")[0]); // the server may have a path prefix
const KEY = "vitrine-key";
const PAGE = 4 << 20; // bytes of a file, the most in one answer
const MOST_DOWNLOAD = 2 ** 31; // bytes gathered in the browser

/** Emits `away` and `back` (the server's state), and `nokey` (it requires a key). */
export const server = new EventTarget();

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** A rejected request, or the reason why the server could not be reached. */
export class ApiError extends Error {
  constructor(message, status = 0, code = null, param = null, retryAfter = null) {
    super(param ? `${param}: ${message}` : message);
    Object.assign(this, { status, code, param });
    this.hint = retryAfter ? `Try again in ${retryAfter} s.` : status === 0 ? "Is it still running?" : "";
  }
}

export const isAbort = (error) => error?.name === "AbortError";

export function address(path, query = {}) {
  const url = new URL(path, ROOT);
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== "" && one != null) url.searchParams.append(name, one);
  }
  return url;
}

async function send(method, path, { body, query, headers = {}, signal } = {}) {
  const sent = { ...headers };
  if (key.get()) sent.Authorization = `Bearer ${key.get()}`;
  const isFile = body instanceof ArrayBuffer;
  if (body !== undefined) sent["Content-Type"] = isFile ? "application/octet-stream" : "application/json";
  let answer;
  try {
    const data = body === undefined || isFile ? body : JSON.stringify(body);
    answer = await fetch(address(path, query), { method, headers: sent, body: data, signal, cache: "no-store" });
  } catch (error) {
    if (isAbort(error)) throw error;
    server.dispatchEvent(new Event("away"));
    throw new ApiError("The server does not respond.");
  }
  server.dispatchEvent(new Event("back"));
  if (answer.ok) return answer;
  if (answer.status === 401) server.dispatchEvent(new Event("nokey"));
  const told = await answer.json().catch(() => null);
  const { message, code, param } = told?.error ?? { message: `The server responded with ${answer.status}.` };
  throw new ApiError(message, answer.status, code, param, answer.headers.get("Retry-After"));
}

/** A route's answer as JSON. */
export async function call(method, path, options) {
  const answer = await send(method, path, options);
  return broken(() => answer.json());
}

export const get = (path, query, signal) => call("GET", path, { query, signal });
export const post = (path, body, signal) => call("POST", path, { body, signal });

/** The events of a streamed answer, one after another; closing it, or the signal, frees the server's slot. */
export async function* stream(path, body, signal) {
  const answer = await send("POST", path, { body: { ...body, stream: true }, signal });
  const reader = answer.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let ended = false;
  try {
    for (;;) {
      const { value, done } = await broken(() => reader.read());
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      const events = rest.split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if ((ended ||= data === "[DONE]")) continue;
        const told = JSON.parse(data);
        if (told.error) throw new ApiError(told.error.message, 500, told.error.code, told.error.param);
        yield told;
      }
      if (done && ended) return;
      if (done) throw new ApiError("The response broke off before its end.");
    }
  } finally {
    reader.cancel().catch(() => {}); // the answer may have ended already
  }
}

/** Runs a step of reading an answer; a connection that ends there means that the server is away. */
async function broken(step) {
  try {
    return await step();
  } catch (error) {
    if (isAbort(error)) throw error;
    server.dispatchEvent(new Event("away"));
    throw new ApiError("The server disconnected before the response's end.");
  }
}

/** The bytes of a file from `first` to before `end`, fetched in ranges. The browser may keep them on disk. */
export async function bytes(path, query, { signal, first = 0, end = Infinity, progress = () => {} } = {}) {
  const pages = [];
  for (let have = first; have < end; ) {
    const headers = { Range: `bytes=${have}-${Math.min(have + PAGE, end) - 1}` };
    const answer = await send("GET", path, { query, headers, signal });
    const page = await broken(() => answer.blob());
    end = Math.min(end, Number(/\/(\d+)$/.exec(answer.headers.get("Content-Range") ?? "")?.[1] ?? page.size));
    if (end - first > MOST_DOWNLOAD) {
      throw new ApiError(`It has ${end - first} bytes: too much for a browser. Use \`python -m deployments.activations pull\`.`);
    }
    pages.push(page);
    have += page.size;
    progress(have - first, end - first);
    if (!page.size) break;
  }
  return new Blob(pages, { type: "application/octet-stream" });
}

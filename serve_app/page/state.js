// A view's state in the URL's fragment: `#lens=<base64url of JSON>`. Never a key.

const MOST = 1 << 20; // the most characters of a fragment

/** The view and state in the address. Throws if the link is damaged. */
export function read(hash = location.hash) {
  const [, view = "", coded = ""] = /^#([a-z]*)=?(.*)$/s.exec(hash.slice(0, MOST)) ?? [];
  if (!coded) return { view, state: {} };
  try {
    const bytes = Uint8Array.from(atob(coded.replace(/-/g, "+").replace(/_/g, "/")), (one) => one.charCodeAt(0));
    const state = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
    if (typeof state !== "object" || state === null || Array.isArray(state)) throw new Error("no object");
    return { view, state };
  } catch {
    return { view, state: {}, damaged: true };
  }
}

/** The fragment for a view and its state. */
export function written(view, state) {
  const bytes = new TextEncoder().encode(JSON.stringify(state));
  let text = "";
  for (let i = 0; i < bytes.length; i += 0x8000) text += String.fromCharCode(...bytes.subarray(i, i + 0x8000));
  return `#${view}=${btoa(text).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "")}`;
}

/** A link's value as a text, a number, a boolean or a list of token ids; otherwise the default. */
export const asText = (value, other = "") => (typeof value === "string" ? value : other);
export const asNumber = (value, other) => (Number.isFinite(value) ? value : other);
export const asBool = (value, other) => (typeof value === "boolean" ? value : other);
export const asIds = (value) =>
  Array.isArray(value) && value.length && value.every((id) => Number.isInteger(id) && id >= 0) ? value : null;

// Downloads of stored runs: by a link for one use, which the browser fetches itself; larger ones in pages.

import { address, bytes, call } from "./api.js";
import { button, choose, h } from "./dom.js";
import { work } from "./work.js";

const FORMATS = { arrow: "arrows", safetensors: "safetensors", npz: "npz", pt: "pt" };

/** A button that downloads a session or one of its runs, its Stop, and a choice of format; errors are shown in `trouble`. */
export function downloads(session, run, trouble) {
  const format = choose(Object.keys(FORMATS).map((one) => [one]), { "aria-label": "Format" });
  const start = button("Download", async () => {
    const path = `v1/activations/session/${encodeURIComponent(session)}/data`;
    const query = { run, format: format.value };
    const progress = (have, whole) => (start.textContent = `${Math.round((100 * have) / whole)}%`);
    await loading.run(async (signal) => {
      if (!(await linked(path, query, signal))) save(await bytes(path, query, { signal, progress }), `${run || session}.${FORMATS[query.format]}`);
    });
    start.textContent = "Download";
  });
  const loading = work({ trouble, starts: start, what: "the download" });
  return [start, loading.stop, format];
}

/** Lets the browser download by a link; false if the download is too large for one. */
async function linked(path, query, signal) {
  try {
    const made = await call("POST", path, { query, signal });
    // With `download`, an error answer does not replace the page.
    h("a", { href: address(made.path.slice(1)), download: "" }).click();
    return true;
  } catch (error) {
    if (error.code === "link_too_large") return false;
    throw error;
  }
}

function save(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

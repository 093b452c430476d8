// Downloads of stored runs as Arrow files, with the key in a header.

import { bytes, get } from "./api.js";
import { button, h } from "./dom.js";
import { fileOf } from "./recompute.js";
import { work } from "./work.js";

/** A button that downloads the files of a session, or the one that has a run, and its Stop; errors are shown in `trouble`. */
export function downloads(session, run, trouble) {
  const start = button("Download", async () => {
    await loading.run(async (signal) => {
      const files = await filesOf(session, run, signal);
      for (const [i, [name, file]] of files.entries()) {
        const progress = (have, whole) => (start.textContent = `${Math.round((100 * (i + have / whole)) / files.length)}%`);
        save(await bytes(...file, { signal, progress }), name);
      }
    });
    start.textContent = "Download";
  });
  const loading = work({ trouble, starts: start, what: "the download" });
  return [start, loading.stop];
}

/** The files that have a session's runs, or one of them: each one's name, and what `bytes` needs for it. */
async function filesOf(session, run, signal) {
  const found = new Map();
  for (let after = ""; ; ) {
    const { data, has_more: more } = await get("v1/activations/runs", { session, run, limit: 1000, after }, signal);
    for (const one of data) found.set(`${one.owner ?? ""}/${one.file}`, [one.file, fileOf(one)]);
    if (!more) return [...found.values()];
    after = data.at(-1).run_id;
  }
}

function save(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

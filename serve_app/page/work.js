// What a view has the server do: one thing at a time, with the button that stops it.

import { isAbort } from "./api.js";
import { button, errorNote } from "./dom.js";

/**
 * `run(act, again)` ends what ran and calls `act(signal)`; `join(act, again)` calls it beside what runs. Meanwhile the
 * button `stop` is shown, the button `starts` is disabled, and `status` has what `act` writes there. What fails is said
 * in `trouble`, with a button that calls `again`. Both give true at the end of `act`, false where it was stopped or
 * failed, and null where `end()` or another `run` has taken its place.
 */
export function work({ trouble, starts = null, status = null }) {
  let running = null; // `{ control, count }`, how many run together
  const stop = button("Stop", () => running?.control.abort(), { hidden: true });

  function show(one) {
    running = one;
    stop.hidden = !one;
    if (starts) starts.disabled = Boolean(one);
    if (status) status.textContent = "";
  }

  function end() {
    running?.control.abort();
    show(null);
  }

  async function join(act, again) {
    if (!running) {
      trouble.replaceChildren();
      show({ control: new AbortController(), count: 0 });
    }
    const mine = running;
    mine.count += 1;
    try {
      await act(mine.control.signal);
      return running === mine || null;
    } catch (error) {
      if (mine.count === 1) mine.control.abort(); // of several requests of `act`, one may have failed alone
      if (running !== mine) return null;
      if (!isAbort(error)) trouble.replaceChildren(errorNote(error, again));
      return false;
    } finally {
      mine.count -= 1;
      if (running === mine && !mine.count) show(null);
    }
  }

  const run = (act, again = () => run(act)) => (end(), join(act, again));

  return { stop, run, join, end, isRunning: () => running !== null };
}

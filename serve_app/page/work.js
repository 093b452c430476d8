// What a view has the server do: one thing at a time, with the button that stops it.

import { isAbort } from "./api.js";
import { button, errorNote, goTo } from "./dom.js";

/**
 * `run(act, again)` ends what ran and calls `act(signal)`; `join(act, again)` calls it beside what runs. Meanwhile the
 * button `stop` is shown, the button `starts` does nothing, and `status` has what `act` writes there. What fails is said
 * in `trouble`, with a button that calls `again`. Both give true at the end of `act`, false where it was stopped or
 * failed, and null where `end()` or another `run` has taken its place. Where a view can do several things at once,
 * `what` says which one `stop` ends. The focus of a button that goes away is handed to `home()`.
 */
export function work({ trouble, starts = null, status = null, what = "", home = () => starts }) {
  let running = null; // `{ control, count }`, how many run together
  const stop = button(what ? `Stop ${what}` : "Stop", () => running?.control.abort(), { hidden: true });

  // `disabled` would take the focus from it.
  const hold = (event) => running && (event.preventDefault(), event.stopImmediatePropagation());
  starts?.addEventListener("click", hold, { capture: true });

  function show(one) {
    const hadFocus = document.activeElement === stop;
    running = one;
    stop.hidden = !one;
    starts?.setAttribute("aria-disabled", String(Boolean(one)));
    if (status) status.textContent = "";
    if (hadFocus && !one) goTo(home());
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
      if (!isAbort(error)) trouble.replaceChildren(errorNote(error, again, home));
      return false;
    } finally {
      mine.count -= 1;
      if (running === mine && !mine.count) show(null);
    }
  }

  const run = (act, again = () => run(act)) => (end(), join(act, again));

  return { stop, run, join, end, isRunning: () => running !== null };
}

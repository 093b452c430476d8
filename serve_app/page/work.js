// A view's requests to the server: one at a time, with the button that stops it.

import { isAbort } from "./api.js";
import { button, errorNote, goTo } from "./dom.js";

/**
 * `run(act, again)` cancels the current work and calls `act(signal)`; `join(act, again)` runs beside it. Meanwhile the
 * button `stop` is shown, the button `starts` does nothing, and `status` has the text that `act` writes. Errors are shown
 * in `trouble`, with a button that calls `again`. Both return true at the end of `act`, false if it was stopped or
 * failed, and null if `end()` or another `run` has replaced it. If a view can do several things at once, `what` names
 * the one that `stop` cancels. The focus of a button that disappears moves to `home()`.
 */
export function work({ trouble, starts = null, status = null, what = "", home = () => starts }) {
  let running = null; // `{ control, count }`: how many run together
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
      if (mine.count === 1) mine.control.abort(); // one of several requests of `act` may have failed alone
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

// A question before something changes: one dialog with one field, and the server's reason when it refuses.

import { $, say, tell } from "./dom.js";

let asked = null;

// `label`: of the field (null: there is none), `value`: what it holds at first; `must`: what has to be typed in it before anything is done.
// `act(text)` does it; what it throws is shown.
export function ask({ title, text, verb, label = "Reason, for the journal", value = "", must = null, act }) {
  asked = { must, act };
  say($("ask-title"), title);
  say($("ask-text"), text);
  tell($("ask-label"), label ?? "");
  $("ask-field").hidden = label === null;
  say($("ask-yes"), verb);
  $("ask-field").value = value;
  tell($("ask-problem"), "");
  allow();
  $("ask").showModal();
  if (label === null) $("ask-yes").focus();
  else $("ask-field").select();
}

export const because = (text) => text || "asked for on the dashboard";

function allow() {
  $("ask-yes").disabled = asked.must !== null && $("ask-field").value.trim() !== asked.must;
}

async function act() {
  const now = asked;
  if ($("ask-yes").disabled) return;
  $("ask-yes").disabled = true;
  tell($("ask-problem"), "");
  try {
    await now.act($("ask-field").value.trim());
    if (now === asked) $("ask").close();
  } catch (error) {
    if (now === asked) tell($("ask-problem"), `Not done: ${error.message}`);
  }
  allow();
}

$("ask-no").addEventListener("click", () => $("ask").close());
$("ask-yes").addEventListener("click", act);
$("ask-field").addEventListener("input", allow);
$("ask-field").addEventListener("keydown", (event) => event.key === "Enter" && act());

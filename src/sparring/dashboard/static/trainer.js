// The trainer's part of the page: only figures that its algorithm has.

import { $, list, say } from "./dom.js";
import { count, duration, number, percent, plural } from "./format.js";

const SILENCE = 15; // seconds after which a trainer that should say something counts as silent
const METRICS = 4; // of the algorithm's own

export function showTrainer(trainer, paused, now) {
  $("trainer").hidden = trainer === null;
  $("trainer-empty").hidden = trainer !== null;
  say($("trainer-algorithm"), trainer?.algorithm ?? "");
  say($("trainer-empty"), paused ? "Training is paused. Play is still stored." : "No trainer works on this game.");
  $("progress-part").hidden = true;
  if (trainer === null) return;
  showState(trainer, paused, now);
  showProgress(trainer);
  list($("trainer-figures"), figures(trainer), ([name, text, title], row = document.createElement("div")) => {
    if (!row.firstChild) row.append(document.createElement("dt"), document.createElement("dd"));
    say(row.firstChild, name);
    say(row.lastChild, text);
    row.title = title ?? "";
    return row;
  });
}

function showState(trainer, paused, now) {
  const silent = now - trainer.updated;
  const state = paused ? "paused" : trainer.state;
  const stalled = silent > SILENCE && !/^(stopped|failed|paused)/.test(state);
  say($("trainer-state"), state + (stalled ? `, silent for ${duration(silent)}` : ""));
  $("trainer-state").dataset.tone = /^failed|cannot publish/.test(state) || stalled ? "bad" : state;
}

// Before the first update: how much of the play it needs is there.
function showProgress({ updates, gathered, needed }) {
  $("progress-part").hidden = updates > 0 || !needed;
  const there = Math.min(gathered, needed);
  say($("progress-text"), `${there.toLocaleString("en-GB")} of ${needed.toLocaleString("en-GB")} steps needed to begin`);
  Object.assign($("progress"), { max: Math.max(needed, 1), value: there });
}

function figures(t) {
  const found = [["Updates", `${count(t.updates)}, ${number(t.updates_per_s)} per second`]];
  const metrics = Object.entries(t.metrics).slice(0, METRICS);
  if (metrics.length) for (const [name, value] of metrics) found.push([words(name), number(value), name]);
  else if (t.loss !== null) found.push(["Loss", number(t.loss)]);
  if (t.exploration !== null) found.push(["Exploration", percent(t.exploration), "How often, or how far, it tries something else than the best it knows"]);
  if (t.evaluation !== null) found.push(["Evaluation", number(t.evaluation), "Mean return of its newest policy in simulation"]);
  found.push([t.on_policy ? "Waits for the next update" : "Replay window", plural(t.window, "step")]);
  if (t.people_steps || t.bot_steps) found.push(["Learns from", `${count(t.people_steps)} steps of people, ${count(t.bot_steps)} of bots`]);
  for (const [why, steps] of Object.entries(t.left_out)) found.push(["Leaves out", `${plural(steps, "step")}: ${why}`]);
  found.push(["Not learned from yet", t.lag ? plural(t.lag, "fragment") : "none"]);
  return found;
}

// "loss/q" → "Loss (q)", "policy/entropy" → "Policy entropy"
function words(name) {
  const [group, rest] = name.split("/", 2);
  const first = group.charAt(0).toUpperCase() + group.slice(1);
  if (rest === undefined) return first;
  return group === "loss" ? `Loss (${rest})` : `${first} ${rest}`;
}

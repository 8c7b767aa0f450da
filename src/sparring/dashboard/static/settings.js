// How the game is learned: what is set, for it or for all games, and one field each to change it.

import { $, change, getJson, list, say, tell } from "./dom.js";

const LOOK = 5; // seconds
// Keys as `sparring settings` writes them.
const MEANINGS = {
  algorithm: "what learns",
  "promotion.publish_every": "seconds between promotions at least",
  "promotion.candidate_every": "seconds between candidates of a declared game",
  "promotion.canary": "share of play that a candidate gets",
  "promotion.alpha": "how often a difference may be found where there is none",
  "promotion.least_episodes": "episodes of a candidate before anything is decided",
  "promotion.most_episodes": "episodes of a candidate before it is given up",
  "promotion.keep": "newest and last promoted versions that are kept",
  "promotion.evaluate_every": "seconds between evaluations, in simulation",
  "promotion.evaluation_episodes": "episodes of each evaluation",
  pace: "seconds between a client’s uploads at least",
};
const HYPER = "hyperparameters.";

export class Settings {
  constructor(changed) {
    this.changed = changed;
    this.reset(null);
    $("add-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.add();
    });
  }

  reset(game) {
    Object.assign(this, { game, info: null, asked: -Infinity });
    list($("settings"), [], () => null);
    $("add-form").reset();
    tell($("add-problem"), "");
  }

  // The trainer's state tells what only it can say of its settings.
  follow({ game, trainer, paused }) {
    if (game !== this.game) this.reset(game);
    const state = trainer && (paused ? "paused" : trainer.state);
    say($("settings-trainer"), trainer ? `Trainer: ${trainer.algorithm}, ${state}` : "No trainer works on this game.");
    if (performance.now() - this.asked > LOOK * 1000) this.look();
    if (this.info) this.show();
  }

  get path() {
    return `v1/games/${encodeURIComponent(this.game)}/settings`;
  }

  async look() {
    this.asked = performance.now();
    const game = this.game;
    const info = await getJson(this.path).catch(() => null); // asked again; the connection tells who is away
    if (info === null || game !== this.game) return;
    this.info = info;
    this.changed();
  }

  show() {
    const { settings, effective, defaults } = this.info;
    const hyper = Object.keys(effective.hyperparameters ?? {}).map((key) => HYPER + key);
    const [first, ...rest] = Object.keys(MEANINGS);
    const rows = [first, ...hyper, ...rest];
    const shown = [...$("settings").children].map((row) => row.dataset.key);
    if (shown.join("\n") !== rows.join("\n")) list($("settings"), [], () => null);
    list($("settings"), rows, (key, row = this.row(key)) => {
      const own = read(settings, key);
      const platform = read(effective, key);
      const [set, reset] = row.querySelectorAll("button");
      const field = row.querySelector("input");
      if (!row.dataset.changed) field.value = own === undefined ? "" : written(own);
      const usual = platform ?? read(defaults, key);
      field.placeholder = usual === undefined ? (key === "pace" ? "as clients like" : "") : written(usual);
      say(row.querySelector(".whose"), own !== undefined ? "set for this game" : platform !== undefined ? "set for all games" : "");
      set.hidden = !row.dataset.changed;
      reset.hidden = own === undefined || Boolean(row.dataset.changed);
      return row;
    });
  }

  row(key) {
    const row = $("setting-row").content.firstElementChild.cloneNode(true);
    const [field, problem] = [row.querySelector("input"), row.querySelector(".problem")];
    row.dataset.key = key;
    say(row.querySelector(".setting-key"), key);
    say(row.querySelector(".means"), MEANINGS[key] ?? "of the algorithm");
    problem.id = `problem-${key}`;
    field.setAttribute("aria-describedby", problem.id);
    field.addEventListener("input", () => {
      row.dataset.changed = "yes";
      this.show();
    });
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      delete row.dataset.changed;
      tell(problem, "");
      this.show();
    });
    row.addEventListener("submit", (event) => {
      event.preventDefault();
      if (row.dataset.changed) this.set(key, field.value.trim(), row);
    });
    row.querySelector(".reset").addEventListener("click", () => this.set(key, "", row));
    return row;
  }

  async set(key, text, row) {
    const done = await this.put(key, text, row, row.querySelector(".problem"));
    if (!done) return;
    delete row.dataset.changed;
    this.show();
  }

  async add() {
    const [key, value] = [$("add-key").value.trim(), $("add-value").value.trim()];
    if (!key || !value) return;
    if (await this.put(HYPER + key, value, $("add-form"), $("add-problem"))) {
      $("add-form").reset();
      this.show();
    }
  }

  // One setting, over those that there are now; the server takes them all together.
  async put(key, text, row, problem) {
    const game = this.game;
    row.setAttribute("aria-busy", "true");
    tell(problem, "");
    try {
      const { settings } = await getJson(this.path);
      this.info = await change("PUT", this.path, withSetting(settings, key, text));
      return game === this.game;
    } catch (error) {
      if (game === this.game) tell(problem, `Not set: ${error.message}`);
      return false;
    } finally {
      row.removeAttribute("aria-busy");
    }
  }
}

// "promotion.canary" in nested settings; a hyperparameter's own name may have dots.
function split(key) {
  const dot = key.indexOf(".");
  return dot < 0 ? [null, key] : [key.slice(0, dot), key.slice(dot + 1)];
}

function read(settings, key) {
  const [group, name] = split(key);
  return (group === null ? settings : settings[group])?.[name] ?? undefined;
}

function withSetting(settings, key, text) {
  const [group, name] = split(key);
  const wanted = structuredClone(settings);
  const place = group === null ? wanted : (wanted[group] ??= {});
  if (text === "") delete place[name];
  else place[name] = key === "algorithm" ? text : value(text);
  return wanted;
}

// Numbers, lists and such are JSON; anything else is a word. What is wrong with it the server says.
function value(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

function written(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

// A/B tests of the game: the one that runs and how it stands, those that have ended, and the way to start and end one.

import { ask, because } from "./ask.js";
import { $, change, fill, getJson, list, say, tell } from "./dom.js";
import { ago, count, number, percent, plural, signed } from "./format.js";

const MODEL = "bot"; // what players get without a test
const LOOK = 15; // seconds between looks while the results are not on the screen …
const LOOK_OPEN = 5; // … and while they are

export class AbTests {
  // `now`: the server's clock; `changed`: to call when something else is to be shown.
  constructor(now, changed) {
    Object.assign(this, { now, changed });
    this.reset(null);
    $("ab-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.start();
    });
    $("ab-end").addEventListener("click", () => this.end(null));
    $("arms").addEventListener("click", (event) => {
      const button = event.target.closest("button.keep");
      if (button) this.end(button.dataset.model);
    });
  }

  reset(game) {
    Object.assign(this, { game, running: null, ended: [], results: null, models: null, asked: -Infinity, whole: false });
    $("ab-shares").replaceChildren();
    $("ab-reason").value = "";
    tell($("ab-problem"), "");
  }

  path(rest = "") {
    return `v1/games/${encodeURIComponent(this.game)}/${rest}`;
  }

  follow(game, open) {
    if (game !== this.game) this.reset(game);
    const due = performance.now() - this.asked > (open ? LOOK_OPEN : LOOK) * 1000;
    if (due || (open && !this.whole)) this.look(open);
    this.showRunning();
    if (open) this.show();
  }

  async look(open) {
    Object.assign(this, { asked: performance.now(), whole: open });
    const game = this.game;
    try {
      const { running, ended } = await getJson(this.path("ab"));
      const results = open && running ? await getJson(this.path("ab/results")) : (ended[0]?.results ?? null);
      const models = open ? (await getJson(this.path("models"))).filter(({ latest }) => latest).map(({ model }) => model) : this.models;
      if (game !== this.game) return;
      Object.assign(this, { running, ended, results, models });
      this.changed();
    } catch (error) {
      console.info(`A/B tests are not known: ${error.message}`); // asked again; the connection tells who is away
    }
  }

  // Beside what players get.
  showRunning() {
    $("ab-part").hidden = !this.running;
    if (this.running) say($("ab-shares-now"), shares(this.running));
  }

  show() {
    const { running, ended, results } = this;
    const shown = running ?? ended[0] ?? null;
    $("ab-now").hidden = !shown || !results;
    if (shown && results) this.showResults(shown, results);
    $("ab-end").hidden = !running;
    this.showForm();
    const rows = running ? ended : ended.slice(1); // the newest has its results above
    $("ended").hidden = rows.length === 0;
    fill("ended", rows, (cell, test) => {
      cell("what", shares(test));
      cell("why", [test.reason, test.results?.verdict, kept(test)].filter(Boolean).join(" · "));
      cell("age", ago(this.now() - test.ended));
    });
  }

  showResults(test, { arms, verdict, left_out: left }) {
    const when = test.ended ? `Ended ${ago(this.now() - test.ended)}, ${kept(test)}` : `Started ${ago(this.now() - test.started)}`;
    say($("ab-about"), [when, test.by, test.reason].filter(Boolean).join(" · "));
    const rows = arms.flatMap((arm) => [["bots", arm.bots], ["people", arm.people]].map(([whose, returns]) => ({ arm, whose, ...returns })));
    const known = rows.flatMap(({ mean, low, high }) => [mean, low, high]).filter((value) => value !== null);
    const [from, to] = [Math.min(...known), Math.max(...known)];
    const place = (value) => (to > from ? (value - from) / (to - from) : 0.5);
    fill("arms", rows, (cell, row) => {
      const first = row.whose === "bots";
      cell("model", first ? row.arm.model : "").title = row.arm.model;
      cell("share", first ? percent(row.arm.share) : "");
      cell("whose", row.whose).className = `whose ${row.whose}`;
      cell("episodes", count(row.episodes)).title = row.players === null ? "" : `of ${plural(row.players, "player")}`;
      cell("players", row.players === null ? "" : count(row.players));
      cell("mean", number(row.mean));
      const span = cell("span");
      span.className = `span ${row.whose}`;
      span.hidden = row.mean === null;
      const [low, high] = [row.low ?? row.mean, row.high ?? row.mean];
      if (row.mean !== null) for (const [name, value] of [["low", low], ["high", high], ["mean", row.mean]]) span.style.setProperty(`--${name}`, place(value).toFixed(4));
      cell("interval", row.mean === null ? "" : interval(row.low, row.high, number));
      cell("difference", row.difference === null ? "" : `${signed(row.difference)} (${interval(row.difference_low, row.difference_high, signed)})`);
      const keep = cell("keep");
      keep.hidden = !first || row.arm.model === MODEL || Boolean(test.ended);
      keep.dataset.model = row.arm.model;
      keep.setAttribute("aria-label", `keep ${row.arm.model}`);
    }, Infinity);
    say($("ab-verdict"), verdict + (left ? ` (${plural(left, "episode")} of another model than their player’s left out: begun before, or asked for by name)` : ""));
  }

  showForm() {
    const models = this.models ?? [];
    const open = this.models !== null && !this.running;
    $("ab-few").hidden = !open || models.length > 1;
    if (!$("ab-few").hidden) say($("ab-few-text"), `A test needs two models or more, and this game has ${models.length ? `only ${models.join(", ")}` : "none yet"}. This publishes another one:`);
    say($("ab-few-command"), `sparring publish RUN --game ${this.game} --model careful`);
    $("ab-form").hidden = !open || models.length < 2;
    const old = new Set([...$("ab-shares").children].map((row) => row.dataset.model));
    if (models.length === old.size && models.every((model) => old.has(model))) return;
    list($("ab-shares"), [], () => null);
    list($("ab-shares"), [...models].sort((a, b) => (b === MODEL) - (a === MODEL)), (model, row = $("share-row").content.firstElementChild.cloneNode(true)) => {
      row.dataset.model = model;
      say(row.getElementsByClassName("model")[0], model);
      row.querySelector("input").value = $("ab-shares").childElementCount < 2 ? "0.5" : "";
      return row;
    });
  }

  async start() {
    const given = [...$("ab-shares").children].map((row) => [row.dataset.model, row.querySelector("input").value.trim()]);
    const wanted = Object.fromEntries(given.filter(([, text]) => text).map(([model, text]) => [model, numeral(text)]));
    tell($("ab-problem"), "");
    $("ab-start").disabled = true;
    try {
      this.running = await change("POST", this.path("ab"), { shares: wanted, reason: $("ab-reason").value.trim() });
      $("ab-reason").value = "";
      this.results = null;
    } catch (error) {
      tell($("ab-problem"), `Not started: ${error.message}`);
    }
    $("ab-start").disabled = false;
    this.look(true);
  }

  end(keep) {
    const { id } = this.running;
    ask({
      title: keep ? `End the A/B test and keep ${keep}?` : "End the A/B test?",
      text: keep ? `All players get ${keep}, as the next version of ${MODEL}. Its results are kept.` : `All players get ${MODEL} again. Its results are kept.`,
      verb: keep ? "Keep it" : "End it",
      act: async (text) => {
        const query = new URLSearchParams({ test: id, reason: because(text), ...(keep ? { keep } : {}) });
        await change("DELETE", this.path(`ab?${query}`)).finally(() => this.look(true));
      },
    });
  }
}

function shares(test) {
  return Object.entries(test.shares).map(([model, share]) => `${model} ${percent(share)}`).join(", ");
}

function kept(test) {
  return test.kept ? `players got ${test.kept}` : `players got ${MODEL}`;
}

function interval(low, high, write) {
  return low === null || high === null ? "too few yet" : `${write(low)} … ${write(high)}`;
}

// What is no number goes to the server as it was typed: it says what is wrong with it.
function numeral(text) {
  return Number.isNaN(Number(text)) ? text : Number(text);
}

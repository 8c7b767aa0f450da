// What players get: the stable version and the candidate, who moved them and why, and the buttons to move them; beside
// it the game's other models, and what was rejected.

import { ask, because } from "./ask.js";
import { $, change, fill, getJson, list, say, tell } from "./dom.js";
import { ago, percent, plural } from "./format.js";

const MODEL = "bot"; // that the trainer publishes
const LOOK = 15; // seconds between looks at aliases, whose changes come without an event
const MOVES = 50;

export class Serving {
  // `now`: the server's clock; `changed`: to call when something else is to be shown.
  constructor(now, changed) {
    Object.assign(this, { now, changed });
    this.reset(null);
    this.opened = false; // the list of what was rejected
    $("rejected-list").hidden = true;
    $("rejected").addEventListener("click", () => this.toggle());
    this.listen();
  }

  reset(game) {
    Object.assign(this, { game, aliases: [], moves: [], models: [], rejections: [], key: null, moved: null, asked: -Infinity, rejected: 0 });
  }

  path(rest) {
    return `v1/games/${encodeURIComponent(this.game)}/${rest}`;
  }

  get roles() {
    return Object.fromEntries(["candidate", "stable"].filter((name) => this.alias(name)).map((name) => [this.alias(name).version, name]));
  }

  alias(name) {
    return this.aliases.find((alias) => alias.name === name);
  }

  // All names of a version, those of one's own after the two that everybody has.
  names(version) {
    const usual = (name) => ["stable", "candidate"].indexOf(name) >>> 0; // -1 is the largest of all
    const names = this.aliases.filter((alias) => alias.version === version).map(({ name }) => name);
    return names.sort((a, b) => usual(a) - usual(b) || a.localeCompare(b));
  }

  // Looks again when the snapshot says that something moved, and now and then.
  follow(snapshot) {
    if (snapshot.game !== this.game) this.reset(snapshot.game);
    const { latest, trainer, stats } = snapshot;
    const key = JSON.stringify([latest, trainer?.candidate, trainer?.decision]);
    const due = performance.now() - this.asked > LOOK * 1000;
    const there = latest !== null || trainer?.candidate != null; // else every new game's page would ask for nothing
    if (there && (key !== this.key || due)) {
      this.key = key;
      this.look();
    }
    if (this.opened && stats.rejected !== this.rejected) this.lookAtRejected(stats.rejected);
    this.trainer = trainer;
    this.show(snapshot);
  }

  async look() {
    this.asked = performance.now();
    const game = this.game;
    try {
      const [aliases, models] = await Promise.all([getJson(this.path(`models/${MODEL}/aliases`)), getJson(this.path("models"))]);
      if (game !== this.game) return; // `path` is the chosen game's: another one may have no model
      const moved = JSON.stringify(aliases);
      const moves = moved === this.moved ? this.moves : await getJson(this.path(`models/${MODEL}/moves?limit=${MOVES}`));
      if (game !== this.game) return;
      Object.assign(this, { aliases, moves, moved, models: models.filter(({ model }) => model !== MODEL) });
      this.changed();
    } catch (error) {
      console.info(`what players get is not known: ${error.message}`); // asked again; the connection tells who is away
    }
  }

  show({ trainer }) {
    const [stable, candidate] = [this.alias("stable"), this.alias("candidate")];
    $("serving-empty").hidden = Boolean(stable);
    say($("serving-empty"), candidate ? "Random play, until a version is better." : "Random play, until the first version is published.");
    $("serving").hidden = !stable && !candidate;
    $("stable-part").hidden = !stable;
    if (stable) {
      say($("stable"), `v${stable.version}${stable.pinned ? ", pinned" : ""}`);
      say($("stable-why"), [stable.since ? ago(this.now() - stable.since) : "", stable.by, stable.reason].filter(Boolean).join(" · "));
      say($("pin"), stable.pinned ? "unpin" : "pin");
    }
    $("candidate-part").hidden = !candidate;
    if (candidate) {
      const share = candidate.share ? ` in ${percent(candidate.share)} of the episodes` : ", served to nobody";
      say($("candidate"), `v${candidate.version}${share}`);
      const evidence = trainer?.candidate === candidate.version ? trainer.evidence : "";
      tell($("candidate-why"), evidence || candidate.reason);
    }
    $("evidence-part").hidden = Boolean(candidate) || !trainer?.evidence;
    say($("evidence"), trainer?.evidence ?? "");
    $("decision-part").hidden = !trainer?.decision;
    say($("decision"), trainer?.decision ?? "");
    this.showMoves();
    this.showModels();
  }

  showMoves() {
    $("moves-part").hidden = this.moves.length === 0;
    fill("moves", this.moves, (cell, move) => {
      const what = move.version === null ? `${move.alias} removed` : `${move.alias}: ${move.previous && move.previous !== move.version ? `v${move.previous} → ` : ""}v${move.version}`;
      cell("what", what + (move.pinned ? ", pinned" : ""));
      cell("why", `${move.by}${move.reason ? `: ${move.reason}` : ""}`);
      cell("age", ago(this.now() - move.time)).title = new Date(move.time * 1000).toLocaleString("en-GB");
    });
  }

  showModels() {
    $("models-part").hidden = this.models.length === 0;
    list($("models"), this.models, ({ model, versions, latest }, item = document.createElement("li")) => {
      if (!item.firstChild) item.append(document.createElement("a"), document.createElement("span"));
      const [link, rest] = item.children;
      say(link, model);
      const version = latest?.version ?? versions.at(-1);
      link.href = this.path(`models/${encodeURIComponent(model)}/${version}/files/card.md`);
      say(rest, `: ${plural(versions.length, "version")}, ${latest ? `players get v${latest.version}` : `newest v${version}`}`);
      return item;
    });
  }

  // --- rejected fragments

  showRejected(total) {
    $("rejected-part").hidden = !total;
    say($("rejected"), `${plural(total, "fragment")} rejected so far`);
    $("rejected").setAttribute("aria-expanded", String(this.opened));
    $("rejected-list").hidden = !this.opened;
    fill("rejections", this.rejections, (cell, row) => {
      cell("age", ago(this.now() - row.time));
      cell("who", row.player);
      cell("why", row.reason).title = row.id;
    });
  }

  toggle() {
    this.opened = !this.opened;
    this.rejected = 0; // looked up with the next snapshot
    this.changed();
  }

  async lookAtRejected(total) {
    this.rejected = total;
    const game = this.game;
    const found = await getJson(this.path("rejected?limit=50")).catch(() => null); // asked again with the next one
    if (found === null) this.rejected = 0;
    if (found === null || game !== this.game) return;
    this.rejections = found;
    this.changed();
  }

  // --- moving things, each after a question

  listen() {
    $("rollback").addEventListener("click", () => {
      const { version } = this.alias("stable");
      this.ask(`Roll back from v${version}?`, "Players get the version that they had before, from their next episode on.", "Roll back", "POST", "rollback", { expected: version });
    });
    $("pin").addEventListener("click", () => {
      const { version, pinned } = this.alias("stable");
      if (pinned) this.ask(`Unpin v${version}?`, "The trainer may promote better versions again.", "Unpin", "POST", "unpin", {});
      else this.ask(`Pin v${version}?`, "The trainer does not move players to another version until it is unpinned.", "Pin", "POST", "pin", {});
    });
    $("promote").addEventListener("click", () => this.promote(this.alias("candidate").version));
    $("versions").addEventListener("click", (event) => {
      const button = event.target.closest("button.promote");
      if (button) this.promote(Number(button.closest("tr").dataset.version));
    });
  }

  promote(version) {
    this.ask(`Promote v${version}?`, "All players get it, from their next episode on.", "Promote", "PUT", "aliases/stable", { version });
  }

  ask(title, text, verb, method, rest, body) {
    const path = this.path(`models/${MODEL}/${rest}`);
    const act = (reason) => change(method, path, { ...body, reason: because(reason) }).finally(() => this.look());
    ask({ title, text, verb, act });
  }
}

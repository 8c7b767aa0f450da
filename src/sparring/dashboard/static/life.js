// The game itself: its name, its simulator, whether it is trained and listed; its generations; and its end.

import { ask } from "./ask.js";
import { openChange } from "./change.js";
import { $, change, getJson, list, quoted, say, tell } from "./dom.js";
import { count, plural } from "./format.js";

const LOOK = 10; // seconds

export class Life {
  // `changed`: to call when something else is to be shown; `moved(name)`: when the game is to be found by another name,
  // or, with null, is gone; `link(name)`: the address of a game on this page.
  constructor(changed, moved, link) {
    Object.assign(this, { changed, moved, link });
    this.reset(null);
    this.listen();
  }

  reset(game) {
    Object.assign(this, { game, generations: [], asked: -Infinity });
  }

  get path() {
    return `v1/games/${encodeURIComponent(this.game)}`;
  }

  // `info`: the game's row in the list of games.
  know(snapshot, info) {
    if (snapshot.game !== this.game) this.reset(snapshot.game);
    Object.assign(this, { info, paused: snapshot.paused });
  }

  // `games`: all, with those that are archived.
  follow(games) {
    if (performance.now() - this.asked > LOOK * 1000) this.look();
    this.show();
    this.showGenerations(games);
  }

  async look() {
    this.asked = performance.now();
    const game = this.game;
    const found = await getJson(`${this.path}/generations`).catch(() => null); // asked again
    if (found === null || game !== this.game) return;
    this.generations = found;
    this.changed();
  }

  show() {
    const { name, names, env, archived } = this.info;
    say($("life-name"), name);
    const others = names.filter((other) => other !== name);
    tell($("life-names"), others.length ? `also found as ${others.join(", ")}` : "");
    say($("life-env"), env ?? "none");
    say($("life-training"), this.paused ? "paused; play is stored" : archived ? "off, since it is archived" : "on");
    say($("life-pause"), this.paused ? "resume" : "pause");
    say($("life-listed"), archived ? "no, it is archived" : "yes");
    say($("life-archive"), archived ? "bring back" : "archive");
  }

  showGenerations(games) {
    const row = (name) => games.find(({ names }) => names.includes(name));
    list($("generations"), [...this.generations].reverse(), (one, item = $("generation-row").content.firstElementChild.cloneNode(true)) => {
      const part = (name) => item.getElementsByClassName(name)[0];
      const info = row(one.name);
      const own = one.name === this.game;
      say(part("name"), info?.name ?? one.name);
      part("name").href = this.link(info?.name ?? one.name);
      if (own) part("name").setAttribute("aria-current", "true");
      else part("name").removeAttribute("aria-current");
      const before = one.continues === null ? "" : `, continues ${row(one.continues)?.name ?? one.continues}`;
      say(part("number"), `generation ${one.generation}${before}${own ? ", shown here" : ""}${info?.archived ? ", archived" : ""}`);
      list(part("changes"), one.changes, (text, line = document.createElement("li")) => quoted(line, text));
      say(part("play"), info ? play(info) : "");
      return item;
    });
  }

  // --- changes, each after a question

  listen() {
    $("life-rename").addEventListener("click", () => {
      const { name } = this.info;
      this.ask({
        title: `Rename ${name}?`,
        text: "Clients that know an old name go on: all names work.",
        verb: "Rename",
        label: "New name",
        value: name,
        act: (text) => this.patch({ name: text }),
      });
    });
    $("life-simulate").addEventListener("click", () => {
      this.ask({
        title: "Which simulator?",
        text: "Candidates are then played in it before players meet them. That it exists and that its spaces fit is checked. Nothing: it has none.",
        verb: "Set",
        label: "Gymnasium id",
        value: this.info.env ?? "",
        act: (text) => this.patch({ env: text || null }),
      });
    });
    $("life-pause").addEventListener("click", () => this.now($("life-pause"), () => change("POST", `${this.path}/${this.paused ? "resume" : "pause"}`)));
    $("life-archive").addEventListener("click", () => this.archive());
    $("archived-back").addEventListener("click", () => this.archive());
    $("change-open").addEventListener("click", () => openChange(this.generations.at(-1)?.name ?? this.game, this.moved));
    $("life-delete").addEventListener("click", () => {
      const { name } = this.info;
      this.ask({
        title: `Delete ${name} for good?`,
        text: `Its declaration, ${plural(this.info.steps, "step")} of play and all its bots go. A generation that continues it loses that play, too. Nothing of it can be brought back.`,
        verb: "Delete",
        label: `Type ${name} to delete it`,
        must: name,
        act: async () => {
          await change("DELETE", this.path);
          this.moved(null);
        },
      });
    });
  }

  archive() {
    const { name, archived } = this.info;
    if (archived) return this.now($("life-archive"), () => this.patch({ archived: false }));
    const text = "It is in no list any more, and not trained. Its play is kept, its bots are served, and it can be brought back.";
    return this.ask({ title: `Archive ${name}?`, text, verb: "Archive", label: null, act: () => this.patch({ archived: true }) });
  }

  ask(question) {
    tell($("life-problem"), "");
    ask(question);
  }

  async patch(wanted) {
    await change("PATCH", this.path, wanted);
    this.moved(wanted.name ?? this.info.name);
  }

  // Without a question: it is undone as easily.
  async now(button, act) {
    button.disabled = true;
    tell($("life-problem"), "");
    try {
      await act();
    } catch (error) {
      tell($("life-problem"), `Not done: ${error.message}`);
    }
    button.disabled = false;
  }
}

function play({ steps, bot_steps: bots, latest }) {
  const own = steps ? `${plural(steps, "step")} of its own, ${count(steps - bots)} people’s, ${count(bots)} bots’` : "not played yet";
  return `${latest === null ? "no bot yet" : `its players get v${latest}`} · ${own}`;
}

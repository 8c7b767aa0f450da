// The page: follows one game's live events and shows them. What comes from the server reaches the document as text only,
// never as markup: players choose their own names.

import { AbTests } from "./ab.js";
import { Curve, pastRates, sparkline } from "./chart.js";
import { $, expandable, fill, getJson as ask, say, tell } from "./dom.js";
import { NONE, ago, bytes, count, duration, number, plural, signed } from "./format.js";
import { Life } from "./life.js";
import { Serving } from "./serving.js";
import { Settings } from "./settings.js";
import { showTrainer } from "./trainer.js";

const SERVER = new URL(".", location.href).href.replace(/\/$/, "");
const FIRST_GAME = "CartPole-v1"; // what the page proposes to play when there is no game yet
const ACTIVE = 30; // seconds since a player was seen; the API's `active_players` counts the same way
const SILENCE = 15; // seconds without an event (one is due each second) after which a connection counts as dead
const GAMES = "v1/games?archived=true";
const SPAN = 120; // seconds of the sparkline

const curve = new Curve($("plot"), $("curve"), $("tip"), $("readout"), ["bots", "people"]);
const serving = new Serving(now, paint);
const tests = new AbTests(now, paint);
const settings = new Settings(paint);
const life = new Life(paint, moved, link);

const state = {
  games: [], // also those that are archived
  game: null,
  snapshot: null,
  skew: 0, // the server's clock minus ours
  rates: [], // [time, steps per second]
  attempt: 0, // number of the current connection; answers to earlier ones are ignored
  failures: 0,
  stream: null,
  heard: 0,
};

// --- the address: #game=NAME&x=steps&view=manage

function address() {
  return new URLSearchParams(location.hash.slice(1));
}

function remember(key, value) {
  const hash = address();
  hash.set(key, value);
  history.replaceState(null, "", "#" + hash);
}

// Of another game, or of another view of this one.
function link(game, view = address().get("view")) {
  const hash = address();
  hash.set("game", game);
  if (view) hash.set("view", view);
  else hash.delete("view");
  return "#" + hash;
}

// --- the connection: games, then a first snapshot, then events; from the beginning again whenever something breaks

async function connect() {
  const attempt = ++state.attempt;
  state.stream?.close();
  state.stream = null;
  state.heard = performance.now();
  try {
    const games = await getJson(GAMES);
    if (attempt !== state.attempt) return;
    const game = choose(games);
    if (game !== state.game) Object.assign(state, { game, snapshot: null, rates: [] });
    if (game === null) {
      connected();
      return setTimeout(() => attempt === state.attempt && connect(), 2000);
    }
    const snapshot = await getJson(`v1/games/${encodeURIComponent(game)}/stats`);
    if (attempt !== state.attempt) return;
    take(snapshot);
    follow(game, attempt);
  } catch (error) {
    if (attempt === state.attempt) lost(error);
  }
}

function getJson(path) {
  return ask(path, (answer) => {
    const date = Date.parse(answer.headers.get("date")); // a snapshot's own time may be old, when nobody plays
    if (date) state.skew = (date + 500 - Date.now()) / 1000;
  });
}

function follow(game, attempt) {
  const stream = new EventSource(`v1/events?game=${encodeURIComponent(game)}`);
  state.stream = stream;
  const on = (name, act) =>
    stream.addEventListener(name, (event) => attempt === state.attempt && act(JSON.parse(event.data)));
  on("stats", take);
  on("version", (manifest) => {
    const evaluation = manifest.metrics["evaluation/return_mean"];
    announce(`version ${manifest.version} published` + (evaluation == null ? "" : `, evaluation ${number(evaluation)}`));
  });
  // The browser would retry by itself, but not after an answer such as 503, and without noticing that a game is gone.
  stream.onerror = () => attempt === state.attempt && lost(new Error("the event stream ended"));
}

function take(snapshot) {
  state.heard = performance.now();
  state.snapshot = snapshot;
  if (!state.rates.length) state.rates = pastRates(snapshot.curve, now(), SPAN);
  state.rates.push([now(), snapshot.steps_per_s]);
  while (state.rates[0][0] < now() - SPAN) state.rates.shift();
  connected();
}

function connected() {
  state.failures = 0;
  if ($("status").dataset.state !== "live") status("live", "live");
  paint();
}

function lost(error) {
  console.info(`connection lost: ${error.message}`);
  state.attempt++;
  state.stream?.close();
  status("lost", "connection lost, retrying");
  setTimeout(connect, Math.min(500 * 2 ** state.failures++, 5000));
}

function status(name, text) {
  const line = $("status");
  line.dataset.state = document.body.dataset.state = name;
  say(line, text);
}

let announced;
function announce(text) {
  clearTimeout(announced);
  status("live", text);
  announced = setTimeout(() => $("status").dataset.state === "live" && status("live", "live"), 8000);
}

// --- games

function choose(games) {
  state.games = games;
  const listed = games.filter(({ archived }) => !archived);
  const wanted = address().get("game");
  const found = games.find(({ name }) => name === wanted) ?? games.find(({ names }) => names.includes(wanted)) ?? listed[0] ?? games[0];
  const game = found?.name ?? null;
  const select = $("game");
  const shown = JSON.stringify(games.map(({ name, archived }) => [name, archived]));
  if (select.dataset.shown !== shown) {
    const options = (some) => some.map(({ name }) => new Option(name, name));
    const away = Object.assign(document.createElement("optgroup"), { label: "Archived" });
    away.append(...options(games.filter(({ archived }) => archived)));
    select.replaceChildren(...options(listed), ...(away.childElementCount ? [away] : []));
    select.dataset.shown = shown;
  }
  if (game !== null) select.value = game;
  $("games").hidden = games.length < 2;
  $("title").classList.toggle("unseen", games.length > 1);
  say($("title"), game ?? "");
  return game;
}

// The game is called something else from now on, or is gone.
function moved(name) {
  if (name !== null) remember("game", name);
  connect();
}

$("game").addEventListener("change", (event) => {
  remember("game", event.target.value);
  connect();
});

addEventListener("hashchange", () => {
  readAxis();
  if (address().get("game") !== state.game) connect();
  else paint();
});

// --- painting, at most once a frame and never in a hidden tab

let due = 0;
function paint() {
  const { people, bots } = state.snapshot ?? {};
  if (bots) document.title = `${number(bots.return_mean ?? people.return_mean)} · ${state.game} · Sparring`;
  due ||= requestAnimationFrame(() => {
    due = 0;
    const { snapshot } = state;
    const info = state.games.find(({ name }) => name === state.game);
    const managing = Boolean(snapshot && info) && address().get("view") === "manage";
    const busy = snapshot && (snapshot.stats.steps > 0 || snapshot.stats.rejected > 0 || snapshot.latest !== null);
    document.body.dataset.view = managing ? "manage" : busy ? "busy" : "empty";
    showViews(info, managing);
    if (snapshot) tests.follow(snapshot.game, managing);
    if (snapshot && info) life.know(snapshot, info);
    if (managing) showManaged(snapshot);
    else if (busy) show(snapshot);
    else showEmpty(info);
  });
}

function now() {
  return Date.now() / 1000 + state.skew;
}

function showViews(info, managing) {
  $("views").hidden = !info;
  $("archived").hidden = !info?.archived;
  if (!info) return;
  for (const [id, view, current] of [["view-play", null, !managing], ["view-manage", "manage", managing]]) {
    $(id).href = link(info.name, view);
    if (current) $(id).setAttribute("aria-current", "page");
    else $(id).removeAttribute("aria-current");
  }
  $("ab-link").href = link(info.name, "manage");
}

function showManaged(snapshot) {
  settings.follow(snapshot);
  life.follow(state.games);
}

function showEmpty(game) {
  const playable = !game || game.env !== null;
  say($("empty-title"), game ? `Nobody has played ${game.name} yet.` : "Nothing has been played yet.");
  say(
    $("empty-text"),
    playable
      ? "Start four players, on this machine or any other that reaches it:"
      : `This game is declared, not simulated: record its play with sparring.client and send it to ${SERVER}.`,
  );
  $("empty-command").hidden = !playable;
  showCommand([`sparring play ${game?.env ?? FIRST_GAME}`, `--server ${SERVER}`, "--players 4"]);
}

// Breaks on a narrow screen only where a person would break it.
function showCommand(parts) {
  if ($("command").textContent === parts.join(" ")) return;
  const spans = parts.map((part) => Object.assign(document.createElement("span"), { textContent: part }));
  $("command").replaceChildren(...spans.flatMap((span, i) => (i ? [" ", span] : [span])));
}

function show(snapshot) {
  const { people, bots, versions, trainer } = snapshot;
  serving.follow(snapshot);
  showFigures(snapshot);
  serving.showRejected(snapshot.stats.rejected);
  $("curve-empty").hidden = snapshot.curve.length > 0;
  $("key-people").hidden = !people.episodes;
  $("key-bots").hidden = !bots.episodes;
  $("key-versions").hidden = !versions.length;
  curve.show({ people: people.curve, bots: bots.curve }, versions, serving.roles, snapshot.active_players ? snapshot.time : undefined);
  const lag = trainer?.lag && !snapshot.paused ? `${plural(trainer.lag, "fragment")} not learned from yet` : "";
  tell($("behind"), snapshot.behind ? "newer episodes are still being read" : lag);
  sparkline($("spark"), state.rates, now(), SPAN);
  showVersions(versions);
  showPlayers(snapshot);
  showTrainer(trainer, snapshot.paused, now());
  showStream(snapshot.stream);
}

function showFigures(s) {
  for (const name of ["bots", "people"]) {
    const { episodes, return_mean: mean, return_best: best } = s[name];
    figure(`${name}-mean`, number(mean), mean);
    const newest = `newest ${Math.min(episodes, 20)} of ${plural(episodes, "episode")}`;
    say($(`${name}-note`), !episodes ? "no episode finished yet" : best === null ? newest : `${newest}, best ${number(best)}`);
  }
  figure("latest", s.latest === null ? NONE : `v${s.latest}`);
  say($("latest-age"), s.published === null ? "play at random" : `published ${ago(now() - s.published)}`);
  figure("active", count(s.active_players));
  say($("players-total"), `of ${count(s.stats.players)} so far`);
  figure("steps", count(s.stats.steps), s.stats.steps);
  say($("steps-apart"), `${count(s.people.steps)} people’s, ${count(s.bots.steps)} bots’`);
  $("steps-apart").title = `in ${plural(s.stats.fragments, "fragment")}, ${bytes(s.stats.bytes)}`;
  figure("rate", count(s.steps_per_s), s.steps_per_s);
}

function figure(id, text, exact) {
  say($(id), text);
  if (exact != null) $(id).title = exact.toLocaleString("en-GB");
}

function showVersions(versions) {
  const rows = versions.map((row, i) => ({ ...row, change: change(versions, i) })).reverse();
  const known = versions.map((row) => row.return_mean).filter((value) => value !== null);
  const [low, high] = [Math.min(0, ...known), Math.max(0, ...known)];
  $("versions").hidden = rows.length === 0;
  $("versions-empty").hidden = rows.length > 0;
  fill("versions", rows, (cell, row) => {
    const names = serving.names(row.version);
    const files = serving.path(`models/bot/${row.version}`);
    cell("link", `v${row.version}`).href = `${files}/files/card.md`;
    cell("name").parentElement.dataset.version = row.version;
    tell(cell("role"), names.join(", "));
    cell("age", ago(now() - row.created)).title = new Date(row.created * 1000).toLocaleString("en-GB");
    cell("seen", count(row.steps)).title = row.steps.toLocaleString("en-GB");
    cell("evaluation", number(row.evaluation));
    cell("played", count(row.played));
    cell("value", number(row.return_mean));
    cell("margin", row.margin === null ? "" : ` ± ${number(row.margin)}`);
    cell("gauge").hidden = row.return_mean === null;
    const share = row.return_mean === null || high === low ? 0 : (row.return_mean - low) / (high - low);
    cell("gauge").style.setProperty("--share", share.toFixed(3));
    const delta = cell("change", row.change === null ? NONE : signed(row.change));
    delta.classList.toggle("up", row.change > 0);
    delta.classList.toggle("down", row.change < 0);
    cell("onnx").href = `${files}/files/policy.onnx`;
    cell("manifest").href = `${files}/manifest`;
    cell("promote").hidden = names.includes("stable");
  });
}

// Return in play against the version before that also was played.
function change(versions, i) {
  const before = versions.slice(0, i).findLast((row) => row.return_mean !== null);
  const own = versions[i].return_mean;
  return own === null || !before ? null : own - before.return_mean;
}

function showPlayers({ players, stats }) {
  fill("players", players, (cell, row) => {
    const age = now() - row.last_seen;
    cell("who", row.player).title = row.player;
    cell("name").parentElement.classList.toggle("active", age < ACTIVE);
    cell("kind", row.kind);
    cell("steps", count(row.steps)).title = `${row.steps.toLocaleString("en-GB")}, ${row.bot_steps.toLocaleString("en-GB")} of them by bots`;
    for (const name of ["person", "bot"]) {
      const { episodes, return_mean: mean } = row[name];
      cell(`${name}-return`, number(mean)).title = episodes ? `newest ${Math.min(episodes, 20)} of ${plural(episodes, "episode")}` : "";
    }
    cell("age", ago(age));
  });
  if (stats.players > players.length) say($("players-title"), `Players: newest ${players.length} of ${count(stats.players)}`);
  else say($("players-title"), "Players");
}

// The way from the stream to the store, where there is one: how far it is behind.
function showStream(stream) {
  $("stream").hidden = stream === null;
  if (stream === null) return;
  const silent = now() - stream.updated;
  const lag = silent > SILENCE ? `silent for ${duration(silent)}` : stream.lag ? `${duration(stream.lag)} behind` : "caught up";
  const job = stream.state === "running" ? lag : `${stream.state}, ${lag}`;
  say($("stream"), `Stream ${stream.stream}: ${job}; ${plural(stream.steps, "step")} from ${plural(stream.records, "record")}, ${count(stream.rejected)} rejected${stream.missing ? `, ${duration(stream.missing)} of play lost: the stream forgot it unread` : ""}.`);
}

expandable(["versions", "players", "moves", "rejections", "ended"], paint);

$("versions").addEventListener("pointerover", (event) => {
  curve.mark(Number(event.target.closest("tbody tr")?.dataset.version) || null);
});
$("versions").addEventListener("pointerleave", () => curve.mark(null));

// --- the curve's axis, and the command to copy

function readAxis() {
  const axis = address().get("x") === "steps" ? "steps" : "time";
  document.querySelector(`input[name=axis][value=${axis}]`).checked = true;
  curve.setAxis(axis);
}

$("axis").addEventListener("change", (event) => {
  remember("x", event.target.value);
  curve.setAxis(event.target.value);
});

$("copy").hidden = !navigator.clipboard; // only there on https and localhost
$("copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText($("command").textContent);
  say($("copy"), "copied");
  setTimeout(() => say($("copy"), "copy"), 2000);
});

// --- every second: ages grow, and a connection that went silent without an error is noticed

setInterval(() => {
  if (state.stream && $("status").dataset.state === "live" && performance.now() - state.heard > SILENCE * 1000) {
    lost(new Error("no event in a while"));
  } else if (state.snapshot && performance.now() - state.heard > 1500) {
    paint();
  }
}, 1000);

// A new game may appear while another one is watched.
setInterval(async () => {
  if ($("status").dataset.state !== "live" || state.game === null) return;
  const games = await getJson(GAMES).catch(() => null); // the stream notices a server that is away
  if (games && choose(games) !== state.game) connect();
}, 10_000);

readAxis();
connect();

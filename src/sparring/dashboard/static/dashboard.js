// The page: follows one game's live events and shows them. What comes from the server reaches the document as text only,
// never as markup: players choose their own names.

import { Curve, pastRates, sparkline } from "./chart.js";
import { NONE, ago, bytes, count, duration, number, percent, plural, signed } from "./format.js";

const SERVER = new URL(".", location.href).href.replace(/\/$/, "");
const FIRST_GAME = "CartPole-v1"; // what the page proposes to play when there is no game yet
const ACTIVE = 30; // seconds since a player was seen; the API's `active_players` counts the same way
const SILENCE = 15; // seconds without an event (one is due each second) after which a connection counts as dead
const SPAN = 120; // seconds of the sparkline
const ROWS = 7; // of a table before "show all"

const $ = (id) => document.getElementById(id);
const curve = new Curve($("plot"), $("curve"), $("tip"), $("readout"));

const state = {
  games: [],
  game: null,
  snapshot: null,
  skew: 0, // the server's clock minus ours
  rates: [], // [time, steps per second]
  expanded: new Set(),
  attempt: 0, // number of the current connection; answers to earlier ones are ignored
  failures: 0,
  stream: null,
  heard: 0,
};

// --- the address: #game=NAME&x=steps

function address() {
  return new URLSearchParams(location.hash.slice(1));
}

function remember(key, value) {
  const hash = address();
  hash.set(key, value);
  history.replaceState(null, "", "#" + hash);
}

// --- the connection: games, then a first snapshot, then events; from the beginning again whenever something breaks

async function connect() {
  const attempt = ++state.attempt;
  state.stream?.close();
  state.stream = null;
  state.heard = performance.now();
  try {
    const games = await getJson("v1/games");
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

async function getJson(path) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(10_000) });
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  const date = Date.parse(answer.headers.get("date")); // a snapshot's own time may be old, when nobody plays
  if (date) state.skew = (date + 500 - Date.now()) / 1000;
  return answer.json();
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
  const names = games.map((game) => game.name);
  const select = $("game");
  const shown = [...select.options].map((option) => option.value);
  if (shown.join("\n") !== names.join("\n")) select.replaceChildren(...names.map((name) => new Option(name, name)));
  const wanted = address().get("game");
  const game = names.includes(wanted) ? wanted : (names[0] ?? null);
  if (game !== null) select.value = game;
  $("games").hidden = names.length < 2;
  $("title").classList.toggle("unseen", names.length > 1);
  say($("title"), game ?? "");
  return game;
}

$("game").addEventListener("change", (event) => {
  remember("game", event.target.value);
  connect();
});

addEventListener("hashchange", () => {
  readAxis();
  if (address().get("game") !== state.game) connect();
});

// --- painting, at most once a frame and never in a hidden tab

let due = 0;
function paint() {
  if (state.snapshot) document.title = `${number(state.snapshot.return_mean)} · ${state.game} · Sparring`;
  due ||= requestAnimationFrame(() => {
    due = 0;
    const busy = state.snapshot?.stats.steps > 0;
    document.body.dataset.view = busy ? "busy" : "empty";
    if (busy) show(state.snapshot);
    else showEmpty(state.games.find((game) => game.name === state.game));
  });
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function now() {
  return Date.now() / 1000 + state.skew;
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
  showFigures(snapshot);
  $("curve-empty").hidden = snapshot.curve.length > 0;
  curve.show(snapshot.curve, snapshot.versions, snapshot.active_players ? snapshot.time : undefined);
  sparkline($("spark"), state.rates, now(), SPAN);
  showVersions(snapshot.versions);
  showPlayers(snapshot);
  showTrainer(snapshot.trainer, snapshot.paused);
  showStream(snapshot.stream);
}

function showFigures(s) {
  figure("return-mean", number(s.return_mean), s.return_mean);
  say($("return-note"), s.episodes ? `newest ${Math.min(s.episodes, 20)} of ${plural(s.episodes, "episode")}` : "no episode finished yet");
  figure("return-best", number(s.return_best), s.return_best);
  figure("latest", s.latest === null ? NONE : `v${s.latest}`);
  say($("latest-age"), s.published === null ? "none published yet" : ago(now() - s.published));
  figure("active", count(s.active_players));
  say($("players-total"), `of ${count(s.stats.players)} so far`);
  figure("steps", count(s.stats.steps), s.stats.steps);
  say($("fragments"), `in ${plural(s.stats.fragments, "fragment")}`);
  $("fragments").title = bytes(s.stats.bytes);
  figure("rate", count(s.steps_per_s), s.steps_per_s);
  $("rejected").hidden = !s.stats.rejected;
  say($("rejected"), `${plural(s.stats.rejected, "fragment")} rejected so far: kept out of the training data, and the sender was told why.`);
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
  fill("versions", "version-row", rows, (cell, row) => {
    cell("name", `v${row.version}`).parentElement.dataset.version = row.version;
    cell("age", ago(now() - row.created)).title = new Date(row.created * 1000).toLocaleString("en-GB");
    cell("seen", count(row.steps)).title = row.steps.toLocaleString("en-GB");
    cell("evaluation", number(row.evaluation));
    cell("played", count(row.played));
    cell("value", number(row.return_mean));
    cell("gauge").hidden = row.return_mean === null;
    const share = row.return_mean === null || high === low ? 0 : (row.return_mean - low) / (high - low);
    cell("gauge").style.setProperty("--share", share.toFixed(3));
    const delta = cell("change", row.change === null ? NONE : signed(row.change));
    delta.classList.toggle("up", row.change > 0);
    delta.classList.toggle("down", row.change < 0);
  });
}

// Return in play against the version before that also was played.
function change(versions, i) {
  const before = versions.slice(0, i).findLast((row) => row.return_mean !== null);
  const own = versions[i].return_mean;
  return own === null || !before ? null : own - before.return_mean;
}

function showPlayers({ players, stats }) {
  fill("players", "player-row", players, (cell, row) => {
    const age = now() - row.last_seen;
    cell("who", row.player).title = row.player;
    cell("name").parentElement.classList.toggle("active", age < ACTIVE);
    cell("steps", count(row.steps)).title = row.steps.toLocaleString("en-GB");
    cell("age", ago(age));
  });
  if (stats.players > players.length) say($("players-title"), `Players: newest ${players.length} of ${count(stats.players)}`);
  else say($("players-title"), "Players");
}

function showTrainer(trainer, paused) {
  $("trainer").hidden = trainer === null;
  $("trainer-empty").hidden = trainer !== null;
  say($("trainer-algorithm"), trainer?.algorithm ?? "");
  say($("trainer-empty"), paused ? "Training is paused. Play is still stored." : "No trainer works on this game.");
  if (trainer === null) return;
  const silent = now() - trainer.updated;
  const told = paused ? "paused" : trainer.state;
  const stalled = silent > SILENCE && !/^(stopped|failed|paused)/.test(told);
  say($("trainer-state"), told + (stalled ? `, silent for ${duration(silent)}` : ""));
  $("trainer-state").dataset.tone = /^failed|cannot publish/.test(told) || stalled ? "bad" : told;
  say($("trainer-updates"), `${count(trainer.updates)}, ${number(trainer.updates_per_s)} per second`);
  say($("trainer-loss"), number(trainer.loss));
  say($("trainer-exploration"), trainer.exploration === null ? NONE : percent(trainer.exploration));
  say($("trainer-evaluation"), number(trainer.evaluation));
  say($("trainer-window"), plural(trainer.window, "transition"));
  say($("trainer-lag"), trainer.lag ? plural(trainer.lag, "fragment") : "none");
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

// Rows of a table, made from a template once and then only rewritten where a text changed.
function fill(id, template, rows, write) {
  const body = $(id).tBodies[0];
  const visible = state.expanded.has(id) ? rows : rows.slice(0, ROWS);
  while (body.rows.length > visible.length) body.deleteRow(-1);
  while (body.rows.length < visible.length) body.append($(template).content.cloneNode(true));
  visible.forEach((row, i) => {
    const cell = (name, text) => {
      const element = body.rows[i].getElementsByClassName(name)[0];
      if (text !== undefined) say(element, text);
      return element;
    };
    write(cell, row);
  });
  const more = $(`${id}-more`);
  more.hidden = rows.length <= ROWS;
  say(more, state.expanded.has(id) ? "show fewer" : `show all ${rows.length}`);
}

for (const id of ["versions", "players"]) {
  $(`${id}-more`).addEventListener("click", () => {
    if (!state.expanded.delete(id)) state.expanded.add(id);
    paint();
  });
}

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
  const games = await getJson("v1/games").catch(() => null); // the stream notices a server that is away
  if (games && choose(games) !== state.game) connect();
}, 10_000);

readAxis();
connect();

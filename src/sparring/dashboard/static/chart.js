// The return curve and the sparkline: SVG in CSS pixels, so they are crisp on every screen and cheap to update.

import { clock, count, day, number, plural } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { top: 36, right: 18, bottom: 28, left: 50 };
// A curve's point as the API sends it.
const [TIME, STEPS, MEAN, LOW, HIGH, EPISODES, VERSION] = [0, 1, 2, 3, 4, 5, 6];
const RECENT = 20; // episodes behind a point of the line: as many as behind the "mean return" figure
const MINUTE = 60, HOUR = 3600, DAY = 86400;
const TIME_STEPS = [
  1, 2, 5, 10, 15, 30, MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 30 * MINUTE,
  HOUR, 2 * HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, DAY, 2 * DAY, 7 * DAY, 14 * DAY, 28 * DAY, 91 * DAY, 364 * DAY,
];

const NEAR = 10; // pixels between versions' dots; nearer ones become one …
const SPREAD = 30; // … which stands for so many pixels at most

// `series`: names of the lines, in the order in which they are drawn and described.
export class Curve {
  constructor(plot, svg, tip, readout, series) {
    Object.assign(this, { plot, svg, tip, readout });
    this.axis = "time";
    this.points = []; // of all lines, as [line, point], in the order of time
    this.versions = [];
    this.roles = {}; // version → "stable", "candidate"
    this.marked = null; // the version pointed at in the table
    this.cursor = null; // index of the point pointed at
    this.grid = append(svg, "g", "grid");
    this.marks = append(svg, "g", "marks");
    this.pointer = append(svg, "g", "pointer");
    this.lines = series.map((name) => ({ name, points: [], band: append(svg, "path", `band ${name}`) }));
    for (const line of this.lines) line.path = append(svg, "path", `mean ${line.name}`);
    for (const line of this.lines) line.end = append(svg, "circle", `end ${line.name}`);
    for (const line of this.lines) line.end.setAttribute("r", 4);
    this.cross = append(svg, "g", "cross");
    this.crossLine = append(this.cross, "line");
    this.crossDot = append(this.cross, "circle");
    this.crossDot.setAttribute("r", 4.5);
    this.cross.setAttribute("visibility", "hidden");
    new ResizeObserver(() => this.draw()).observe(plot);
    plot.addEventListener("pointermove", (event) => this.point(event));
    plot.addEventListener("pointerdown", (event) => this.point(event));
    plot.addEventListener("pointerleave", () => this.leave());
    plot.addEventListener("blur", () => this.leave());
    plot.addEventListener("keydown", (event) => this.key(event));
  }

  // `bins`: by line. `until`: where a time axis ends, if later than the last point.
  show(bins, versions, roles, until) {
    for (const line of this.lines) line.points = smooth(bins[line.name]);
    const all = this.lines.flatMap((line) => line.points.map((p) => [line, p]));
    all.sort(([, a], [, b]) => a[TIME] - b[TIME] || a[STEPS] - b[STEPS]);
    Object.assign(this, { points: all, versions, roles, until });
    if (this.cursor !== null && this.cursor >= all.length) this.leave();
    this.draw();
  }

  setAxis(axis) {
    this.axis = axis;
    this.draw();
  }

  mark(version) {
    this.marked = version;
    this.drawPointer();
  }

  draw() {
    const { points, plot, svg } = this;
    this.width = plot.clientWidth;
    this.height = plot.clientHeight;
    svg.toggleAttribute("hidden", points.length === 0);
    if (points.length === 0 || this.width === 0) return;
    svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.scale();
    this.drawGrid();
    for (const line of this.lines) this.drawLine(line);
    this.drawMarks();
    this.drawPointer();
    if (this.cursor !== null) this.drawCursor();
    svg.setAttribute("aria-label", this.summary());
  }

  drawLine({ points, path: shape, band, end }) {
    const edge = (column) => points.map((p) => [this.x(p), this.y(p[column])]);
    const mean = edge(MEAN);
    shape.setAttribute("d", path(mean));
    band.setAttribute("d", points.length ? path([...edge(HIGH), ...edge(LOW).reverse()]) + "Z" : "");
    end.setAttribute("visibility", points.length ? "visible" : "hidden");
    if (points.length) place(end, ...mean.at(-1).map(round));
  }

  scale() {
    const points = this.points.map(([, p]) => p);
    const byTime = this.axis === "time";
    const of = byTime ? (p) => p[TIME] : (p) => p[STEPS];
    const from = Math.min(...points.map(of));
    const to = Math.max(...points.map(of), byTime ? (this.until ?? 0) : 0, from + 10);
    const left = MARGIN.left, right = this.width - MARGIN.right;
    this.at = (value) => left + (Math.min(Math.max((value - from) / (to - from), 0), 1)) * (right - left);
    this.x = (p) => this.at(of(p));
    this.domain = [from, to];

    let low = Math.min(...points.map((p) => p[LOW]));
    let high = Math.max(...points.map((p) => p[HIGH]));
    if (low > 0 && low < high * 0.6) low = 0;
    if (high <= low) [low, high] = [low - 1, high + 1];
    const step = niceStep((high - low) / Math.max(2, Math.min(6, this.height / 50)));
    const bottom = Math.floor(low / step) * step;
    const top = Math.ceil((2 * high) / step) * (step / 2);
    this.levels = range(bottom, top, step);
    const floor = this.height - MARGIN.bottom;
    this.y = (value) => floor - ((value - bottom) / (top - bottom)) * (floor - MARGIN.top);
  }

  drawGrid() {
    const { levels, width, height } = this;
    const rows = levels.map((value) => ({ y: round(this.y(value)), text: level(value) }));
    const columns = (this.axis === "time" ? timeTicks : stepTicks)(this.domain, (width - 80) / 100).map(
      ([value, text]) => ({ x: round(this.at(value)), text }),
    );
    const shapes = pool(this.grid, rows.length * 2 + columns.length, (i) => (i < rows.length ? "line" : "text"));
    rows.forEach(({ y, text }, i) => {
      set(shapes[i], { x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y });
      label(shapes[rows.length + i], text, MARGIN.left - 10, y + 4, "end");
    });
    columns.forEach(({ x, text }, i) => {
      const edge = x > width - 40 ? "end" : "middle";
      label(shapes[rows.length * 2 + i], text, edge === "end" ? width - MARGIN.right : x, height - 7, edge);
    });
  }

  // Versions are dots above the curves; those that would touch are one larger dot.
  drawMarks() {
    const clusters = this.clusters();
    const groups = pool(this.marks, clusters.length, () => "g");
    let free = Infinity; // labels go from the newest to the oldest, where there is room
    for (let i = clusters.length - 1; i >= 0; i--) {
      const { first, last, from, to, size, role } = clusters[i];
      const group = groups[i];
      if (!group.firstChild) for (const tag of ["circle", "text", "title"]) append(group, tag);
      const [dot, text, title] = group.children;
      const x = (from + to) / 2;
      place(dot, round(x), MARGIN.top - 9);
      dot.setAttribute("r", round(Math.min(3 + Math.log2(size), 7)));
      const name = first === last ? `v${first}` : `v${first}–${last}`;
      const half = 12 + name.length * 3.4;
      const middle = Math.min(Math.max(x, half), this.width - half);
      const fits = middle + half < free;
      if (fits) free = middle - half;
      label(text, fits ? name : "", round(middle), MARGIN.top - 20, "middle");
      const hint = size === 1 ? name : `${name}: ${size} versions`;
      if (title.textContent !== hint) title.textContent = hint;
      group.setAttribute("class", `mark ${role}`);
    }
  }

  clusters() {
    const found = [];
    for (const { version, created } of this.versions) {
      const x = this.atTime(created);
      const role = this.roles[version] ?? "";
      const before = found.at(-1);
      if (before && x - before.to < NEAR && x - before.from < SPREAD) {
        Object.assign(before, { last: version, to: Math.max(x, before.to), size: before.size + 1, role: role || before.role });
      } else found.push({ first: version, last: version, from: x, to: x, size: 1, role });
    }
    return found;
  }

  atTime(time) {
    return this.at(this.axis === "time" ? time : stepsAt(this.points.map(([, p]) => p), time));
  }

  // A version that is pointed at in the table.
  drawPointer() {
    const row = this.points.length && this.at ? this.versions.find(({ version }) => version === this.marked) : null;
    this.pointer.setAttribute("visibility", row ? "visible" : "hidden");
    if (!row) return;
    if (!this.pointer.firstChild) for (const tag of ["line", "rect", "text"]) append(this.pointer, tag);
    const [line, ground, text] = this.pointer.children;
    const x = round(this.atTime(row.created));
    const name = `v${row.version}`;
    const half = 5 + name.length * 3.6;
    const middle = Math.min(x, this.width - half);
    set(line, { x1: x, x2: x, y1: MARGIN.top - 9, y2: this.height - MARGIN.bottom });
    set(ground, { x: round(middle - half), y: 0, width: round(2 * half), height: MARGIN.top - 17 });
    label(text, name, middle, MARGIN.top - 20, "middle");
  }

  point(event) {
    if (!this.points.length) return;
    const bounds = this.plot.getBoundingClientRect();
    const [x, y] = [event.clientX - bounds.left, event.clientY - bounds.top];
    const far = ([, p]) => Math.abs(this.x(p) - x) + Math.abs(this.y(p[MEAN]) - y) / 1000; // of equals the nearer line
    let nearest = 0;
    this.points.forEach((p, i) => {
      if (far(p) < far(this.points[nearest])) nearest = i;
    });
    this.cursor = nearest;
    this.drawCursor();
  }

  key(event) {
    const last = this.points.length - 1;
    if (last < 0) return;
    const now = this.cursor ?? last + 1;
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") this.leave();
    if (next === undefined) return;
    event.preventDefault();
    this.cursor = Math.min(Math.max(next, 0), last);
    this.drawCursor();
    this.readout.textContent = this.describe(...this.points[this.cursor]).join(", ");
  }

  leave() {
    this.cursor = null;
    this.tip.hidden = true;
    this.cross.setAttribute("visibility", "hidden");
  }

  drawCursor() {
    const [line, p] = this.points[this.cursor];
    const [x, y] = [round(this.x(p)), round(this.y(p[MEAN]))];
    this.cross.setAttribute("visibility", "visible");
    this.cross.setAttribute("class", `cross ${line.name}`);
    set(this.crossLine, { x1: x, x2: x, y1: MARGIN.top, y2: this.height - MARGIN.bottom });
    place(this.crossDot, x, y);
    const lines = this.describe(line, p);
    const parts = pool(this.tip, lines.length, () => "p", document.createElement.bind(document));
    lines.forEach((text, i) => (parts[i].textContent = text));
    this.tip.hidden = false;
    const room = this.width - this.tip.offsetWidth;
    const side = x + 16 > room ? x - 16 - this.tip.offsetWidth : x + 16;
    const up = Math.min(Math.max(y - this.tip.offsetHeight / 2, 0), this.height - this.tip.offsetHeight);
    this.tip.style.transform = `translate(${Math.max(0, Math.min(side, room))}px, ${up}px)`;
  }

  describe(line, p) {
    const others = this.lines.filter((other) => other !== line && other.points.length);
    const then = (other) => other.points.findLast((q) => q[TIME] <= p[TIME]);
    return [
      `${line.name}: mean ${number(p[MEAN])}`,
      `${number(p[LOW])} to ${number(p[HIGH])} in ${plural(p[EPISODES], "episode")}`,
      ...(p[VERSION] === null ? [] : [`played by v${p[VERSION]}`]),
      ...others.filter(then).map((other) => `${other.name}: mean ${number(then(other)[MEAN])}`),
      `${this.domain[1] - this.domain[0] > DAY ? day(p[TIME]) + " " : ""}${clock(p[TIME])}, ${count(p[STEPS])} steps`,
    ];
  }

  summary() {
    const changes = this.lines
      .filter(({ points }) => points.length)
      .map(({ name, points }) => `${name} from ${number(points[0][MEAN])} to ${number(points.at(-1)[MEAN])}`);
    const [, last] = this.points.at(-1);
    return `Mean return per episode, ${changes.join(", ")} over ${count(last[STEPS])} steps; ${plural(this.versions.length, "version")} published.`;
  }
}

// The API's bins hold one episode each (a short history) or many; a point shows the newest twenty, or its bin if it has
// more. Episodes that arrived at once are one point: a line through them would only go up and down.
function smooth(bins) {
  const last = bins.filter((bin, i) => bin[TIME] !== bins[i + 1]?.[TIME]);
  return last.map((bin) => {
    let [sum, low, high, episodes] = [0, Infinity, -Infinity, 0];
    for (let j = bins.indexOf(bin); j >= 0 && (episodes < RECENT || bins[j][TIME] === bin[TIME]); j--) {
      sum += bins[j][MEAN] * bins[j][EPISODES];
      low = Math.min(low, bins[j][LOW]);
      high = Math.max(high, bins[j][HIGH]);
      episodes += bins[j][EPISODES];
    }
    return [bin[TIME], bin[STEPS], sum / episodes, low, high, episodes, bin[VERSION]];
  });
}

// Steps stored at a time: versions know only those that they were trained on.
function stepsAt(points, time) {
  const after = points.findIndex((p) => p[TIME] >= time);
  if (after === 0) return points[0][STEPS];
  if (after < 0) return points.at(-1)[STEPS];
  const [a, b] = [points[after - 1], points[after]];
  return a[STEPS] + ((time - a[TIME]) / (b[TIME] - a[TIME])) * (b[STEPS] - a[STEPS]);
}

// Steps per second of the last while, as [time, rate], read off a curve: what the page shows of the time before it was opened.
export function pastRates(points, now, span, slot = 5) {
  const rates = [];
  for (let time = Math.max(now - span, points[0]?.[TIME] ?? now) + slot; time < now - slot; time += slot) {
    rates.push([time, (stepsAt(points, time) - stepsAt(points, time - slot)) / slot]);
  }
  return rates;
}

export function sparkline(svg, rates, now, span) {
  const [width, height] = [svg.clientWidth, svg.clientHeight];
  const top = Math.max(1, ...rates.map(([, rate]) => rate));
  const at = ([time, rate]) => [width * (1 - (now - time) / span), height - 1 - (rate / top) * (height - 2)];
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.firstElementChild.setAttribute("d", path(rates.map(at)));
}

function path(points) {
  return points.map(([x, y], i) => `${i ? "L" : "M"}${round(x)} ${round(y)}`).join("");
}

function stepTicks([from, to], wanted) {
  const step = niceStep((to - from) / Math.max(2, wanted));
  return range(Math.ceil(from / step) * step, to, step).map((value) => [value, count(value)]);
}

function timeTicks([from, to], wanted) {
  const step = TIME_STEPS.find((s) => (to - from) / s <= Math.max(2, wanted)) ?? TIME_STEPS.at(-1);
  const zone = new Date(to * 1000).getTimezoneOffset() * MINUTE; // so that ticks fall on local full hours and days
  return range(Math.ceil((from - zone) / step) * step + zone, to, step).map((value) => {
    const midnight = (value - zone) % DAY === 0;
    return [value, midnight && to - from > 12 * HOUR ? day(value) : clock(value, step < MINUTE)];
  });
}

// The round number (1, 2 or 5 times a power of ten) at or above a size.
function niceStep(size) {
  const power = 10 ** Math.floor(Math.log10(size));
  return [1, 2, 5, 10].find((n) => n * power >= size * 0.999) * power;
}

function range(from, to, step) {
  return Array.from({ length: Math.floor((to - from) / step + 1e-6) + 1 }, (_, i) => from + i * step);
}

function level(value) {
  const tidy = Number(value.toPrecision(10)); // 0.30000000000000004
  return (Math.abs(tidy) < 1000 ? String(tidy) : count(tidy)).replace("-", "−");
}

function round(x) {
  return Math.round(x * 10) / 10;
}

function append(parent, tag, name) {
  const element = parent.appendChild(document.createElementNS(SVG, tag));
  if (name) element.setAttribute("class", name);
  return element;
}

// Exactly n children, of which the i-th is a `tag(i)`: kept where they fit, so an update moves shapes instead of making them.
function pool(parent, n, tag, create = (name) => document.createElementNS(SVG, name)) {
  while (parent.childElementCount > n) parent.lastElementChild.remove();
  for (let i = 0; i < n; i++) {
    const child = parent.children[i];
    if (!child) parent.append(create(tag(i)));
    else if (child.localName !== tag(i)) child.replaceWith(create(tag(i)));
  }
  return [...parent.children];
}

function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
}

function place(circle, x, y) {
  set(circle, { cx: x, cy: y });
}

function label(element, text, x, y, anchor) {
  set(element, { x, y, "text-anchor": anchor });
  if (element.textContent !== text) element.textContent = text;
}

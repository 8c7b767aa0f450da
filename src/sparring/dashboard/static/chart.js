// The return curve and the sparkline: SVG in CSS pixels, so they are crisp on every screen and cheap to update.

import { clock, count, day, number, plural } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { top: 24, right: 18, bottom: 28, left: 50 };
// A curve's point as the API sends it.
const [TIME, STEPS, MEAN, LOW, HIGH, EPISODES, VERSION] = [0, 1, 2, 3, 4, 5, 6];
const RECENT = 20; // episodes behind a point of the line: as many as behind the "mean return" figure
const MINUTE = 60, HOUR = 3600, DAY = 86400;
const TIME_STEPS = [
  1, 2, 5, 10, 15, 30, MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 30 * MINUTE,
  HOUR, 2 * HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, DAY, 2 * DAY, 7 * DAY, 14 * DAY, 28 * DAY, 91 * DAY, 364 * DAY,
];

export class Curve {
  constructor(plot, svg, tip, readout) {
    Object.assign(this, { plot, svg, tip, readout });
    this.axis = "time";
    this.points = [];
    this.versions = [];
    this.marked = null; // the version pointed at in the table
    this.cursor = null; // index of the point pointed at
    this.grid = append(svg, "g", "grid");
    this.marks = append(svg, "g", "marks");
    this.band = append(svg, "path", "band");
    this.line = append(svg, "path", "mean");
    this.end = append(svg, "circle", "end");
    this.cross = append(svg, "g", "cross");
    this.crossLine = append(this.cross, "line");
    this.crossDot = append(this.cross, "circle");
    this.end.setAttribute("r", 4);
    this.crossDot.setAttribute("r", 4.5);
    this.cross.setAttribute("visibility", "hidden");
    new ResizeObserver(() => this.draw()).observe(plot);
    plot.addEventListener("pointermove", (event) => this.point(event));
    plot.addEventListener("pointerdown", (event) => this.point(event));
    plot.addEventListener("pointerleave", () => this.leave());
    plot.addEventListener("blur", () => this.leave());
    plot.addEventListener("keydown", (event) => this.key(event));
  }

  // `until`: where a time axis ends, if later than the last point.
  show(points, versions, until) {
    Object.assign(this, { points: smooth(points), versions, until });
    if (this.cursor !== null && this.cursor >= points.length) this.leave();
    this.draw();
  }

  setAxis(axis) {
    this.axis = axis;
    this.draw();
  }

  mark(version) {
    this.marked = version;
    this.drawMarks();
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
    const edge = (column) => points.map((p) => [this.x(p), this.y(p[column])]);
    const mean = edge(MEAN);
    this.line.setAttribute("d", path(mean));
    this.band.setAttribute("d", path([...edge(HIGH), ...edge(LOW).reverse()]) + "Z");
    place(this.end, ...mean.at(-1).map(round));
    this.drawMarks();
    if (this.cursor !== null) this.drawCursor();
    svg.setAttribute("aria-label", this.summary());
  }

  scale() {
    const { points } = this;
    const byTime = this.axis === "time";
    const of = byTime ? (p) => p[TIME] : (p) => p[STEPS];
    const last = points.at(-1);
    const from = of(points[0]);
    const to = Math.max(byTime ? Math.max(last[TIME], this.until ?? 0) : last[STEPS], from + 10);
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

  drawMarks() {
    if (!this.points.length || !this.at) return;
    const groups = pool(this.marks, this.versions.length, () => "g");
    let free = Infinity; // labels go from the newest to the oldest, where there is room
    for (let i = this.versions.length - 1; i >= 0; i--) {
      const { version, created } = this.versions[i];
      const group = groups[i];
      if (!group.firstChild) {
        append(group, "line");
        append(group, "text");
      }
      const x = round(this.at(this.axis === "time" ? created : stepsAt(this.points, created)));
      const text = `v${version}`;
      const half = 5 + text.length * 3.6;
      const marked = version === this.marked;
      const fits = x + half < free || marked;
      if (fits) free = x - half;
      set(group.firstChild, { x1: x, x2: x, y1: MARGIN.top - 6, y2: this.height - MARGIN.bottom });
      label(group.lastChild, fits ? text : "", Math.min(x, this.width - half), MARGIN.top - 11, "middle");
      group.setAttribute("class", marked ? "mark marked" : "mark");
      group.dataset.version = version;
    }
  }

  point(event) {
    if (!this.points.length) return;
    const x = event.clientX - this.plot.getBoundingClientRect().left;
    let nearest = 0;
    this.points.forEach((p, i) => {
      if (Math.abs(this.x(p) - x) < Math.abs(this.x(this.points[nearest]) - x)) nearest = i;
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
    this.readout.textContent = this.describe(this.points[this.cursor]).join(", ");
  }

  leave() {
    this.cursor = null;
    this.tip.hidden = true;
    this.cross.setAttribute("visibility", "hidden");
  }

  drawCursor() {
    const p = this.points[this.cursor];
    const [x, y] = [round(this.x(p)), round(this.y(p[MEAN]))];
    this.cross.setAttribute("visibility", "visible");
    set(this.crossLine, { x1: x, x2: x, y1: MARGIN.top, y2: this.height - MARGIN.bottom });
    place(this.crossDot, x, y);
    const lines = this.describe(p);
    const parts = pool(this.tip, lines.length, () => "p", document.createElement.bind(document));
    lines.forEach((text, i) => (parts[i].textContent = text));
    this.tip.hidden = false;
    const room = this.width - this.tip.offsetWidth;
    const side = x + 16 > room ? x - 16 - this.tip.offsetWidth : x + 16;
    const up = Math.min(Math.max(y - this.tip.offsetHeight / 2, 0), this.height - this.tip.offsetHeight);
    this.tip.style.transform = `translate(${Math.max(0, Math.min(side, room))}px, ${up}px)`;
  }

  describe(p) {
    return [
      `mean ${number(p[MEAN])}`,
      `${number(p[LOW])} to ${number(p[HIGH])} in ${plural(p[EPISODES], "episode")}`,
      p[VERSION] === null ? "played without a bot" : `played with v${p[VERSION]}`,
      `${this.domain[1] - this.domain[0] > DAY ? day(p[TIME]) + " " : ""}${clock(p[TIME])}, ${count(p[STEPS])} steps`,
    ];
  }

  summary() {
    const [first, last] = [this.points[0], this.points.at(-1)];
    return (
      `Mean return per episode, from ${number(first[MEAN])} to ${number(last[MEAN])} ` +
      `over ${count(last[STEPS])} steps; ${plural(this.versions.length, "version")} published.`
    );
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

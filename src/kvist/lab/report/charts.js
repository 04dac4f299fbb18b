// Lines, stacked areas, bars: SVG made of numbers, moved through by mouse, touch and arrow keys.

const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 8;
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];

function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const colour = (index) => `var(--c${index % COLOURS})`;
const dash = (index) => DASHES[Math.floor(index / COLOURS) % DASHES.length];

// What of a text of 12 pixels has room, with an ellipsis if that is not all; nothing where it would be a letter or two.
function fitted(text, width) {
  const room = Math.floor(width / 6.6);
  if (room >= text.length) return text;
  return room >= 5 ? `${text.slice(0, room - 1)}…` : "";
}

const percent = (value) => `${(100 * value).toFixed(1)} %`;
const tickPercent = (value) => `${+(100 * value).toPrecision(3)} %`;
const whole = (value) => Math.round(value).toLocaleString("en");
function short(value) {
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (value >= size) return `${+(value / size).toPrecision(3)}${unit}`;
  }
  return `${+value.toPrecision(3)}`;
}
// How times up to the longest one are told: in what unit, with ticks at multiples of it.
function timesUpTo(seconds) {
  const [unit, size] = seconds >= 7200 ? ["h", 3600] : seconds >= 120 ? ["min", 60] : ["s", 1];
  const text = (value) => `${+(value / size).toPrecision(3)} ${unit}`;
  return { xLabel: "time", xText: text, xUnit: size };
}

function niceTicks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough) || 10 * power;
  const ticks = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) ticks.push(at);
  return ticks;
}

function logTicks(low, high, count) {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
  const step = Math.max(1, Math.ceil((last - first + 1) / count));
  const ticks = [];
  for (let power = first; power <= last; power += step) ticks.push(10 ** power);
  return ticks.length > 1 ? ticks : [low, high];
}

class Scale {
  constructor(low, high, from, to, isLog, unit = 1) {
    this.unit = unit;
    this.low = low; this.high = high > low ? high : low + 1; this.from = from; this.to = to; this.isLog = isLog;
  }
  at(value) {
    const [low, high, given] = this.isLog
      ? [Math.log(this.low), Math.log(this.high), Math.log(Math.max(value, this.low))]
      : [this.low, this.high, value];
    return this.from + ((given - low) / (high - low)) * (this.to - this.from);
  }
  ticks(count) {
    if (this.isLog) return logTicks(this.low, this.high, count);
    return niceTicks(this.low / this.unit, this.high / this.unit, count).map((tick) => tick * this.unit);
  }
}

// A frame with axes; what is drawn in it is told by the kind of chart.
class Frame {
  constructor(width, height, spec) {
    this.width = width; this.height = height;
    this.left = 52; this.right = width - 12; this.top = 12; this.bottom = height - 44;
    this.x = new Scale(spec.xLow, spec.xHigh, this.left, this.right, spec.isLog, spec.xUnit);
    this.y = new Scale(0, spec.yHigh, this.bottom, this.top, false);
    this.svg = draw("svg", {
      viewBox: `0 0 ${width} ${height}`, width, height, tabindex: 0, role: "img", "aria-label": spec.name,
    });
    this.grid(spec);
  }
  grid(spec) {
    const lines = draw("g", { class: "grid" }), axis = draw("g", { class: "axis" });
    for (const tick of this.y.ticks(5)) {
      const y = this.y.at(tick);
      lines.append(draw("line", { x1: this.left, x2: this.right, y1: y, y2: y }));
      axis.append(draw("text", { x: this.left - 6, y: y + 4, "text-anchor": "end" }, spec.yText(tick)));
    }
    for (const tick of this.x.ticks(Math.max(2, Math.floor((this.right - this.left) / 90)))) {
      const x = this.x.at(tick);
      const anchor = x > this.right - 16 ? "end" : x < this.left + 8 ? "start" : "middle";
      axis.append(draw("line", { x1: x, x2: x, y1: this.bottom, y2: this.bottom + 4 }));
      axis.append(draw("text", { x, y: this.bottom + 17, "text-anchor": anchor }, spec.xText(tick)));
    }
    axis.append(draw("path", { d: `M${this.left} ${this.bottom}H${this.right}`, fill: "none" }));
    axis.append(
      draw("text", { x: (this.left + this.right) / 2, y: this.height - 8, "text-anchor": "middle" }, spec.xLabel));
    this.svg.append(lines, axis);
  }
}

// The value of a step or line at x: that of the last point that is not beyond it.
function valueAt(series, x) {
  let low = -1, high = series.x.length - 1;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (series.x[middle] <= x) low = middle; else high = middle - 1;
  }
  return low < 0 ? null : series.y[low];
}

function path(frame, xs, ys) {
  return xs.map((x, at) => `${at ? "L" : "M"}${frame.x.at(x).toFixed(1)} ${frame.y.at(ys[at]).toFixed(1)}`).join("");
}

function band(frame, xs, lows, highs) {
  const back = [...xs.keys()].reverse();
  const lower = back.map((at) => `L${frame.x.at(xs[at]).toFixed(1)} ${frame.y.at(lows[at]).toFixed(1)}`).join("");
  return `${path(frame, xs, highs)}${lower}Z`;
}

// series: [{name, x, y, error?, isPoints?}]; spec: {name, xLabel, xText, yText, isLog, isStacked, yHigh?}
class Chart {
  constructor(host, series, spec) {
    this.host = host; this.series = series; this.spec = spec; this.hidden = new Set(); this.cursor = null;
    this.figure = make("div");
    this.output = make("output", { "aria-live": "polite" });
    this.host.replaceChildren(this.figure, this.output, this.legend());
    this.output.textContent = this.hint = "Point at the plot, or move through it with the arrow keys, to read values.";
    new ResizeObserver(() => this.render()).observe(this.figure);
    this.render();
  }

  get shown() {
    return this.series.map((each, index) => ({ ...each, index })).filter((each) => !this.hidden.has(each.index));
  }

  legend() {
    const list = make("ul", { class: "legend" });
    this.series.forEach((each, index) => {
      const key = draw("svg", { viewBox: "0 0 26 12", "aria-hidden": "true" }, this.key(each, index));
      const button = make("button", { type: "button", "aria-pressed": "true" }, key, each.name);
      button.addEventListener("click", () => {
        if (!this.hidden.delete(index)) this.hidden.add(index);
        button.setAttribute("aria-pressed", String(!this.hidden.has(index)));
        this.render();
      });
      list.append(make("li", {}, button));
    });
    return list;
  }

  key(each, index) {
    if (this.spec.isStacked) return draw("rect", { width: 26, height: 12, rx: 2, fill: colour(index) });
    if (each.isPoints) return marker(13, 6, index);
    return draw("path", { d: "M0 6H26", stroke: colour(index), "stroke-width": 3, "stroke-dasharray": dash(index) });
  }

  bounds() {
    const shown = this.shown.length ? this.shown : this.series;
    const xs = shown.flatMap((each) => each.x);
    const yHigh = this.spec.yHigh || Math.max(...this.stacked(shown).flatMap((each) => each.high), 1e-9) * 1.05;
    return { xLow: Math.min(...xs), xHigh: Math.max(...xs), yHigh };
  }

  stacked(shown) {
    let below = null;
    return shown.map((each) => {
      if (!this.spec.isStacked) return { ...each, high: each.error ? each.y.map((y, at) => y + each.error[at]) : each.y };
      const low = below || each.y.map(() => 0);
      const high = each.y.map((y, at) => y + low[at]);
      below = high;
      return { ...each, low, high };
    });
  }

  render() {
    const width = Math.round(this.figure.clientWidth);
    if (!width) return;
    const hadFocus = this.frame && document.activeElement === this.frame.svg;
    const height = Math.round(Math.min(Math.max(width * 0.5, 220), 380));
    this.frame = new Frame(width, height, { ...this.spec, ...this.bounds() });
    const layers = this.stacked(this.shown);
    for (const layer of layers) this.drawLayer(layer);
    this.marks = draw("g");
    this.frame.svg.append(this.marks);
    this.listen();
    this.figure.replaceChildren(this.frame.svg);
    if (hadFocus) this.frame.svg.focus();
    if (this.cursor !== null) this.point(this.cursor);
  }

  drawLayer(layer) {
    const { svg } = this.frame, stroke = colour(layer.index);
    if (this.spec.isStacked) {
      svg.append(draw("path", { class: "area", d: band(this.frame, layer.x, layer.low, layer.high), fill: stroke, "fill-opacity": 0.8 }));
      return;
    }
    if (layer.isPoints) {
      layer.x.forEach((x, at) => svg.append(marker(this.frame.x.at(x), this.frame.y.at(layer.y[at]), layer.index)));
      return;
    }
    if (layer.error) {
      const lows = layer.y.map((y, at) => Math.max(y - layer.error[at], 0));
      svg.append(draw("path", { d: band(this.frame, layer.x, lows, layer.high), fill: stroke, "fill-opacity": 0.18 }));
    }
    const line = { class: "line", d: path(this.frame, layer.x, layer.y), fill: "none", stroke, "stroke-width": 2.2 };
    svg.append(draw("path", { ...line, "stroke-dasharray": dash(layer.index), "stroke-linejoin": "round" }));
  }

  listen() {
    const { svg } = this.frame;
    const pointed = (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * this.frame.width;
      this.point(this.nearest(x));
    };
    svg.addEventListener("pointermove", pointed);
    svg.addEventListener("pointerdown", pointed);
    svg.addEventListener("keydown", (event) => {
      const xs = this.places(), at = xs.indexOf(this.cursor);
      const to = {
        ArrowRight: Math.min(at + 1, xs.length - 1), ArrowLeft: at < 0 ? xs.length - 1 : Math.max(at - 1, 0),
        Home: 0, End: xs.length - 1, PageDown: Math.min(at + 10, xs.length - 1), PageUp: Math.max(at - 10, 0),
      }[event.key];
      if (to === undefined || !xs.length) return;
      event.preventDefault();
      this.point(xs[to]);
    });
  }

  places() {
    return [...new Set(this.shown.flatMap((each) => each.x))].sort((one, other) => one - other);
  }

  nearest(pixel) {
    let best = null, least = Infinity;
    for (const x of this.places()) {
      const far = Math.abs(this.frame.x.at(x) - pixel);
      if (far < least) [best, least] = [x, far];
    }
    return best;
  }

  point(x) {
    this.cursor = x;
    this.marks.replaceChildren();
    if (x === null) return;
    const at = this.frame.x.at(x);
    this.marks.append(draw("line", { class: "cursor", x1: at, x2: at, y1: this.frame.top, y2: this.frame.bottom }));
    const told = [];
    for (const layer of this.stacked(this.shown)) {
      const value = layer.isPoints ? layer.y[layer.x.indexOf(x)] ?? null : valueAt(layer, x);
      if (value === null) continue;
      const error = layer.error ? valueAt({ x: layer.x, y: layer.error }, x) : null;
      told.push(`${layer.name} ${(this.spec.yRead || this.spec.yText)(value)}${error === null ? "" : ` ± ${percent(error)}`}`);
      if (!this.spec.isStacked && !layer.isPoints) {
        this.marks.append(draw("circle", { cx: at, cy: this.frame.y.at(value), r: 4, fill: colour(layer.index) }));
      }
    }
    this.output.textContent = `${(this.spec.xRead || this.spec.xText)(x)}: ${told.join(", ")}`;
  }
}

function marker(x, y, index) {
  const r = 5, shapes = [
    `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}Z`, `M${x} ${y - r}L${x + r} ${y + r}H${x - r}Z`,
    `M${x} ${y - r}L${x + r} ${y}L${x} ${y + r}L${x - r} ${y}Z`, `M${x - r} ${y - r}H${x + r}L${x} ${y + r}Z`,
  ];
  return draw("path", { class: "point", d: shapes[index % shapes.length], fill: colour(index), stroke: "var(--card)" });
}

// Bars: [{name, parts: [number]}] to the right, one row each, with parts of the whole; parts have names and colours.
class Bars {
  constructor(host, rows, parts, spec) {
    this.rows = rows; this.parts = parts; this.spec = spec;
    this.figure = make("div");
    this.output = make("output", { "aria-live": "polite" });
    this.output.textContent = "Point at a bar, or move through the bars with the arrow keys, to read values.";
    const keys = make("div", { class: "legend" }, ...parts.map((part, index) => make("span", { class: "key" },
      draw("svg", { viewBox: "0 0 26 12", "aria-hidden": "true" }, draw("rect", { width: 26, height: 12, rx: 2, fill: colour(index) })),
      part)));
    host.replaceChildren(this.figure, this.output, keys);
    new ResizeObserver(() => this.render()).observe(this.figure);
    this.render();
  }

  render() {
    const width = Math.round(this.figure.clientWidth), rowHeight = 44;
    if (!width) return;
    const height = this.rows.length * rowHeight + 8;
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, tabindex: 0, role: "img", "aria-label": this.spec.name });
    const most = Math.max(...this.rows.map((row) => sum(row.parts)), 1);
    this.cells = [];
    this.rows.forEach((row, at) => this.drawRow(svg, row, 4 + at * rowHeight, width / most));
    svg.addEventListener("keydown", (event) => this.moved(event));
    this.figure.replaceChildren(svg);
  }

  drawRow(svg, row, top, scale) {
    svg.append(draw("text", { class: "label", x: 0, y: top + 13 }, fitted(row.name, this.figure.clientWidth)));
    let left = 0;
    row.parts.forEach((value, part) => {
      if (!value) return;
      const share = value / Math.max(sum(row.parts), 1);
      const text = `${row.name}: ${this.parts[part]} ${this.spec.text(value)} (${percent(share)})`;
      const bar = draw("rect", { class: "bar", x: left * scale, y: top + 19, width: Math.max(value * scale, 0.5), height: 18, fill: colour(part) });
      bar.addEventListener("pointerenter", () => this.tell(this.cells.findIndex((cell) => cell.bar === bar)));
      bar.addEventListener("pointerdown", () => this.tell(this.cells.findIndex((cell) => cell.bar === bar)));
      this.cells.push({ bar, text });
      svg.append(bar);
      left += value;
    });
  }

  moved(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step || !this.cells.length) return;
    event.preventDefault();
    const at = this.at === undefined ? (step > 0 ? 0 : this.cells.length - 1) : this.at + step;
    this.tell(Math.min(Math.max(at, 0), this.cells.length - 1));
  }

  tell(at) {
    this.at = at;
    this.cells.forEach((cell, index) => {
      if (index === at) cell.bar.setAttribute("stroke", "var(--text)"); else cell.bar.removeAttribute("stroke");
    });
    this.output.textContent = this.cells[at].text;
  }
}

// Columns: [{name, value, text}] upwards, for a distribution.
class Columns {
  constructor(host, columns, spec) {
    this.columns = columns; this.spec = spec;
    this.figure = make("div");
    this.output = make("output", { "aria-live": "polite" });
    this.output.textContent = "Point at a column, or move through the columns with the arrow keys, to read values.";
    host.replaceChildren(this.figure, this.output);
    new ResizeObserver(() => this.render()).observe(this.figure);
    this.render();
  }

  render() {
    const width = Math.round(this.figure.clientWidth);
    if (!width) return;
    const height = Math.round(Math.min(Math.max(width * 0.5, 220), 380));
    const yHigh = Math.max(...this.columns.map((each) => each.value), 1e-9) * 1.05;
    const spec = { ...this.spec, xLow: 0, xHigh: this.columns.length, yHigh, xText: () => "" };
    this.frame = new Frame(width, height, spec);
    const step = (this.frame.right - this.frame.left) / this.columns.length;
    const every = Math.ceil(52 / step);
    this.cells = this.columns.map((each, at) => {
      const y = this.frame.y.at(each.value), x = this.frame.left + at * step;
      const bar = draw("rect", { class: "bar", x: x + step * 0.08, width: step * 0.84, y, height: this.frame.bottom - y, fill: colour(each.colour || 0) });
      bar.addEventListener("pointerenter", () => this.tell(at));
      bar.addEventListener("pointerdown", () => this.tell(at));
      this.frame.svg.append(bar);
      if (at % every === 0) {
        this.frame.svg.append(draw("text", { class: "label", x: x + step / 2, y: this.frame.bottom + 17, "text-anchor": "middle" }, each.name));
      }
      return { bar, text: each.text };
    });
    this.frame.svg.addEventListener("keydown", (event) => Bars.prototype.moved.call(this, event));
    this.figure.replaceChildren(this.frame.svg);
  }

  tell(at) {
    Bars.prototype.tell.call(this, at);
  }
}

const sum = (values) => values.reduce((total, value) => total + value, 0);

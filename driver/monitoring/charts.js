"use strict";
// Charts of the live page and of the report. Names and texts of a job are set as text, never as HTML.
//
//   Charts.draw(box, points, options)     one chart in box; points: [[time, value], ...] in the order of time
//   Charts.several(box, series, options)  series: [[name, points, more options], ...], of which one chooses some, with
//                                         switches for a log scale and for smoothing
//
// options: clock (a time as text), value (an element for the last value), last (that as text), name, none (a text for
// where there are no points), from, to (times), steps (stairs, not lines), zero (the scale begins at 0), marks (times).
// A pointer above one chart shows the values at that time in all of them, as the arrow keys do.
const Charts = (() => {
  const known = new Map();  // box: what it shows
  const style = {log: false, smooth: 0};  // of the charts of several()
  let at = null;  // the time of which values are shown

  function node(name, type, text) {
    const made = document.createElement(name);
    if (type) made.className = type;
    if (text !== undefined) made.textContent = text;
    return made;
  }
  function path(attributes) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", "path");
    for (const name in attributes) made.setAttribute(name, attributes[name]);
    return made;
  }
  function number(x) {
    if (x === null || x === undefined) return "–";
    const size = Math.abs(x);
    if (size !== 0 && (size < 1e-4 || size >= 1e7)) return x.toExponential(2);
    if (Number.isInteger(x)) return x.toLocaleString("en");
    return size >= 1000 ? Math.round(x).toLocaleString("en") : x.toPrecision(4).replace(/\.?0+$/, "");
  }

  // Values smoothed as TensorBoard does it: an exponential moving average that begins at the first value (debiased).
  function smoothed(values, weight) {
    const constant = values.every(value => value === values[0]);
    let last = 0, count = 0;
    return values.map(value => {
      if (constant || !Number.isFinite(value)) return value;
      last = last * weight + (1 - weight) * value;
      count += 1;
      return weight < 1 ? last / (1 - weight ** count) : last;
    });
  }

  function make(box) {
    const it = {plot: node("div", "plot"), svg: document.createElementNS("http://www.w3.org/2000/svg", "svg"), cursor: node("div", "cursor"),
      tip: node("div", "tip"), labels: node("div", "labels"), axis: node("div", "axis"), view: null};
    for (const [name, value] of Object.entries({class: "chart", preserveAspectRatio: "none", viewBox: "0 0 1000 100", role: "img", tabindex: "0"}))
      it.svg.setAttribute(name, value);
    it.cursor.hidden = it.tip.hidden = true;
    it.plot.append(it.svg, it.labels, it.cursor, it.tip);
    box.append(it.plot, it.axis);
    const under = event => {
      const {left, width} = it.svg.getBoundingClientRect();
      if (it.view) look(it.view.from + (event.clientX - left) / width * (it.view.to - it.view.from));
    };
    it.svg.addEventListener("pointermove", under);
    it.svg.addEventListener("pointerdown", under);
    it.svg.addEventListener("pointerleave", () => look(null));
    it.svg.addEventListener("blur", () => look(null));
    it.svg.addEventListener("keydown", event => {
      const way = {ArrowLeft: -1, ArrowRight: 1}[event.key];
      if (!way || !it.view) return;
      const {items} = it.view, now = at === null ? (way > 0 ? -1 : items.length) : nearest(it, at);
      look(items[Math.min(Math.max(now + way, 0), items.length - 1)][0]);
      event.preventDefault();
    });
    known.set(box, it);
    return it;
  }

  function look(time) {
    at = time;
    for (const it of known.values()) tell(it);
  }

  // The number of the point that counts at a time: of stairs the last before it, and else the nearest.
  function nearest(it, time) {
    const {items} = it.view;
    let low = 0, high = items.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (items[middle][0] <= time) low = middle; else high = middle - 1;
    }
    const later = items[low + 1];
    return !it.options.steps && later && later[0] - time < time - items[low][0] ? low + 1 : low;
  }

  function tell(it) {
    const view = it.view, within = view && at !== null && at >= view.from && at <= view.to;
    it.cursor.hidden = it.tip.hidden = !within;
    if (!within) return;
    const [time, value, smooth] = view.items[nearest(it, at)], shown = it.options.steps ? at : time;
    const left = 100 * (shown - view.from) / (view.to - view.from);
    it.cursor.style.left = left + "%";
    it.tip.style.left = left + "%";
    it.tip.classList.toggle("before", left > 50);
    it.tip.textContent = it.options.clock(shown) + "  " + number(value) + (view.smooth ? ", smoothed " + number(smooth) : "");
  }

  function draw(box, points, options) {
    const it = known.get(box) || make(box), {log, smooth} = options.styled ? style : {log: false, smooth: 0};
    it.options = options;
    const last = points[points.length - 1];
    if (options.value) options.value.textContent = last ? (options.last || number)(last[1]) : "";
    const averages = smooth ? smoothed(points.map(point => point[1]), smooth) : points.map(point => point[1]);
    const all = points.map(([time, value], index) => [time, value, averages[index]]);
    const items = log ? all.filter(item => item[1] > 0 && item[2] > 0) : all;
    it.view = null;
    if (!items.length) {
      const none = points.length ? "no value above 0 for the log scale" : options.none;
      it.svg.replaceChildren(); it.labels.replaceChildren(); it.axis.replaceChildren(node("span", "", none));
      it.svg.setAttribute("aria-label", none);
      tell(it);
      return;
    }
    let from = options.from === undefined ? items[0][0] : options.from, to = Math.max(options.to === undefined ? items[0][0] : options.to, items[items.length - 1][0]);
    let low = options.zero && !log ? 0 : Infinity, high = -Infinity;
    for (const item of items) { low = Math.min(low, item[1]); high = Math.max(high, item[1]); }
    if (high <= low && log) { low /= 2; high *= 2; }
    if (high <= low) { high = low + (Math.abs(low) || 1) * .5; if (!options.zero) low -= (Math.abs(low) || 1) * .5; }
    if (to <= from) from = to - 1;
    const scaled = log ? Math.log10 : value => value, bottom = scaled(low), top = scaled(high);
    const X = time => (1000 * (time - from) / (to - from)).toFixed(1), Y = value => (94 - 88 * (scaled(value) - bottom) / (top - bottom)).toFixed(1);
    const line = which => {
      let d = "M" + X(items[0][0]) + " " + Y(items[0][which]);
      for (const item of items.slice(1)) d += options.steps ? "H" + X(item[0]) + "V" + Y(item[which]) : "L" + X(item[0]) + " " + Y(item[which]);
      return options.steps || items.length === 1 ? d + "H1000" : d;
    };
    const main = line(smooth ? 2 : 1), marks = (options.marks || []).filter(time => time >= from && time <= to);
    it.svg.replaceChildren(path({class: "grid", d: "M0 6H1000M0 50H1000M0 94H1000"}),
      ...(marks.length ? [path({class: "mark", d: marks.map(time => "M" + X(time) + " 0V100").join("")})] : []),
      ...(smooth ? [path({class: "raw", d: line(1)})] : [path({class: "under", d: main + "V100H" + X(items[0][0]) + "Z"})]), path({d: main}));
    it.svg.setAttribute("aria-label", options.name + ": from " + number(items[0][1]) + " to " + number(last[1]) + ", between " + number(low) + " and " + number(high));
    it.labels.replaceChildren(...[high, log ? 10 ** ((top + bottom) / 2) : (high + low) / 2, low].map(value => node("span", "", number(value))));
    const left = all.length - items.length;
    it.axis.replaceChildren(node("span", "", options.clock(from)), node("span", "", left ? left + " of 0 or less left out" : ""), node("span", "", options.clock(to)));
    it.view = {items, from, to, smooth};
    tell(it);
  }

  function several(box, series, options) {
    let it = known.get(box);
    if (!it) {
      it = {several: true, tools: node("div", "tools charts-tools"), names: node("span", "names"), grid: node("div", "charts-grid"), boxes: new Map(), view: null,
        cursor: {}, tip: {}};
      const log = node("input"), slider = node("input"), shown = node("output", "", "0");
      log.type = "checkbox"; slider.type = "range"; slider.min = 0; slider.max = .99; slider.step = .01; slider.value = 0;
      log.name = "log"; slider.name = "smoothing";
      const first = node("label", "", ""), second = node("label", "", "smoothing ");
      first.append(log, " log scale"); second.append(slider, " ", shown);
      const again = () => several(box, it.series, it.options);
      log.addEventListener("change", () => { style.log = log.checked; again(); });
      slider.addEventListener("input", () => { style.smooth = Number(slider.value); shown.textContent = style.smooth.toFixed(2); again(); });
      it.tools.append(it.names, first, second);
      box.append(it.tools, it.grid);
      known.set(box, it);
      it.again = again;
    }
    it.series = series; it.options = options;
    it.tools.hidden = !series.length;
    for (const [name] of series) if (!it.boxes.has(name)) {
      const figure = node("figure"), caption = node("figcaption", "", name + " "), value = node("b"), tick = node("input"), label = node("label");
      tick.type = "checkbox"; tick.value = name; tick.checked = it.boxes.size < options.shown;
      tick.addEventListener("change", it.again);
      label.append(tick, " " + name);
      caption.append(value); figure.append(caption);
      it.boxes.set(name, {figure, value, tick, label});
    }
    const names = new Set(series.map(each => each[0]));
    for (const [name, each] of it.boxes) if (!names.has(name)) { each.figure.remove(); each.label.remove(); known.delete(each.figure); it.boxes.delete(name); }
    const put = (parent, child, index) => { if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] || null); };
    for (const [index, [name, points, more]] of series.entries()) {
      const {figure, value, tick, label} = it.boxes.get(name);
      figure.hidden = !tick.checked;
      put(it.names, label, index);  // moved only if it has to be: one that moves loses the focus
      put(it.grid, figure, index);
      if (tick.checked) draw(figure, points, {...options, ...more, name, value, styled: true});
      else if (known.has(figure)) known.get(figure).view = null;
    }
  }

  return {number, smoothed, draw, several};
})();
